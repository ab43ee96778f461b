"""The metrics, compared with torchmetrics and scikit-learn on random rankings."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, ndcg_score, roc_auc_score
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.functional.retrieval import (
    retrieval_average_precision,
    retrieval_hit_rate,
    retrieval_normalized_dcg,
    retrieval_precision,
    retrieval_recall,
    retrieval_reciprocal_rank,
)

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation import metrics
from recsys_core.evaluation.metrics import TargetPositions, UserMetrics
from recsys_core.evaluation.ranking.catalogue import rank_catalogue
from recsys_core.evaluation.ranking.queries import Queries, tie_order

NUM_CANDIDATES = 12
relevance_rows = st.lists(st.booleans(), min_size=NUM_CANDIDATES, max_size=NUM_CANDIDATES).filter(
    lambda row: 0 < sum(row) < NUM_CANDIDATES
)


def _target_positions(relevant_UC: np.ndarray) -> TargetPositions:
    """Return the positions of the targets. relevant_UC: whether the candidate in each position is a target, best first."""
    user_T, position_T = np.nonzero(relevant_UC)
    order_T = np.random.default_rng(0).permutation(len(user_T))
    return TargetPositions.from_pairs(
        user_T=user_T[order_T], position_T=position_T[order_T], num_candidates_B=np.full(len(relevant_UC), NUM_CANDIDATES)
    )


@settings(max_examples=30)
@given(st.lists(relevance_rows, min_size=1, max_size=4), st.integers(1, NUM_CANDIDATES))
def test_every_metric_equals_torchmetrics(relevance_of_users: list[list[bool]], k: int) -> None:
    targets = _target_positions(np.array(relevance_of_users))
    score_C = torch.linspace(1, 0.1, NUM_CANDIDATES)  # best first
    is_target_of_users = [torch.tensor(relevance).long() for relevance in relevance_of_users]

    def torchmetrics_values(function, **settings):
        return [float(function(score_C, is_target_C, **settings)) for is_target_C in is_target_of_users]

    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(metrics.recall(targets, k=k), torchmetrics_values(retrieval_recall, top_k=k), **tolerance)
    np.testing.assert_allclose(metrics.precision(targets, k=k), torchmetrics_values(retrieval_precision, top_k=k), **tolerance)
    np.testing.assert_allclose(metrics.hit_rate(targets, k=k), torchmetrics_values(retrieval_hit_rate, top_k=k), **tolerance)
    np.testing.assert_allclose(metrics.ndcg(targets, k=k), torchmetrics_values(retrieval_normalized_dcg, top_k=k), **tolerance)
    np.testing.assert_allclose(metrics.reciprocal_rank(targets), torchmetrics_values(retrieval_reciprocal_rank), **tolerance)
    mrr_at_k = [float(retrieval_reciprocal_rank(score_C[:k], is_target_C[:k])) for is_target_C in is_target_of_users]
    np.testing.assert_allclose(metrics.reciprocal_rank(targets, k=k), mrr_at_k, **tolerance)
    np.testing.assert_allclose(
        metrics.average_precision(targets, k=NUM_CANDIDATES), torchmetrics_values(retrieval_average_precision), **tolerance
    )
    np.testing.assert_allclose(metrics.auc(targets), torchmetrics_values(binary_auroc), **tolerance)


def test_metrics_of_tied_scores_equal_scikit_learn_after_breaking_the_ties() -> None:
    random, num_users, num_items = np.random.default_rng(4), 40, 60
    query_UD, item_ID = random.integers(-1, 2, (num_users, 3)), random.integers(-1, 2, (num_items, 3))
    is_target_UI = random.random((num_users, num_items)) < 0.15
    is_target_UI[:, 0] = True  # each user has a target
    user_T, item_T = np.nonzero(is_target_UI)
    queries = Queries(
        torch.tensor(query_UD, dtype=torch.float32),
        is_known_B=np.ones(num_users, bool),
        seen=JaggedArray.empty(num_users),
        targets=JaggedArray.from_pairs(user_T, item_T, num_lists=num_users),
    )
    ranking = rank_catalogue(queries, item_vector_ID=torch.tensor(item_ID, dtype=torch.float32), k=0)
    targets = ranking.target_positions()
    # Subtract less than the difference of two scores, so that the scores are distinct and the ties stay in their order.
    score_UI = query_UD @ item_ID.T - np.argsort(tie_order(num_items)) / (10 * num_items)
    assert len(np.unique(query_UD @ item_ID.T)) < 10
    targets_and_scores = list(zip(is_target_UI, score_UI, strict=True))
    tolerance = {"rtol": 0, "atol": 1e-6}
    for k in (1, 5, 20):
        expected_ndcg = [
            ndcg_score(is_target_I[None], score_I[None], k=k, ignore_ties=True) for is_target_I, score_I in targets_and_scores
        ]
        np.testing.assert_allclose(metrics.ndcg(targets, k=k), expected_ndcg, **tolerance)
    average_precision = [average_precision_score(is_target_I, score_I) for is_target_I, score_I in targets_and_scores]
    np.testing.assert_allclose(metrics.average_precision(targets, k=num_items), average_precision, **tolerance)
    auc = [roc_auc_score(is_target_I, score_I) for is_target_I, score_I in targets_and_scores]
    np.testing.assert_allclose(metrics.auc(targets), auc, **tolerance)
    mean_auc = metrics.weighted_mean(metrics.auc(targets), weight_U=targets.num_targets_U)
    assert mean_auc == pytest.approx(np.average(auc, weights=is_target_UI.sum(axis=1)), abs=1e-6)


@given(st.lists(relevance_rows, min_size=1, max_size=4), st.integers(1, NUM_CANDIDATES - 1))
def test_metrics_are_between_0_and_1_and_do_not_fall_with_a_better_position(
    relevance_of_users: list[list[bool]], k: int
) -> None:
    relevant_UC = np.array(relevance_of_users)
    first_target_U = relevant_UC.argmax(axis=1)
    better_UC = relevant_UC.copy()
    for user, position in enumerate(first_target_U):  # move the best target up by one position
        better_UC[user, max(0, position - 1)], better_UC[user, position] = True, position == 0
    targets, better_targets = _target_positions(relevant_UC), _target_positions(better_UC)
    for metric in metrics.METRIC_BY_NAME.values():
        value_U, better_value_U = metric(targets, k=k), metric(better_targets, k=k)
        assert ((value_U >= 0) & (value_U <= 1) & (better_value_U >= value_U - 1e-12)).all()
    assert (metrics.auc(better_targets) >= metrics.auc(targets)).all()
    assert (metrics.hit_rate(targets, k=k) >= metrics.recall(targets, k=k)).all()
    assert (metrics.reciprocal_rank(targets, k=k) <= metrics.reciprocal_rank(targets)).all()


def test_average_precision_divides_by_the_smaller_of_k_and_the_number_of_targets() -> None:
    targets = TargetPositions.from_pairs(
        user_T=np.zeros(3, int), position_T=np.array([0, 4, 9]), num_candidates_B=np.array([10])
    )
    assert metrics.average_precision(targets, k=2) == pytest.approx([1 / 2])  # k = 2 is below the 3 targets
    assert metrics.average_precision(targets, k=5) == pytest.approx([(1 + 2 / 5) / 3])


def test_auc_is_undefined_when_every_candidate_is_a_target() -> None:
    targets = TargetPositions.from_pairs(user_T=np.zeros(2, int), position_T=np.array([0, 1]), num_candidates_B=np.array([2]))
    assert np.isnan(metrics.auc(targets)).all()
    assert np.isnan(metrics.weighted_mean(metrics.auc(targets), weight_U=targets.num_targets_U))


def test_users_without_targets_are_not_counted() -> None:
    targets = TargetPositions.from_pairs(
        user_T=np.array([3]), position_T=np.array([0]), num_candidates_B=np.array([9, 9, 9, 5])
    )
    assert targets.num_users == 1
    assert targets.num_candidates_U.tolist() == [5]


def test_the_metrics_of_users_are_read_from_a_file_as_they_were_written(tmp_path: Path) -> None:
    user_row_U = np.array([3, 8])
    model = UserMetrics(user_row_U, {"recall@20": np.array([0.0, 1 / 3]), "ndcg@20": np.array([1.0, 0.1])})
    popularity = UserMetrics(user_row_U, {"recall@20": np.array([0.5, 0.5])})
    metrics.write_user_metrics({"model": model, "popularity": popularity}, tmp_path / "user_metrics.parquet")
    metrics_by_ranker = metrics.read_user_metrics(tmp_path / "user_metrics.parquet")
    assert metrics_by_ranker["popularity"].means("x") == popularity.means("x")
    for name, value_U in model.value_U_by_metric.items():
        np.testing.assert_array_equal(metrics_by_ranker["model"].value_U_by_metric[name], value_U)
    np.testing.assert_array_equal(metrics_by_ranker["model"].user_row_U, user_row_U)
    some_metrics = metrics.read_user_metrics(tmp_path / "user_metrics.parquet", user_rows=np.array([1, 8, 9]))["model"]
    assert some_metrics.user_row_U.tolist() == [8]
    assert some_metrics.value_U_by_metric["ndcg@20"].tolist() == [0.1]
