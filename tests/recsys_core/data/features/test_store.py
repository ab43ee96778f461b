"""A batch's features are those of its users, events and candidates, sample by sample."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_core.data.events import EventStore
from recsys_core.data.features.config import FeaturesConfig
from recsys_core.data.features.ingest import ingest_features
from recsys_core.data.features.store import FeatureStore
from recsys_core.data.loader import TrainLoader
from tests.recsys_core.data.stages import write_interactions
from tests.recsys_core.data.tables import write

USERS, ITEMS = 6, 11
DESCRIBED = {
    "user.age": [None if row == 2 else float(10 * row) for row in range(USERS)],
    "user.likes": [[f"g{one % 4}" for one in range(row)] for row in range(USERS)],
    "item.brand": [f"b{row % 3}" for row in range(ITEMS)],
    "item.tags": [[f"t{one}" for one in range(row % 4)] for row in range(ITEMS)],
}
WEIGHT = {
    "user.likes": [[0.5 + one for one in range(row)] for row in range(USERS)],
    "item.tags": [[1.0 + row + one / 8 for one in range(row % 4)] for row in range(ITEMS)],
}
KEYS = ("user.age", "user.likes", "item.brand", "item.tags", "context.device")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[EventStore, FeatureStore]:
    folder = tmp_path_factory.mktemp("features")
    rng = np.random.default_rng(3)
    log = [tuple(rng.integers(0, ITEMS, size).tolist() for size in (5 + row, 2, 1)) for row in range(USERS)]
    events = sum(len(part) for user in log for part in user)
    interactions = write_interactions(
        folder / "log",
        users=list(range(USERS)),
        items=list(range(ITEMS)),
        log=log,
        context={"device": [f"d{event}" for event in range(events)]},  # each event has its own
        weight=[event / 4 for event in range(events)],
    )
    text = pa.list_(pa.string())
    weights = {key: pa.array(value, pa.list_(pa.float64())) for key, value in WEIGHT.items()}
    users = write(
        folder / "users.parquet", id=list(range(USERS)), age=DESCRIBED["user.age"],
        likes=pa.array(DESCRIBED["user.likes"], text), much=weights["user.likes"],
    )  # fmt: skip
    items = write(
        folder / "items.parquet", id=list(range(ITEMS)), brand=DESCRIBED["item.brand"],
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
        config, interactions=interactions, previous=None, memory_limit="200MB", threads=1, folder=folder / "features"
    )
    return EventStore.open(interactions), FeatureStore.open(stage)


def loader_of(made: tuple[EventStore, FeatureStore], **settings: Any) -> TrainLoader:
    store, features = made
    return TrainLoader(
        store, **{"batch_size": 7, "rank": 0, "world_size": 1, "seed": 4, "max_history": 3, "features": ("user", "history"),
        "uniform_negatives": 5, "feature_store": features} | settings,
    )  # fmt: skip


def samples(jagged: KeyedJaggedTensor, *, weights: bool = False) -> dict[str, list[list[float]]]:
    return {
        key: [part.tolist() for part in (one.to_dense_weights() if weights else one.to_dense())]
        for key, one in jagged.to_dict().items()
    }


def test_each_sample_has_the_features_of_its_user_event_and_candidate(made: tuple[EventStore, FeatureStore]) -> None:
    store, features = made
    loader = loader_of(made)
    seen: dict[str, dict[Any, list[float]]] = {key: {} for key in KEYS}
    positions = []
    for batch in (loader.make(0, number) for number in range(len(loader))):
        assert batch.weighted is not None and batch.weight is not None
        plain, weighted = samples(batch.sparse), samples(batch.weighted)
        weights = samples(batch.weighted, weights=True)
        assert set(plain) == {"user", "history", "item", "user.age", "item.brand", "context.device"}
        assert set(weighted) == {"user.likes", "item.tags"}
        found = plain | weighted
        for sample, item in enumerate(batch.item_rows.tolist()):
            assert found["item"][sample] == [item]
            seen["item.brand"].setdefault(item, found["item.brand"][sample])
            assert found["item.brand"][sample] == [features.features["item.brand"].row[item]]
            assert weights["item.tags"][sample] == WEIGHT["item.tags"][item]
            assert len(weighted["item.tags"][sample]) == len(DESCRIBED["item.tags"][item])
            if sample >= batch.batch_size:
                assert all(found[key][sample] == [] for key in KEYS if not key.startswith("item."))
                continue
            (user,) = found["user"][sample]
            assert found["user.age"][sample] == [{0: 1, 1: 1, 2: 0, 3: 2, 4: 3, 5: 3}[user]]
            assert weights["user.likes"][sample] == WEIGHT["user.likes"][user]
            # The device tells the event; its weight has to be of the same one.
            (device,) = found["context.device"][sample]
            positions.append(int(np.flatnonzero(features.features["context.device"].row == device)[0]))
            assert batch.weight[sample].item() == positions[-1] / 4
            assert store.event_item[positions[-1]] == item
            assert store.user_offset[user] <= positions[-1] < store.train_end[user]
    assert len(set(positions)) == len(positions) == store.train_events


def test_lists_keep_their_own_values(made: tuple[EventStore, FeatureStore]) -> None:
    lists, weight = made[1].features["item.tags"].at(np.array([7, 0, 3]))
    # t0 is the most frequent tag, t2 the rarest.
    assert (lists.row_T.tolist(), lists.length_N.tolist()) == ([1, 2, 3, 1, 2, 3], [3, 0, 3])
    assert weight is not None and weight.tolist() == WEIGHT["item.tags"][7] + WEIGHT["item.tags"][3]


def test_each_side_has_its_features_with_their_kinds(made: tuple[EventStore, FeatureStore]) -> None:
    sides = {side: {key: facts.kind for key, facts in made[1].of_side(side).items()} for side in ("user", "item", "context")}
    assert sides["user"] == {"user.age": "numeric", "user.likes": "weighted_list"}
    assert sides["item"] == {"item.brand": "categorical", "item.tags": "weighted_list"}
    assert sides["context"] == {"context.device": "categorical"}


def test_without_features_a_batch_is_what_it_was(made: tuple[EventStore, FeatureStore]) -> None:
    with_features, without = loader_of(made).make(1, 2), loader_of(made, feature_store=None).make(1, 2)
    assert without.weighted is None
    assert without.sparse.keys() == ["user", "history", "item"]
    assert torch.equal(without.item_rows, with_features.item_rows)
    assert samples(without.sparse) == {key: samples(with_features.sparse)[key] for key in without.sparse.keys()}  # noqa: SIM118


def test_the_whole_batch_moves(made: tuple[EventStore, FeatureStore]) -> None:
    batch = loader_of(made).make(0, 0).to(torch.device("meta"))
    assert batch.weighted is not None and batch.weight is not None
    parts = (batch.weighted.values(), batch.weighted.weights(), batch.weighted.lengths(), batch.weight, batch.item_rows)
    assert {part.device.type for part in parts} == {"meta"}


def test_a_log_without_weights_has_none(tmp_path: Path) -> None:
    interactions = write_interactions(tmp_path / "log", users=[1], items=[1, 2], log=[([0, 1], [], [1])])
    store = EventStore.open(interactions)
    assert store.event_weight is None
    loader = TrainLoader(
        store, batch_size=2, rank=0, world_size=1, seed=0, max_history=1, features=("history",), uniform_negatives=0
    )
    assert loader.make(0, 0).weight is None
