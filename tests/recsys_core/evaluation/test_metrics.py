"""The metrics compared with torchmetrics on random rankings."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.functional.retrieval import (
    retrieval_average_precision,
    retrieval_hit_rate,
    retrieval_normalized_dcg,
    retrieval_precision,
    retrieval_recall,
    retrieval_reciprocal_rank,
)

from recsys_core.evaluation import metrics
from recsys_core.evaluation.metrics import TargetPositions, UserMetrics

CANDIDATES = 12
relevance = st.lists(st.booleans(), min_size=CANDIDATES, max_size=CANDIDATES).filter(lambda row: 0 < sum(row) < CANDIDATES)


def _target_positions(relevant_UC: np.ndarray) -> TargetPositions:
    user_T, position_T = np.nonzero(relevant_UC)
    shuffled = np.random.default_rng(0).permutation(len(user_T))
    return TargetPositions.from_pairs(
        user_T=user_T[shuffled], position_T=position_T[shuffled], num_candidates_B=np.full(len(relevant_UC), CANDIDATES)
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(relevance, min_size=1, max_size=4), st.integers(1, CANDIDATES))
def test_every_metric_equals_torchmetrics(rows: list[list[bool]], k: int) -> None:
    targets = _target_positions(np.array(rows))
    score = torch.linspace(1, 0.1, CANDIDATES)  # best first
    is_target = [torch.tensor(row).long() for row in rows]

    def oracle(function, **settings):
        return [float(function(score, row, **settings)) for row in is_target]

    close = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(metrics.recall(targets, k=k), oracle(retrieval_recall, top_k=k), **close)
    np.testing.assert_allclose(metrics.precision(targets, k=k), oracle(retrieval_precision, top_k=k), **close)
    np.testing.assert_allclose(metrics.hit_rate(targets, k=k), oracle(retrieval_hit_rate, top_k=k), **close)
    np.testing.assert_allclose(metrics.ndcg(targets, k=k), oracle(retrieval_normalized_dcg, top_k=k), **close)
    np.testing.assert_allclose(metrics.reciprocal_rank(targets), oracle(retrieval_reciprocal_rank), **close)
    np.testing.assert_allclose(metrics.average_precision(targets, k=CANDIDATES), oracle(retrieval_average_precision), **close)
    np.testing.assert_allclose(metrics.auc(targets), oracle(binary_auroc), **close)


def test_average_precision_divides_by_the_smaller_of_k_and_the_number_of_targets() -> None:
    targets = TargetPositions.from_pairs(
        user_T=np.zeros(3, int), position_T=np.array([0, 4, 9]), num_candidates_B=np.array([10])
    )
    assert metrics.average_precision(targets, k=2) == pytest.approx([1 / 2])  # k = 2 is below the 3 targets
    assert metrics.average_precision(targets, k=5) == pytest.approx([(1 + 2 / 5) / 3])


def test_auc_is_undefined_when_every_candidate_is_a_target() -> None:
    targets = TargetPositions.from_pairs(user_T=np.zeros(2, int), position_T=np.array([0, 1]), num_candidates_B=np.array([2]))
    assert np.isnan(metrics.auc(targets)).all()


def test_users_without_targets_are_not_counted() -> None:
    targets = TargetPositions.from_pairs(
        user_T=np.array([3]), position_T=np.array([0]), num_candidates_B=np.array([9, 9, 9, 5])
    )
    assert targets.num_users == 1
    assert targets.num_candidates_U.tolist() == [5]


def test_the_metrics_of_users_survive_in_a_file(tmp_path: Path) -> None:
    rows = np.array([3, 8])
    model = UserMetrics(rows, {"recall@20": np.array([0.0, 1 / 3]), "ndcg@20": np.array([1.0, 0.1])})
    popularity = UserMetrics(rows, {"recall@20": np.array([0.5, 0.5])})
    metrics.write_user_metrics({"model": model, "popularity": popularity}, tmp_path / "m.parquet")
    read = metrics.read_user_metrics(tmp_path / "m.parquet")
    assert read["popularity"].means("x") == popularity.means("x")
    for name, value_U in model.value_U_by_metric.items():
        np.testing.assert_array_equal(read["model"].value_U_by_metric[name], value_U)
    np.testing.assert_array_equal(read["model"].user_row_U, rows)
