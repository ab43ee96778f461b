"""Suggested settings for logs of several kinds, and the facts behind them."""

from pathlib import Path
from typing import Any

import pytest

from recsys_core.manifests import Dataset
from tasks.tuning.suggestions import DataFacts, suggestions
from tests.recsys_core.ingest.interactions_with_context import write_interactions

SPARSE = DataFacts(
    num_users=22_000, num_items=12_000, num_train_events=150_000, density=0.0006, history_median=5, history_p95=22,
    is_ordered=True, has_item_features=True, vector_share=1.0, cold_share=0.01,
)  # fmt: skip
DENSE = DataFacts(
    num_users=6_000, num_items=3_000, num_train_events=900_000, density=0.05, history_median=80, history_p95=500,
    is_ordered=False, has_item_features=False, vector_share=0.0, cold_share=0.0,
)  # fmt: skip


def settings(facts: DataFacts) -> dict[str, Any]:
    return {item.setting: item.value for item in suggestions(facts)}


def test_a_sparse_log_with_order_and_features() -> None:
    assert settings(SPARSE) == {
        "model.temperature": 0.1,
        "model.history.length": 30,
        "model.history.pooling": "recency",
        "model.history.item_representation": "candidate_tower",
        "model.query.dropout": 0.3,
        "loss.num_negatives": 2048,
        "training.batch_size": 512,
    }


def test_a_dense_log_without_order() -> None:
    assert settings(DENSE) == {
        "model.temperature": 0.2,
        "loss.mask_negatives": "seen",
        "model.history.length": 50,
        "model.history.pooling": "mean",
        "model.history.last_item_feature": False,
        "loss.num_negatives": 512,
        "training.batch_size": 4096,
    }


def test_cold_items_with_vectors_keep_their_vectors() -> None:
    assert settings(SPARSE.model_copy(update={"cold_share": 0.5}))["tables.item.transfer"] == "residual"
    without_vectors = SPARSE.model_copy(update={"cold_share": 0.5, "vector_share": 0.0})
    assert "tables.item.transfer" not in settings(without_vectors)


@pytest.mark.parametrize("num_events", [1, 10**10])
def test_the_batch_size_has_bounds(num_events: int) -> None:
    assert 256 <= settings(SPARSE.model_copy(update={"num_train_events": num_events}))["training.batch_size"] <= 8192


def test_facts_of_a_log(tmp_path: Path) -> None:
    log = [([0, 1], [2], [0]), ([0], [], [3]), ([], [], [])]
    facts = DataFacts.of(Dataset(write_interactions(tmp_path / "log", users=[1, 2, 3], items=[5, 6, 7, 8], log=log)))
    assert (facts.num_users, facts.num_items, facts.num_train_events, facts.density) == (2, 2, 3, 3 / 4)
    assert (facts.history_median, facts.vector_share, facts.has_item_features) == (1.5, 0.0, False)
    assert facts.cold_share == pytest.approx(2 / 3)
