import math
from functools import partial

import pytest
import torch

from recsys_core.models.losses import log_expected_count, sampled_bce, sampled_softmax

ONE_D = torch.tensor([[1.0], [1.0]])


def softmax_loss(candidate_KO, *, item_row_K, log_q_K=None, mask=True, query_BO=ONE_D):
    return sampled_softmax(
        query_BO, candidate_KO, item_row_K=item_row_K, log_q_K=log_q_K, temperature=1.0, mask_accidental_hits=mask
    ).item()


def test_logq_lowers_the_logit_of_a_popular_candidate():
    # Equal scores everywhere: without a correction every candidate is as likely, log 2. Candidate 0 is drawn three times
    # as often, so after the correction it must weigh a third: the two rows lose log(1 + 3) and log(1 + 1/3).
    candidates, rows = torch.zeros(2, 1), torch.tensor([0, 1])
    log_q = log_expected_count(torch.tensor([0.75, 0.25]), batch_size=2, uniform_negatives=0, items=2)

    assert math.isclose(softmax_loss(candidates, item_row_K=rows), math.log(2), rel_tol=1e-6)
    corrected = softmax_loss(candidates, item_row_K=rows, log_q_K=log_q)
    assert math.isclose(corrected, (math.log(4) + math.log(4 / 3)) / 2, rel_tol=1e-6)

    candidates.requires_grad_()
    sampled_softmax(
        ONE_D[:1], candidates, item_row_K=rows, log_q_K=log_q, temperature=1.0, mask_accidental_hits=True
    ).backward()
    pushed_up_popular = -candidates.grad[0].item()
    assert math.isclose(pushed_up_popular, 0.75, rel_tol=1e-6)  # uncorrected it would be 0.5


def test_logq_recovers_the_true_ranking_under_popularity_skew():
    # One query, clicks 9 : 1. The full softmax learns exactly that; in-batch negatives repeat the skew and cancel it.
    torch.manual_seed(0)
    share = torch.tensor([0.9, 0.1])
    gap = {}
    for corrected in (False, True):
        score = torch.zeros(2, requires_grad=True)
        optimizer = torch.optim.SGD([score], lr=0.5)
        for _ in range(400):
            rows = torch.multinomial(share, 64, replacement=True)
            log_q = log_expected_count(share[rows], batch_size=64, uniform_negatives=0, items=2) if corrected else None
            optimizer.zero_grad()
            sampled_softmax(
                torch.ones(64, 1),
                score[rows, None],
                item_row_K=rows,
                log_q_K=log_q,
                temperature=1.0,
                mask_accidental_hits=False,  # with two items nearly every negative would be masked
            ).backward()
            optimizer.step()
        gap[corrected] = (score[0] - score[1]).item()
    assert abs(gap[True] - math.log(9)) < 0.3
    assert abs(gap[False]) < 0.3


def test_an_accidental_hit_is_no_negative():
    same_item = torch.tensor([5, 5])
    assert softmax_loss(torch.zeros(2, 1), item_row_K=same_item) == 0.0
    assert softmax_loss(torch.zeros(2, 1), item_row_K=same_item, mask=False) > 0.5


def test_extra_candidates_count_as_negatives():
    rows = torch.tensor([0, 1, 2, 3])
    assert math.isclose(softmax_loss(torch.zeros(4, 1), item_row_K=rows), math.log(4), rel_tol=1e-6)


def test_bce_can_reach_zero_because_scores_can_be_negative():
    query, candidates = torch.tensor([[1.0]]), torch.tensor([[30.0], [-30.0]])
    assert sampled_bce(query, candidates, item_row_K=torch.tensor([0, 1]), temperature=1.0).item() < 1e-6


def test_bce_leaves_out_a_negative_equal_to_the_positive():
    query, candidates = torch.tensor([[1.0]]), torch.tensor([[2.0], [2.0]])
    masked = sampled_bce(query, candidates, item_row_K=torch.tensor([4, 4]), temperature=1.0).item()
    assert math.isclose(masked, math.log1p(math.exp(-2.0)), rel_tol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "bce"])
def test_the_loss_is_the_mean_over_queries_weighted_as_told(kind):
    torch.manual_seed(1)
    query_BO, candidate_KO, rows = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2, 7, 1])
    if kind == "bce":
        loss = partial(sampled_bce, query_BO, candidate_KO, item_row_K=rows, temperature=0.5)
    else:
        softmax = partial(sampled_softmax, log_q_K=None, temperature=0.5, mask_accidental_hits=True)
        loss = partial(softmax, query_BO, candidate_KO, item_row_K=rows)
    alone = torch.stack([loss(weight_B=one) for one in torch.eye(3)])
    assert torch.isfinite(alone).all() and len(set(alone.tolist())) == 3
    assert torch.allclose(loss(weight_B=torch.full((3,), 0.7)), loss(), rtol=1e-6)
    assert loss(weight_B=torch.zeros(3)).item() == 0
    if kind == "softmax":  # the negatives of bce are averaged over all pairs at once: query 1 has one pair less
        assert torch.allclose(loss(weight_B=torch.tensor([1.0, 0.0, 3.0])), (alone[0] + 3 * alone[2]) / 4, rtol=1e-6)


def test_bce_weighs_both_halves():
    # Query 0 scores 0 against everything, query 1 scores 100 against its positive and the negative alike.
    query, candidate, rows = torch.tensor([[0.0], [1.0]]), torch.full((3, 1), 100.0), torch.tensor([0, 1, 2])
    weigh = partial(sampled_bce, query, candidate, item_row_K=rows, temperature=1.0)
    assert math.isclose(weigh(weight_B=torch.tensor([1.0, 0.0])).item(), 2 * math.log(2), rel_tol=1e-6)
    assert math.isclose(weigh(weight_B=torch.tensor([0.0, 1.0])).item(), 100, rel_tol=1e-6)
    assert math.isclose(weigh(weight_B=torch.tensor([3.0, 1.0])).item(), (6 * math.log(2) + 100) / 4, rel_tol=1e-6)
