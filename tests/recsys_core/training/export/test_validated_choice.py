"""The weight of a validated popularity term, compared with a ranking of every user by sorting."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from recsys_core.dataset.events import EventStore
from recsys_core.errors import InputError
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.score_config import FixedPopularity, ValidatedPopularity
from recsys_core.models.score_terms import PopularityWeight, item_popularity
from recsys_core.models.spec import ModelSpec
from recsys_core.training.config import ValidationConfig
from recsys_core.training.export.validated_choice import choose_popularity
from tests.recsys_core.evaluation.stage_folders import interactions_stage
from tests.recsys_core.training.export.validation_metric import mean_ndcg

NUM_USERS, NUM_ITEMS, DIM = 60, 40, 8
VALIDATION = ValidationConfig(metric="ndcg", k=5)


class Exported(NamedTuple):
    """The vectors of an export; the last number of an item is its popularity, and that of a query is 0."""

    folder: Path
    store: EventStore
    query: np.ndarray
    item: np.ndarray


@pytest.fixture
def exported_vectors(tmp_path: Path) -> Exported:
    random, folder = np.random.default_rng(5), tmp_path / "export"
    folder.mkdir()
    share_I = random.dirichlet(np.full(NUM_ITEMS, 0.4)) * 0.95 + 0.05 / NUM_ITEMS
    events = [random.choice(NUM_ITEMS, 12, replace=False, p=share_I).tolist() for _ in range(NUM_USERS)]
    parts = {name: [rows[start:end] for rows in events] for name, start, end in (("train", 0, 8), ("test", 10, 12))}
    manifest = interactions_stage(tmp_path / "log", validation=[rows[8:10] for rows in events], num_items=NUM_ITEMS, **parts)
    store = EventStore.open(manifest)
    query, item = (random.normal(size=(count, DIM)).astype(np.float32) for count in (NUM_USERS, NUM_ITEMS))
    query, item = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (query, item))
    query = np.column_stack([query, np.zeros(NUM_USERS, np.float32)])
    item = np.column_stack([item, item_popularity(store.train_count_I)])
    np.save(folder / "item_vectors.npy", item)
    for split in ("validation", "test"):
        np.save(folder / f"query_vectors_{split}.npy", query)
        np.save(folder / f"query_users_{split}.npy", np.arange(NUM_USERS))
    return Exported(folder, store, query, item)


def spec_of(**popularity: Any) -> ModelSpec:
    config = TwoTowerConfig.model_validate({"embedding_dim": DIM, "popularity": {"kind": "validated", **popularity}})
    return ModelSpec.sized(config, num_users=NUM_USERS, num_items=NUM_ITEMS)


@pytest.mark.parametrize("weights", [(0.0, 0.4, 4.0), (-0.5, 0.0), (0.3,)])
def test_the_weight_with_the_best_metric_is_in_all_queries(exported_vectors: Exported, weights: tuple[float, ...]) -> None:
    metric_by_weight = {}
    for weight in weights:
        score_UI = exported_vectors.query @ exported_vectors.item.T + weight * exported_vectors.item[:, -1]
        metric_by_weight[weight] = mean_ndcg(score_UI, store=exported_vectors.store, k=5)
    assert len({*metric_by_weight.values()}) == len(weights)
    expected = max(metric_by_weight, key=lambda weight: metric_by_weight[weight])
    chosen = choose_popularity(
        spec_of(weights=weights), store=exported_vectors.store, validation=VALIDATION, folder=exported_vectors.folder
    )
    assert chosen == expected
    for split in ("validation", "test"):
        query = np.load(exported_vectors.folder / f"query_vectors_{split}.npy")
        assert (query[:, -1] == np.float32(chosen)).all() and np.array_equal(query[:, :-1], exported_vectors.query[:, :-1])


def test_several_weights_need_validation_events(exported_vectors: Exported) -> None:
    with pytest.raises(InputError, match=r"popularity.weights has 6 values, but there are no validation events"):
        choose_popularity(spec_of(), store=exported_vectors.store, validation=None, folder=exported_vectors.folder)


def test_the_training_sees_no_term_and_the_package_has_the_chosen_weight() -> None:
    query_BD = torch.ones(2, 3)
    term = PopularityWeight(ValidatedPopularity())
    assert not list(term.parameters())
    assert term.train()(query_BD)[:, -1].tolist() == term.eval()(query_BD)[:, -1].tolist() == [0.0, 0.0]
    chosen = spec_of().with_choices(popularity_weight=0.2).config
    assert chosen.popularity == FixedPopularity(weight=0.2) and chosen.output_dim == DIM + 1
