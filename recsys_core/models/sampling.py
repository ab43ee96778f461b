"""Which items stand as candidates, how often they are expected to, and for which queries they are no negatives.

Shapes: B queries, K candidates, T entries of all histories together, P pairs, I items, O output width, W ranks.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn

from recsys_core.errors import InputError


def log_expected_count(positive_share_K: Tensor, negative_share_K: Tensor, *, positives: int, negatives: int) -> Tensor:
    """log of how often each candidate is expected among `positives` in-batch draws and `negatives` draws of their own.

    The log Q of the logQ correction (Yi et al., "Sampling-bias-corrected neural modeling for large corpus item
    recommendations", RecSys 2019) for the mixture of Yang et al., "Mixed negative sampling" (WWW 2020).

    Args:
        positive_share_K: probability of each candidate in one in-batch draw: its share of the training events.
        negative_share_K: probability of each candidate in one draw of negatives, see `negative_share`.
        positives, negatives: draws that make the columns, on all ranks whose candidates are gathered.

    Finite: a candidate that neither draw can bring counts as the smallest normal float32, about e^-87.

    >>> log_q = log_expected_count(torch.tensor([0.5, 0.25]), torch.tensor([0.5, 0.5]), positives=8, negatives=4)
    >>> [round(count, 4) for count in log_q.exp().tolist()]
    [6.0, 4.0]
    """
    expected_K = positives * positive_share_K.float() + negatives * negative_share_K.float()
    return expected_K.clamp(min=torch.finfo(torch.float32).tiny).log()


def negative_share(item_count_I: NDArray[np.integer[Any]], alpha: float) -> NDArray[np.float64]:
    """Share of each item among drawn negatives: proportional to its events to the power of `alpha`.

    An item without a training event is never drawn: as a negative it would only ever be pushed away. 0 is uniform over the
    other items, 1 the popularity itself, 0.75 the choice of Mikolov et al., "Distributed representations" (NeurIPS 2013).

    Args:
        item_count_I: training events of each item.

    Raises:
        InputError: no item has an event.

    >>> negative_share(np.array([16, 0, 1]), 0.75).round(3).tolist()  # 8 : 0 : 1
    [0.889, 0.0, 0.111]
    >>> negative_share(np.array([16, 0, 1]), 0).tolist()
    [0.5, 0.0, 0.5]
    """
    trained_I = item_count_I > 0
    if not trained_I.any():
        raise InputError(
            f"0 of {len(item_count_I)} items have a training event, but negatives are drawn from the items that have one; "
            "give the training part of the log at least one event"
        )
    weight_I = np.zeros(len(item_count_I), dtype=np.float64)
    # Scaled by the largest count before the power: no overflow whatever alpha is.
    weight_I[trained_I] = (item_count_I[trained_I] / item_count_I.max()) ** alpha
    weight_I /= weight_I.sum()
    return weight_I


class StreamingFrequency(nn.Module):
    """Share of each item in a stream of batches, from the gaps between its occurrences (Yi et al., RecSys 2019, algorithm 2).

    Three differences from the paper. Gaps are measured in rows, not in steps, so that 1 / gap is a share whatever the batch
    size. An item that a batch holds c times counts as c occurrences, evenly spaced since it was last there: without that the
    estimate of an item that is in every batch would stop at once per step. And the first gaps are averaged plainly, so that
    the estimate does not start from a made-up gap. An item never seen has the share 1 / items.

    With several ranks, every rank must be given the same rows in the same order: the positives of all ranks, gathered. The
    buffers are part of the checkpoint. Deterministic, and nothing here waits for the accelerator.

    Args:
        items: rows of the table.
        rate: weight of one occurrence in the moving average of gaps. The estimate looks back about 1 / rate occurrences, and
            its relative error is about sqrt(rate / 2): 0.01 gives 7 %.

    >>> frequency = StreamingFrequency(10, rate=0.01)
    >>> for step in range(3):
    ...     frequency.update(torch.tensor([0, 0, 0, 1]), torch.tensor(step))
    >>> [round(share, 4) for share in frequency.log_share(torch.tensor([0, 1, 3])).exp().tolist()]
    [0.75, 0.25, 0.1]
    """

    def __init__(self, items: int, *, rate: float) -> None:
        super().__init__()
        self._log_keep = math.log1p(-rate)
        self.last_step_I: Tensor
        self.gap_I: Tensor
        self.weight_I: Tensor
        self.register_buffer("last_step_I", torch.full((items,), -1, dtype=torch.int64))
        self.register_buffer("gap_I", torch.full((items,), float(items)))
        self.register_buffer("weight_I", torch.zeros(items))

    @torch.no_grad()
    def update(self, rows_B: Tensor, step: Tensor) -> None:
        """Takes in the batch of `step`.

        Args:
            rows_B: item of each positive of the step, on all ranks; an item may occur several times.
            step: int64 scalar, number of the batch, from 0, greater than in every earlier call. A batch left out reads as one
                without any of the items. A tensor, so that nothing waits for the accelerator.
        """
        # Runs in the sorted rows instead of torch.unique, whose result's size the accelerator would have to tell first.
        sorted_B = rows_B.sort().values
        count_B = torch.searchsorted(sorted_B, rows_B, right=True) - torch.searchsorted(sorted_B, rows_B)
        gap_B = (step - self.last_step_I[rows_B]) * len(rows_B) / count_B
        new_B = -torch.expm1(self._log_keep * count_B)  # what c occurrences weigh together: 1 - (1 - rate)^c
        weight_B = self.weight_I[rows_B] * (1 - new_B) + new_B
        # An item that occurs twice in the batch is written twice, the same value both times.
        self.gap_I[rows_B] = torch.lerp(self.gap_I[rows_B], gap_B, new_B / weight_B)
        self.weight_I[rows_B] = weight_B
        self.last_step_I[rows_B] = step  # index_fill_ takes a tensor's value on the host

    def log_share(self, rows_K: Tensor) -> Tensor:
        """log of the estimated share of each item among the positives, at most 0, finite; float32 [K]."""
        return -self.gap_I[rows_K].clamp(min=1).log()


def seen_columns(history_row_T: Tensor, history_offset_B1: Tensor, candidate_row_K: Tensor) -> tuple[Tensor, Tensor]:
    """Where a candidate is in a query's history: those columns are no negatives of that query.

    No matrix of queries and items is made: the candidates are sorted, and each entry of a history looks for its run. The number
    of pairs is what an accelerator is waited for.

    Args:
        history_row_T: items of the histories, one after the other.
        history_offset_B1: where each of the B histories begins, and where the last one ends.
        candidate_row_K: item of each column, of the same integer type; an item may have several columns.

    Returns:
        query_P, column_P: int64 pairs, in the order of the histories. An item that is in a history twice gives its pairs twice.

    >>> seen_columns(torch.tensor([7, 5, 9]), torch.tensor([0, 2, 3]), torch.tensor([5, 9, 5]))
    (tensor([0, 0, 1]), tensor([0, 2, 1]))
    """
    device = history_row_T.device
    sorted_K, column_K = candidate_row_K.sort(stable=True)
    first_T = torch.searchsorted(sorted_K, history_row_T)
    matches_T = torch.searchsorted(sorted_K, history_row_T, right=True) - first_T
    queries = len(history_offset_B1) - 1
    query_T = torch.arange(queries, device=device).repeat_interleave(history_offset_B1.diff(), output_size=len(history_row_T))
    entry_P = torch.arange(len(history_row_T), device=device).repeat_interleave(matches_T)
    # Pair number p is number p - (pairs of the entries before its own) of its entry's run.
    shift_T = first_T - (matches_T.cumsum(dim=0) - matches_T)
    return query_T[entry_P], column_K[shift_T[entry_P] + torch.arange(len(entry_P), device=device)]


def gather_candidates(candidate_KO: Tensor, candidate_row_K: Tensor) -> tuple[Tensor, Tensor]:
    """The candidates of all ranks, rank 0's first: vectors [W * K, O] with a gradient, and their item rows [W * K].

    Of the default process group, in which every rank calls it with as many candidates, and runs the backward pass too; without
    a group, or with one rank, what was given. The gradient of a candidate is the sum over the ranks that used it, as the
    gradient of the sum of their losses is; where gradients are then averaged over the ranks it is that of the mean loss.

    >>> vectors, rows = gather_candidates(torch.ones(2, 3), torch.tensor([4, 5]))
    >>> tuple(vectors.shape), rows.tolist()
    ((2, 3), [4, 5])
    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return candidate_KO, candidate_row_K
    all_KO: Tensor = _Gather.apply(candidate_KO)
    return all_KO, gather_rows(candidate_row_K)


def gather_rows(row_K: Tensor) -> Tensor:
    """The item rows of all ranks, rank 0's first: [W * K]; as `gather_candidates`."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return row_K
    all_row_K = row_K.new_empty(distributed.get_world_size() * len(row_K))
    distributed.all_gather_single(all_row_K, row_K.contiguous())
    return all_row_K


class _Gather(torch.autograd.Function):
    """all_gather whose backward is a reduce_scatter (that of torch.distributed.nn is deprecated as of torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, candidate_KO: Tensor) -> Tensor:
        rows, width = candidate_KO.shape
        all_KO = candidate_KO.new_empty(distributed.get_world_size() * rows, width)
        distributed.all_gather_single(all_KO, candidate_KO.contiguous())
        return all_KO

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient_KO,) = gradients
        rows, width = gradient_KO.shape
        own_KO = gradient_KO.new_empty(rows // distributed.get_world_size(), width)
        distributed.reduce_scatter_single(own_KO, gradient_KO.contiguous())
        return own_KO
