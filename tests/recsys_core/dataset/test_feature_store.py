"""The features of a batch equal the features of its users, events and items."""

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
DESCRIBED = {
    "user.age": [None if row == 2 else float(10 * row) for row in range(NUM_USERS)],
    "user.likes": [[f"g{index % 4}" for index in range(row)] for row in range(NUM_USERS)],
    "item.brand": [f"b{row % 3}" for row in range(NUM_ITEMS)],
    "item.tags": [[f"t{index}" for index in range(row % 4)] for row in range(NUM_ITEMS)],
}
WEIGHT = {
    "user.likes": [[0.5 + index for index in range(row)] for row in range(NUM_USERS)],
    "item.tags": [[1.0 + row + index / 8 for index in range(row % 4)] for row in range(NUM_ITEMS)],
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[EventStore, FeatureStore]:
    folder = tmp_path_factory.mktemp("features")
    rng = np.random.default_rng(3)
    log = [tuple(rng.integers(0, NUM_ITEMS, size).tolist() for size in (5 + row, 2, 1)) for row in range(NUM_USERS)]
    events = sum(len(part) for user in log for part in user)
    interactions = write_interactions(
        folder / "log",
        users=list(range(NUM_USERS)),
        items=list(range(NUM_ITEMS)),
        log=log,
        context={"device": [f"d{event}" for event in range(events)]},  # each event has its own
        weight=[event / 4 for event in range(events)],
    )
    text = pa.list_(pa.string())
    weights = {key: pa.array(value, pa.list_(pa.float64())) for key, value in WEIGHT.items()}
    users = write_parquet(
        folder / "users.parquet", id=list(range(NUM_USERS)), age=DESCRIBED["user.age"],
        likes=pa.array(DESCRIBED["user.likes"], text), much=weights["user.likes"],
    )  # fmt: skip
    items = write_parquet(
        folder / "items.parquet", id=list(range(NUM_ITEMS)), brand=DESCRIBED["item.brand"],
        tags=pa.array(DESCRIBED["item.tags"], text), much=weights["item.tags"],
    )  # fmt: skip
    config = FeaturesConfig.model_validate(
        {
            "users": {
                "paths": users,
                "id_column": "id",
                "features": [
                    {"name": "age", "kind": "numeric", "boundaries": [15, 35]},
                    {"name": "likes", "kind": "weighted_list", "weight_column": "much"},
                ],
            },
            "items": {
                "paths": items,
                "id_column": "id",
                "features": [{"name": "brand"}, {"name": "tags", "kind": "weighted_list", "weight_column": "much"}],
            },
            "context": [{"name": "device"}],
        }
    )
    stage = ingest_features(
        config, dataset=Dataset(interactions), previous=None, memory_limit="200MB", threads=1, folder=folder / "features"
    )
    return EventStore.open(interactions), FeatureStore.open(stage)


def loader_of(stores: tuple[EventStore, FeatureStore], *, with_features: bool = True) -> TrainLoader:
    store, features = stores
    assembler = Assembler(user_batch_key=UNPOOLED, features=features if with_features else None)
    return TrainLoader(
        ExampleSource(store, assembler, max_history=3),
        batch_size=7,
        rank_share=RankShare(0, 1),
        seed=4,
        num_negatives=5,
        negative_share_I=np.full(NUM_ITEMS, 1 / NUM_ITEMS),
    )


def samples(jagged: KeyedJaggedTensor, *, weights: bool = False) -> dict[str, list[list[float]]]:
    """Return, for each key, the rows (or their weights) of each sample."""
    samples_by_key = {}
    for key, feature in jagged.to_dict().items():
        parts = feature.to_dense_weights() if weights else feature.to_dense()
        samples_by_key[key] = [part.tolist() for part in parts]
    return samples_by_key


def per_item(batch: Batch, key: str) -> list[list[float]]:
    """Return the weights of the values of each distinct item."""
    lengths = batch.sparse[UNPOOLED][key].lengths().tolist()
    return [part.tolist() for part in batch.item_feature_weight[key].split(lengths)]


def test_each_query_has_the_features_of_its_user_and_event_and_each_item_its_own(
    stores: tuple[EventStore, FeatureStore],
) -> None:
    store, features = stores
    loader = loader_of(stores)
    device = features.feature_by_key["context.device"].table_rows
    training_user, training_position = store.training_events(np.arange(store.num_train_events))
    user_of = dict(zip(training_position.tolist(), training_user.tolist(), strict=True))
    positions = []
    for batch in (loader.batch(0, number) for number in range(len(loader))):
        assert batch.loss_weight is not None
        query, likes = samples(batch.sparse["pooled"]), samples(batch.sparse["pooled_weighted"])["user.likes"]
        like_weights, items = (
            samples(batch.sparse["pooled_weighted"], weights=True)["user.likes"],
            samples(batch.sparse[UNPOOLED]),
        )
        assert set(query) == {"user.age", "context.device"}
        assert set(items) == {"item", "item.brand", "item.tags", "user"} and set(batch.item_feature_weight) == {"item.tags"}
        for place, item in enumerate(batch.item_row_V.tolist()):
            assert items["item"][place] == [item]
            assert items["item.brand"][place] == [features.feature_by_key["item.brand"].table_rows[item]]
            assert len(items["item.tags"][place]) == len(DESCRIBED["item.tags"][item])
            assert per_item(batch, "item.tags")[place] == WEIGHT["item.tags"][item]
        for sample in range(batch.batch_size):
            (user,) = items["user"][sample]
            assert query["user.age"][sample] == [{0: 1, 1: 1, 2: 0, 3: 2, 4: 3, 5: 3}[user]]
            assert len(likes[sample]) == len(DESCRIBED["user.likes"][user])
            assert like_weights[sample] == WEIGHT["user.likes"][user]
            # The device tells the event; its weight and its item have to be of the same one.
            positions.append(int(np.flatnonzero(device == query["context.device"][sample])[0]))
            assert batch.loss_weight[sample].item() == pytest.approx(positions[-1] / 4 / store.mean_weight())
            assert store.items_at(np.array(positions[-1:]))[0] == batch.item_row_V[batch.candidate_index_C[sample]]
            assert user_of[positions[-1]] == user
    assert len(set(positions)) == len(positions) == store.num_train_events


def test_a_query_has_the_event_features_of_the_first_event_of_the_split(
    stores: tuple[EventStore, FeatureStore],
) -> None:
    store, features = stores
    users = np.array([4, 1])
    first_event = np.array([sum(8 + row for row in range(user)) for user in range(NUM_USERS)])
    for split, first in (
        ("validation", first_event + 5 + np.arange(NUM_USERS)),
        ("test", first_event + 7 + np.arange(NUM_USERS)),
    ):
        batch = query_batch(store, users, split, assembler=Assembler(user_batch_key=UNPOOLED, features=features), max_history=2)
        expected = features.feature_by_key["context.device"].table_rows[first[users]].tolist()
        assert batch.sparse["pooled"]["context.device"].values().tolist() == expected


def test_lists_keep_their_own_values(stores: tuple[EventStore, FeatureStore]) -> None:
    lists, weight = stores[1].feature_by_key["item.tags"].rows_and_weights(np.array([7, 0, 3]))
    # t0 is the most frequent tag, t2 the rarest.
    assert (lists.values_L.tolist(), lists.lengths.tolist()) == ([1, 2, 3, 1, 2, 3], [3, 0, 3])
    assert weight is not None and weight.tolist() == WEIGHT["item.tags"][7] + WEIGHT["item.tags"][3]


def test_the_form_of_a_feature_follows_its_number_of_values_and_weights(tmp_path: Path) -> None:
    interactions = write_interactions(tmp_path / "log", users=[1], items=[1, 2], log=[([0, 1], [], [1])])
    items = write_parquet(
        tmp_path / "items.parquet", id=[1, 2], price=[1.0, 3.0], tags=[["a"], ["b"]], much=[[1.0], [2.0]], brand=["x", "y"]
    )
    declared = [
        {"name": "single", "column": "brand"},
        {"name": "list", "kind": "list", "column": "tags"},
        {"name": "weighted_list", "kind": "weighted_list", "column": "tags", "weight_column": "much"},
        {"name": "number", "kind": "numeric", "column": "price", "standardise": True},
        {"name": "bucket", "kind": "numeric", "column": "price", "buckets": 2},
    ]
    config = FeaturesConfig.model_validate({"items": {"paths": items, "id_column": "id", "features": declared}})
    stage = ingest_features(
        config, dataset=Dataset(interactions), previous=None, memory_limit="200MB", threads=1, folder=tmp_path / "features"
    )
    forms = {key: feature_form(facts) for key, facts in stage.features.items()}
    assert forms == {
        "item.single": "single", "item.list": "list", "item.weighted_list": "weighted_list", "item.number": "number",
        "item.bucket": "single",
    }  # fmt: skip
    store = FeatureStore.read(stage.folder, {"item.number": "number"})
    assert set(store.feature_by_key) == {"item.number"}
    lists, weight = store.feature_by_key["item.number"].rows_and_weights(np.array([1, 0]))
    assert lists.lengths.tolist() == [1, 1] and weight is not None and weight.tolist() == [1.0, -1.0]


def test_features_change_nothing_else_about_a_batch(stores: tuple[EventStore, FeatureStore]) -> None:
    with_features, without_features = loader_of(stores).batch(1, 2), loader_of(stores, with_features=False).batch(1, 2)
    assert set(without_features.sparse) == {UNPOOLED} and without_features.item_feature_weight == {}
    assert without_features.sparse[UNPOOLED].keys() == ["item", "user"]
    for name in ("item_row_V", "candidate_index_C", "history_index_H", "history_offset"):
        assert torch.equal(getattr(without_features, name), getattr(with_features, name))
    assert samples(without_features.sparse[UNPOOLED])["user"] == samples(with_features.sparse[UNPOOLED])["user"]


def test_the_whole_batch_moves(stores: tuple[EventStore, FeatureStore]) -> None:
    batch = loader_of(stores).batch(0, 0).to(torch.device("meta"))
    assert batch.loss_weight is not None
    weighted = batch.sparse["pooled_weighted"]
    parts = [
        weighted.values(),
        weighted.weights(),
        weighted.lengths(),
        batch.loss_weight,
        batch.item_feature_weight["item.tags"],
    ]
    parts += [batch.item_row_V, batch.candidate_index_C, batch.history_index_H, batch.history_offset]
    parts += [sparse.values() for sparse in batch.sparse.values()]
    assert {part.device.type for part in parts} == {"meta"}


def test_a_log_without_weights_has_none(tmp_path: Path) -> None:
    interactions = write_interactions(tmp_path / "log", users=[1], items=[1, 2], log=[([0, 1], [], [1])])
    store = EventStore.open(interactions)
    assert store.weights_at(np.arange(3)) is None
    examples = ExampleSource(store, Assembler(user_batch_key=None), max_history=1)
    loader = TrainLoader(examples, batch_size=2, rank_share=RankShare(0, 1), seed=0)
    batch = loader.batch(0, 0)
    assert batch.loss_weight is None and set(batch.sparse) == {UNPOOLED}
