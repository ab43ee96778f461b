"""Our metrics against torchmetrics, on whole random rankings."""

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
from recsys_core.evaluation.metrics import TargetRanks

CANDIDATES = 12
relevance = st.lists(st.booleans(), min_size=CANDIDATES, max_size=CANDIDATES).filter(lambda row: 0 < sum(row) < CANDIDATES)


def _ranks(relevant_UC: np.ndarray) -> TargetRanks:
    user_P, rank_P = np.nonzero(relevant_UC)
    shuffled = np.random.default_rng(0).permutation(len(user_P))
    return TargetRanks.of_pairs(
        user_P=user_P[shuffled], rank_P=rank_P[shuffled], candidates_E=np.full(len(relevant_UC), CANDIDATES)
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(relevance, min_size=1, max_size=4), st.integers(1, CANDIDATES))
def test_every_metric_equals_torchmetrics(rows: list[list[bool]], k: int) -> None:
    ranks = _ranks(np.array(rows))
    score = torch.linspace(1, 0.1, CANDIDATES)  # best first: position is rank
    targets = [torch.tensor(row).long() for row in rows]

    def oracle(function, **settings):
        return [float(function(score, target, **settings)) for target in targets]

    close = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(metrics.recall(ranks, k=k), oracle(retrieval_recall, top_k=k), **close)
    np.testing.assert_allclose(metrics.precision(ranks, k=k), oracle(retrieval_precision, top_k=k), **close)
    np.testing.assert_allclose(metrics.hit_rate(ranks, k=k), oracle(retrieval_hit_rate, top_k=k), **close)
    np.testing.assert_allclose(metrics.ndcg(ranks, k=k), oracle(retrieval_normalized_dcg, top_k=k), **close)
    np.testing.assert_allclose(metrics.reciprocal_rank(ranks), oracle(retrieval_reciprocal_rank), **close)
    np.testing.assert_allclose(metrics.average_precision(ranks, k=CANDIDATES), oracle(retrieval_average_precision), **close)
    np.testing.assert_allclose(metrics.auc(ranks), oracle(binary_auroc), **close)


def test_average_precision_with_a_cut_divides_by_what_could_be_found() -> None:
    ranks = TargetRanks.of_pairs(user_P=np.zeros(3, int), rank_P=np.array([0, 4, 9]), candidates_E=np.array([10]))
    assert metrics.average_precision(ranks, k=2) == pytest.approx([1 / 2])  # two places, three targets
    assert metrics.average_precision(ranks, k=5) == pytest.approx([(1 + 2 / 5) / 3])


def test_auc_is_undefined_when_every_candidate_is_a_target() -> None:
    ranks = TargetRanks.of_pairs(user_P=np.zeros(2, int), rank_P=np.array([0, 1]), candidates_E=np.array([2]))
    assert np.isnan(metrics.auc(ranks)).all()


def test_users_without_targets_are_not_counted() -> None:
    ranks = TargetRanks.of_pairs(user_P=np.array([3]), rank_P=np.array([0]), candidates_E=np.array([9, 9, 9, 5]))
    assert ranks.users == 1
    assert ranks.candidates_U.tolist() == [5]
