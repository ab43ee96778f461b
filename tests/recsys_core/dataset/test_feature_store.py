"""Features of users, items and events, and their lookups in a batch.

Shapes: B queries, E events, U users.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_core.dataset.batch import Assembler, Batch
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import UNPOOLED, FeatureStore, feature_form
from recsys_core.dataset.loader import ExampleSource, RankShare, TrainLoader, query_batch
from recsys_core.ingest.features.config import FeaturesConfig
from recsys_core.ingest.features.ingest import ingest_features
from recsys_core.manifests import Dataset
from tests.recsys_core.ingest.interactions_with_context import write_interactions
from tests.recsys_core.ingest.parquet_files import write_parquet

NUM_USERS, NUM_ITEMS = 6, 11
VALUES_BY_FEATURE = {
    "user.age": [None if row == 2 else float(10 * row) for row in range(NUM_USERS)],
    "user.likes": [[f"g{index % 4}" for index in range(row)] for row in range(NUM_USERS)],
    "item.brand": [f"b{row % 3}" for row in range(NUM_ITEMS)],
    "item.tags": [[f"t{index}" for index in range(row % 4)] for row in range(NUM_ITEMS)],
}
"""The value of each user or item, by feature."""
WEIGHTS_BY_FEATURE = {
    "user.likes": [[0.5 + index for index in range(row)] for row in range(NUM_USERS)],
    "item.tags": [[1.0 + row + index / 8 for index in range(row % 4)] for row in range(NUM_ITEMS)],
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[EventStore, FeatureStore]:
    """Return the events and the features of a small dataset. User u has 5 + u training, 2 validation and 1 test events."""
    folder = tmp_path_factory.mktemp("features")
    rng = np.random.default_rng(3)
    log = [tuple(rng.integers(0, NUM_ITEMS, num_events).tolist() for num_events in (5 + row, 2, 1)) for row in range(NUM_USERS)]
    num_all_events = sum(len(split_items) for user_events in log for split_items in user_events)
    interactions = write_interactions(
        folder / "log",
        user_ids=list(range(NUM_USERS)),
        item_ids=list(range(NUM_ITEMS)),
        log=log,
        context={"device": [f"d{event}" for event in range(num_all_events)]},  # each event has its own device
        event_weights=[event / 4 for event in range(num_all_events)],
    )
    text_list_type = pa.list_(pa.string())
    weight_columns = {key: pa.array(weights, pa.list_(pa.float64())) for key, weights in WEIGHTS_BY_FEATURE.items()}
    users_path = write_parquet(
        folder / "users.parquet", id=list(range(NUM_USERS)), age=VALUES_BY_FEATURE["user.age"],
        likes=pa.array(VALUES_BY_FEATURE["user.likes"], text_list_type), value_weights=weight_columns["user.likes"],
    )  # fmt: skip
    items_path = write_parquet(
        folder / "items.parquet", id=list(range(NUM_ITEMS)), brand=VALUES_BY_FEATURE["item.brand"],
        tags=pa.array(VALUES_BY_FEATURE["item.tags"], text_list_type), value_weights=weight_columns["item.tags"],
    )  # fmt: skip
    config = FeaturesConfig.model_validate(
        {
            "users": {
                "paths": users_path,
                "id_column": "id",
                "features": [
                    {"name": "age", "kind": "numeric", "boundaries": [15, 35]},
                    {"name": "likes", "kind": "weighted_list", "weight_column": "value_weights"},
                ],
            },
            "items": {
                "paths": items_path,
                "id_column": "id",
                "features": [{"name": "brand"}, {"name": "tags", "kind": "weighted_list", "weight_column": "value_weights"}],
            },
            "context": [{"name": "device"}],
        }
    )
    manifest = ingest_features(
        config, dataset=Dataset(interactions), previous=None, memory_limit="200MB", threads=1, folder=folder / "features"
    )
    return EventStore.open(interactions), FeatureStore.open(manifest)


def loader_of(stores: tuple[EventStore, FeatureStore], *, with_features: bool = True) -> TrainLoader:
    """Return a training loader, which samples all items with equal probability."""
    event_store, feature_store = stores
    assembler = Assembler(user_batch_key=UNPOOLED, features=feature_store if with_features else None)
    return TrainLoader(
        ExampleSource(event_store, assembler, max_history=3),
        batch_size=7,
        rank_share=RankShare(0, 1),
        seed=4,
        num_negatives=5,
        negative_share_I=np.full(NUM_ITEMS, 1 / NUM_ITEMS),
    )


def lists_by_key(jagged: KeyedJaggedTensor, *, of_weights: bool = False) -> dict[str, list[list[float]]]:
    """Return the rows that each sample looks up, by key. If `of_weights` is true, return the weights of these rows instead."""
    return {
        key: [values.tolist() for values in (feature.to_dense_weights() if of_weights else feature.to_dense())]
        for key, feature in jagged.to_dict().items()
    }


def weights_by_item(batch: Batch, key: str) -> list[list[float]]:
    """Return the weights of the feature values of each distinct item."""
    lengths = batch.sparse[UNPOOLED][key].lengths().tolist()
    return [values.tolist() for values in batch.item_feature_weight[key].split(lengths)]


def test_a_batch_has_the_features_of_its_users_events_and_items(stores: tuple[EventStore, FeatureStore]) -> None:
    event_store, feature_store = stores
    loader = loader_of(stores)
    device_rows = feature_store.feature_by_key["context.device"].table_rows
    age_bucket_by_user = [1, 1, 0, 2, 3, 3]  # of the ages 0, 10, None, 30, 40 and 50 with the boundaries 15 and 35
    user_E, event_index_E = event_store.training_events(np.arange(event_store.num_train_events))
    user_by_event = dict(zip(event_index_E.tolist(), user_E.tolist(), strict=True))
    seen_events = []
    for batch in (loader.batch(0, batch_index) for batch_index in range(len(loader))):
        assert batch.loss_weight is not None
        pooled_rows, unpooled_rows = lists_by_key(batch.sparse["pooled"]), lists_by_key(batch.sparse[UNPOOLED])
        like_rows = lists_by_key(batch.sparse["pooled_weighted"])["user.likes"]
        like_weights = lists_by_key(batch.sparse["pooled_weighted"], of_weights=True)["user.likes"]
        assert set(pooled_rows) == {"user.age", "context.device"}
        assert set(unpooled_rows) == {"item", "item.brand", "item.tags", "user"} and set(batch.item_feature_weight) == {
            "item.tags"
        }
        for item_index, item in enumerate(batch.item_row_V.tolist()):
            assert unpooled_rows["item"][item_index] == [item]
            assert unpooled_rows["item.brand"][item_index] == [feature_store.feature_by_key["item.brand"].table_rows[item]]
            assert len(unpooled_rows["item.tags"][item_index]) == len(VALUES_BY_FEATURE["item.tags"][item])
            assert weights_by_item(batch, "item.tags")[item_index] == WEIGHTS_BY_FEATURE["item.tags"][item]
        for sample_index in range(batch.batch_size):
            (user,) = unpooled_rows["user"][sample_index]
            assert pooled_rows["user.age"][sample_index] == [age_bucket_by_user[user]]
            assert len(like_rows[sample_index]) == len(VALUES_BY_FEATURE["user.likes"][user])
            assert like_weights[sample_index] == WEIGHTS_BY_FEATURE["user.likes"][user]
            # Each event has its own device, so the device identifies the event. Weight, item and user must belong to it.
            event = int(np.flatnonzero(device_rows == pooled_rows["context.device"][sample_index])[0])
            assert batch.loss_weight[sample_index].item() == pytest.approx(event / 4 / event_store.mean_weight())
            assert event_store.items_at(np.array([event]))[0] == batch.item_row_V[batch.candidate_index_C[sample_index]]
            assert user_by_event[event] == user
            seen_events.append(event)
    assert len(set(seen_events)) == len(seen_events) == event_store.num_train_events


def test_a_query_has_the_event_features_of_the_first_event_of_the_split(stores: tuple[EventStore, FeatureStore]) -> None:
    event_store, feature_store = stores
    user_B = np.array([4, 1])
    num_events_U, num_train_events_U = 8 + np.arange(NUM_USERS), 5 + np.arange(NUM_USERS)
    first_validation_U = np.cumsum(num_events_U) - num_events_U + num_train_events_U
    for split, first_event_U in (("validation", first_validation_U), ("test", first_validation_U + 2)):
        batch = query_batch(
            event_store, user_B, split, assembler=Assembler(user_batch_key=UNPOOLED, features=feature_store), max_history=2
        )
        expected_rows = feature_store.feature_by_key["context.device"].table_rows[first_event_U[user_B]].tolist()
        assert batch.sparse["pooled"]["context.device"].values().tolist() == expected_rows


def test_each_item_has_the_values_and_weights_of_its_own_list(stores: tuple[EventStore, FeatureStore]) -> None:
    _, feature_store = stores
    jagged, weights = feature_store.feature_by_key["item.tags"].rows_and_weights(np.array([7, 0, 3]))
    # t0 is the most frequent tag and has row 1; t2 is the rarest tag and has row 3.
    assert (jagged.values_L.tolist(), jagged.lengths.tolist()) == ([1, 2, 3, 1, 2, 3], [3, 0, 3])
    assert weights is not None and weights.tolist() == WEIGHTS_BY_FEATURE["item.tags"][7] + WEIGHTS_BY_FEATURE["item.tags"][3]


def test_the_form_of_a_feature_depends_on_its_kind_and_settings(tmp_path: Path) -> None:
    interactions = write_interactions(tmp_path / "log", user_ids=[1], item_ids=[1, 2], log=[([0, 1], [], [1])])
    items_path = write_parquet(
        tmp_path / "items.parquet",
        id=[1, 2],
        price=[1.0, 3.0],
        tags=[["a"], ["b"]],
        value_weights=[[1.0], [2.0]],
        brand=["x", "y"],
    )
    features = [
        {"name": "single", "column": "brand"},
        {"name": "list", "kind": "list", "column": "tags"},
        {"name": "weighted_list", "kind": "weighted_list", "column": "tags", "weight_column": "value_weights"},
        {"name": "number", "kind": "numeric", "column": "price", "standardise": True},
        {"name": "bucket", "kind": "numeric", "column": "price", "buckets": 2},
    ]
    config = FeaturesConfig.model_validate({"items": {"paths": items_path, "id_column": "id", "features": features}})
    manifest = ingest_features(
        config, dataset=Dataset(interactions), previous=None, memory_limit="200MB", threads=1, folder=tmp_path / "features"
    )
    form_by_key = {key: feature_form(feature) for key, feature in manifest.features.items()}
    assert form_by_key == {
        "item.single": "single", "item.list": "list", "item.weighted_list": "weighted_list", "item.number": "number",
        "item.bucket": "single",
    }  # fmt: skip
    store = FeatureStore.read(manifest.folder, {"item.number": "number"})
    assert set(store.feature_by_key) == {"item.number"}
    jagged, weights = store.feature_by_key["item.number"].rows_and_weights(np.array([1, 0]))
    assert jagged.lengths.tolist() == [1, 1]
    assert weights is not None and weights.tolist() == [1.0, -1.0]  # the prices 3 and 1 with mean 2 and standard deviation 1


def test_features_do_not_change_the_users_items_and_histories_of_a_batch(stores: tuple[EventStore, FeatureStore]) -> None:
    batch_with_features, batch_without_features = (
        loader_of(stores).batch(1, 2),
        loader_of(stores, with_features=False).batch(1, 2),
    )
    assert set(batch_without_features.sparse) == {UNPOOLED} and batch_without_features.item_feature_weight == {}
    assert batch_without_features.sparse[UNPOOLED].keys() == ["item", "user"]
    for name in ("item_row_V", "candidate_index_C", "history_index_H", "history_offset"):
        assert torch.equal(getattr(batch_without_features, name), getattr(batch_with_features, name))
    assert (
        lists_by_key(batch_without_features.sparse[UNPOOLED])["user"]
        == lists_by_key(batch_with_features.sparse[UNPOOLED])["user"]
    )


def test_all_tensors_of_a_batch_with_features_move_to_the_device(stores: tuple[EventStore, FeatureStore]) -> None:
    batch = loader_of(stores).batch(0, 0).to(torch.device("meta"))
    assert batch.loss_weight is not None
    weighted_lookups = batch.sparse["pooled_weighted"]
    tensors = [
        weighted_lookups.values(),
        weighted_lookups.weights(),
        weighted_lookups.lengths(),
        batch.loss_weight,
        batch.item_feature_weight["item.tags"],
    ]
    tensors += [batch.item_row_V, batch.candidate_index_C, batch.history_index_H, batch.history_offset]
    tensors += [jagged.values() for jagged in batch.sparse.values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_a_log_without_weights_has_batches_without_loss_weights(tmp_path: Path) -> None:
    interactions = write_interactions(tmp_path / "log", user_ids=[1], item_ids=[1, 2], log=[([0, 1], [], [1])])
    store = EventStore.open(interactions)
    assert store.weights_at(np.arange(3)) is None
    examples = ExampleSource(store, Assembler(user_batch_key=None), max_history=1)
    loader = TrainLoader(examples, batch_size=2, rank_share=RankShare(0, 1), seed=0)
    batch = loader.batch(0, 0)
    assert batch.loss_weight is None and set(batch.sparse) == {UNPOOLED}
