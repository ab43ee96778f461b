"""Candidates gathered from two ranks, compared with all candidates in one process."""

import warnings

import pytest
import torch
from torch import distributed as dist

from recsys_core.models.loss.collectives import gather_candidates
from recsys_core.models.loss.losses import softmax_loss
from tests.gloo import run_ranks

# Item 3 is a candidate on both ranks, so it has two columns in the gathered scores. Each rank masks both columns.
QUERY_WBD = torch.arange(24.0).sin().reshape(2, 3, 4)
CANDIDATE_WCD = torch.arange(40.0).cos().reshape(2, 5, 4)
ITEM_ROW_WC = torch.tensor([[3, 0, 1, 8, 9], [4, 3, 5, 7, 6]])


def gathered_loss(query_BD, candidate_CD, item_row_C, all_candidate_vectors, all_item_rows):
    """Return the loss of one rank. Its first candidates are the positives of its queries."""
    num_queries = len(query_BD)
    return softmax_loss(
        (query_BD * candidate_CD[:num_queries]).sum(dim=1),
        query_BD @ all_candidate_vectors.T,
        is_masked_BN=item_row_C[:num_queries, None] == all_item_rows,
        temperature=0.3,
        log_q_N=(all_item_rows + 1).float().log(),
    ).mean()


def compare_gathered_candidates(rank: int) -> None:
    """Assert on each rank that gathered candidates give the loss and the gradients of one process with all candidates."""
    warnings.simplefilter("error")  # fail if torch deprecates one of the collectives
    query_WBD, candidate_WCD = QUERY_WBD.clone().requires_grad_(), CANDIDATE_WCD.clone().requires_grad_()
    all_candidate_vectors, all_item_rows = candidate_WCD.flatten(0, 1), ITEM_ROW_WC.flatten()
    expected_losses = [
        gathered_loss(query_BD, candidate_CD, item_row_C, all_candidate_vectors, all_item_rows)
        for query_BD, candidate_CD, item_row_C in zip(query_WBD, candidate_WCD, ITEM_ROW_WC, strict=True)
    ]
    torch.stack(expected_losses).mean().backward()

    query_BD, candidate_CD = (tensor[rank].clone().requires_grad_() for tensor in (QUERY_WBD, CANDIDATE_WCD))
    gathered_candidate_vectors, gathered_item_rows = gather_candidates(candidate_CD, ITEM_ROW_WC[rank], group=dist.group.WORLD)
    assert torch.equal(gathered_candidate_vectors, all_candidate_vectors) and torch.equal(gathered_item_rows, all_item_rows)
    loss = gathered_loss(query_BD, candidate_CD, ITEM_ROW_WC[rank], gathered_candidate_vectors, gathered_item_rows)
    assert loss.item() == pytest.approx(expected_losses[rank].item(), rel=1e-6)
    loss.backward()
    # The gradient of a candidate is summed over the losses of both ranks. The expected loss is their mean, so divide by 2.
    torch.testing.assert_close(candidate_CD.grad / 2, candidate_WCD.grad[rank], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(query_BD.grad / 2, query_WBD.grad[rank], rtol=1e-5, atol=1e-7)


def test_two_ranks_compute_the_gradients_of_one_process_with_all_candidates():
    run_ranks(compare_gathered_candidates, world_size=2)


def test_without_a_group_the_candidates_are_returned_unchanged():
    candidate_CD, item_row_C = torch.ones(2, 3, requires_grad=True), torch.tensor([1, 2])
    all_candidate_vectors, all_item_rows = gather_candidates(candidate_CD, item_row_C, group=None)
    assert all_candidate_vectors is candidate_CD and all_item_rows is item_row_C
