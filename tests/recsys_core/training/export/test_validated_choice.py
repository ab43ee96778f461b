"""The choice of the weight of a validated popularity term, compared with rankings by sorting."""

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
from tests.recsys_core.evaluation.stage_folders import write_interactions_stage
from tests.recsys_core.training.export.validation_metric import mean_ndcg

NUM_USERS, NUM_ITEMS, DIM = 60, 40, 8
VALIDATION = ValidationConfig(metric="ndcg", k=5)


class ExportedVectors(NamedTuple):
    """The vectors of an export. The last number of an item vector is the popularity, and of a query vector 0."""

    folder: Path
    store: EventStore
    query_vector_UD: np.ndarray
    item_vector_ID: np.ndarray


@pytest.fixture
def exported_vectors(tmp_path: Path) -> ExportedVectors:
    """An export of random vectors, in which some items have more events than others."""
    random, folder = np.random.default_rng(5), tmp_path / "export"
    folder.mkdir()
    probability_I = random.dirichlet(np.full(NUM_ITEMS, 0.4)) * 0.95 + 0.05 / NUM_ITEMS
    items_by_user = [random.choice(NUM_ITEMS, 12, replace=False, p=probability_I).tolist() for _ in range(NUM_USERS)]
    interactions = write_interactions_stage(
        tmp_path / "interactions",
        train=[items[:8] for items in items_by_user],
        validation=[items[8:10] for items in items_by_user],
        test=[items[10:] for items in items_by_user],
        num_items=NUM_ITEMS,
    )
    store = EventStore.open(interactions)
    query_vector_UD, item_vector_ID = (
        random.normal(size=(num_vectors, DIM)).astype(np.float32) for num_vectors in (NUM_USERS, NUM_ITEMS)
    )
    query_vector_UD, item_vector_ID = (
        vector_BD / np.linalg.norm(vector_BD, axis=1, keepdims=True) for vector_BD in (query_vector_UD, item_vector_ID)
    )
    query_vector_UD = np.column_stack([query_vector_UD, np.zeros(NUM_USERS, np.float32)])
    item_vector_ID = np.column_stack([item_vector_ID, item_popularity(store.train_count_I)])
    np.save(folder / "item_vectors.npy", item_vector_ID)
    for split in ("validation", "test"):
        np.save(folder / f"query_vectors_{split}.npy", query_vector_UD)
        np.save(folder / f"query_users_{split}.npy", np.arange(NUM_USERS))
    return ExportedVectors(folder, store, query_vector_UD, item_vector_ID)


def spec_of(**popularity_settings: Any) -> ModelSpec:
    config = TwoTowerConfig.model_validate({"embedding_dim": DIM, "popularity": {"kind": "validated", **popularity_settings}})
    return ModelSpec.sized(config, num_users=NUM_USERS, num_items=NUM_ITEMS)


@pytest.mark.parametrize("weights", [(0.0, 0.4, 4.0), (-0.5, 0.0), (0.3,)])
def test_the_weight_with_the_best_metric_is_written_to_all_queries(
    exported_vectors: ExportedVectors, weights: tuple[float, ...]
) -> None:
    metric_by_weight = {}
    for weight in weights:
        item_vector_ID = exported_vectors.item_vector_ID
        score_UI = exported_vectors.query_vector_UD @ item_vector_ID.T + weight * item_vector_ID[:, -1]
        metric_by_weight[weight] = mean_ndcg(score_UI, store=exported_vectors.store, k=5)
    assert len({*metric_by_weight.values()}) == len(weights)
    best_weight = max(metric_by_weight, key=lambda weight: metric_by_weight[weight])
    chosen_weight = choose_popularity(
        spec_of(weights=weights), store=exported_vectors.store, validation=VALIDATION, folder=exported_vectors.folder
    )
    assert chosen_weight == best_weight
    for split in ("validation", "test"):
        query_vector_UD = np.load(exported_vectors.folder / f"query_vectors_{split}.npy")
        assert (query_vector_UD[:, -1] == np.float32(chosen_weight)).all()
        assert np.array_equal(query_vector_UD[:, :-1], exported_vectors.query_vector_UD[:, :-1])


def test_several_weights_need_validation_events(exported_vectors: ExportedVectors) -> None:
    with pytest.raises(InputError, match=r"popularity.weights has 6 values, but there are no validation events"):
        choose_popularity(spec_of(), store=exported_vectors.store, validation=None, folder=exported_vectors.folder)


def test_a_validated_term_is_0_in_the_training_and_fixed_after_the_choice() -> None:
    query_BD = torch.ones(2, 3)
    term = PopularityWeight(ValidatedPopularity())
    assert not list(term.parameters())
    assert term.train()(query_BD)[:, -1].tolist() == term.eval()(query_BD)[:, -1].tolist() == [0.0, 0.0]
    chosen_config = spec_of().with_choices(popularity_weight=0.2).config
    assert chosen_config.popularity == FixedPopularity(weight=0.2) and chosen_config.output_dim == DIM + 1
