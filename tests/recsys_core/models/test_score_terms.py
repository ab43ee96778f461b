"""The popularity term: a served score is the similarity plus the weight times the popularity.

The training uses the popularity term only if its weight is learned.
"""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.score_terms import item_popularity
from tests.recsys_core.models.test_task import COUNT_I, batch_of, item_scores, loss_of, task_of

MODEL_SETTINGS: dict[str, Any] = {"history": {"length": 3}, "candidate": {"layers": [4], "skip_connection": True}}


def settings_with_popularity(**popularity: Any) -> dict[str, Any]:
    return MODEL_SETTINGS | {"popularity": popularity}


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("item_representation", ["embedding", "candidate_tower"])
def test_a_score_is_the_similarity_plus_the_weighted_popularity(similarity: str, item_representation: str) -> None:
    settings = MODEL_SETTINGS | {"similarity": similarity, "history": {"length": 3, "item_representation": item_representation}}
    similarity_BI = item_scores(task_of(settings))
    for weight in (0.7, -0.2, 0.0):
        score_BI = item_scores(task_of(settings | {"popularity": {"kind": "fixed", "weight": weight}}))
        expected_BI = similarity_BI + weight * torch.from_numpy(np.log1p(COUNT_I) / np.log1p(COUNT_I.max())).float()
        torch.testing.assert_close(score_BI, expected_BI)


def test_a_fixed_term_does_not_change_the_training() -> None:
    task_without_term, task_with_term = task_of(MODEL_SETTINGS), task_of(settings_with_popularity(kind="fixed", weight=3.0))
    torch.testing.assert_close(loss_of(task_without_term, batch_of()), loss_of(task_with_term, batch_of()))
    assert [name for name, _ in task_without_term.named_parameters()] == [name for name, _ in task_with_term.named_parameters()]


def test_a_learned_weight_starts_at_0_and_is_trained_with_the_loss() -> None:
    task_without_term, task_with_term = task_of(MODEL_SETTINGS), task_of(settings_with_popularity(kind="learned"))
    loss = loss_of(task_with_term, batch_of())
    torch.testing.assert_close(loss, loss_of(task_without_term, batch_of()))
    loss.backward()
    weight = task_with_term.head.query.popularity.weight
    with torch.no_grad():
        gradient = weight.grad.item()
        weight.add_(1e-3)
        assert (loss_of(task_with_term, batch_of()) - loss).item() == pytest.approx(1e-3 * gradient, rel=0.05)
    assert abs(gradient) > 0.1


@pytest.mark.parametrize(("served_weight", "effective_weight"), [(None, 0.3), (0.0, 0.0), (-0.4, -0.4)])
def test_served_weight_replaces_the_trained_weight_only_in_the_served_scores(
    served_weight: float | None, effective_weight: float
) -> None:
    task = task_of(settings_with_popularity(kind="learned", served_weight=served_weight))
    with torch.no_grad():
        task.head.query.popularity.weight.fill_(0.3)
    task_with_effective_weight = task_of(settings_with_popularity(kind="fixed", weight=effective_weight))
    torch.testing.assert_close(item_scores(task), item_scores(task_with_effective_weight))
    training_loss = loss_of(task.train(), batch_of())
    assert not torch.equal(training_loss, loss_of(task_of(MODEL_SETTINGS), batch_of()))  # the training keeps the trained weight


def test_the_distillation_compares_vectors_without_the_popularity() -> None:
    loss_settings = {"distillation": {"weight": 2.0}}
    task_without_term, task_with_term = (
        task_of(settings, loss_settings=loss_settings, vector_dims={"item": 8})
        for settings in (MODEL_SETTINGS, settings_with_popularity(kind="fixed", weight=3.0))
    )
    torch.testing.assert_close(loss_of(task_without_term, batch_of()), loss_of(task_with_term, batch_of()))


def test_a_catalogue_without_events_has_popularity_0() -> None:
    assert item_popularity(np.zeros(3, np.int64)).tolist() == [0, 0, 0]
    assert item_popularity(np.zeros(0, np.int64)).tolist() == []


@pytest.mark.parametrize(
    ("popularity", "message"),
    [
        ({"kind": "fixed"}, "weight\n  Field required"),
        ({"kind": "fixed", "weight": 10_001}, "less than or equal to 10000"),
        ({"kind": "learned", "weight": 1}, "Extra inputs are not permitted"),
        ({"kind": "removed"}, "does not match any of the expected tags"),
    ],
    ids=["missing weight", "large weight", "weight of a learned term", "unknown kind"],
)
def test_an_invalid_popularity_term_is_rejected(popularity: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TwoTowerConfig.model_validate({"popularity": popularity})


def test_a_popularity_term_adds_one_number_to_the_vectors() -> None:
    config = TwoTowerConfig.model_validate(
        {"embedding_dim": 8, "history": {"item_representation": "candidate_tower"}, "popularity": {"kind": "learned"}}
    )
    assert (config.tower_dim, config.history_dim, config.output_dim, config.query_layers) == (8, 8, 9, (8,))
