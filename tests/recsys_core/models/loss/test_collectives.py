import warnings

import pytest
import torch
from torch import distributed as dist

from recsys_core.models.loss.collectives import gather_candidates
from recsys_core.models.loss.losses import softmax_loss
from tests.gloo import run_ranks

# Queries, candidates and candidate rows of two ranks. Item 3 is on both ranks: each rank masks both columns.
QUERY_WBD = torch.arange(24.0).sin().reshape(2, 3, 4)
CANDIDATE_WCD = torch.arange(40.0).cos().reshape(2, 5, 4)
ITEM_ROW_WC = torch.tensor([[3, 0, 1, 8, 9], [4, 3, 5, 7, 6]])


def gathered_loss(query_BD, candidate_CD, item_row_C, all_candidates, all_item_rows):
    """Return the loss of one rank; its first candidates are the positives of its queries."""
    num_queries = len(query_BD)
    return softmax_loss(
        (query_BD * candidate_CD[:num_queries]).sum(dim=1),
        query_BD @ all_candidates.T,
        is_masked_BN=item_row_C[:num_queries, None] == all_item_rows,
        temperature=0.3,
        log_q_N=(all_item_rows + 1).float().log(),
    ).mean()


def compare_gathered(rank: int) -> None:
    warnings.simplefilter("error")  # fail if torch deprecates one of the collectives
    queries, candidates = QUERY_WBD.clone().requires_grad_(), CANDIDATE_WCD.clone().requires_grad_()
    all_candidates, all_item_rows = candidates.flatten(0, 1), ITEM_ROW_WC.flatten()
    loss_by_rank = [
        gathered_loss(queries[other_rank], candidates[other_rank], ITEM_ROW_WC[other_rank], all_candidates, all_item_rows)
        for other_rank in range(2)
    ]
    torch.stack(loss_by_rank).mean().backward()

    query_BD, candidate_CD = (values[rank].clone().requires_grad_() for values in (QUERY_WBD, CANDIDATE_WCD))
    gathered_candidates, gathered_item_rows = gather_candidates(candidate_CD, ITEM_ROW_WC[rank], group=dist.group.WORLD)
    assert torch.equal(gathered_candidates, all_candidates) and torch.equal(gathered_item_rows, all_item_rows)
    loss = gathered_loss(query_BD, candidate_CD, ITEM_ROW_WC[rank], gathered_candidates, gathered_item_rows)
    assert loss.item() == pytest.approx(loss_by_rank[rank].item(), rel=1e-6)
    loss.backward()
    # A candidate's gradient includes the other rank's part. DDP averages gradients over the ranks, hence the division.
    torch.testing.assert_close(candidate_CD.grad / 2, candidates.grad[rank], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(query_BD.grad / 2, queries.grad[rank], rtol=1e-5, atol=1e-7)
    assert dist.get_world_size() == 2


def test_two_ranks_get_the_gradients_of_one_process_with_all_candidates():
    run_ranks(compare_gathered, world_size=2)


def test_without_a_group_the_candidates_are_returned_unchanged():
    candidate_CD, item_row_C = torch.ones(2, 3, requires_grad=True), torch.tensor([1, 2])
    all_candidates, all_item_rows = gather_candidates(candidate_CD, item_row_C, group=None)
    assert all_candidates is candidate_CD and all_item_rows is item_row_C
