"""Collectives over the candidates of all ranks. Without a process group, the input is returned unchanged."""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup


def gather_candidates(candidate_CD: Tensor, item_row_C: Tensor, *, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the candidates of all ranks in rank order: vectors [W * C, D] with a gradient, and item rows [W * C].

    Every rank of `group` calls the function with the same number of candidates, and every rank runs the backward pass. The
    backward pass adds up the gradients of a candidate over all ranks. The result is the gradient of the ranks' total loss.
    Training then averages the gradients of the parameters over the ranks, which gives the gradient of the mean loss.

    >>> vectors, rows = gather_candidates(torch.ones(2, 3), torch.tensor([4, 5]), group=None)
    >>> tuple(vectors.shape), rows.tolist()
    ((2, 3), [4, 5])
    """
    if group is None or group.size() == 1:
        return candidate_CD, item_row_C
    all_candidates: Tensor = _AllGather.apply(candidate_CD, group)
    return all_candidates, gather_rows(item_row_C, group=group)


def gather_rows(row_C: Tensor, *, group: ProcessGroup | None) -> Tensor:
    """Return the row numbers of all ranks in rank order, [W * C]. `row_C` has the same length on every rank."""
    if group is None or group.size() == 1:
        return row_C
    all_rows = row_C.new_empty(group.size() * len(row_C))
    distributed.all_gather_single(all_rows, row_C.contiguous(), group=group)
    return all_rows


class _AllGather(torch.autograd.Function):
    """all_gather with a reduce_scatter as its backward pass (torch 2.13 deprecates its own differentiable all_gather)."""

    @staticmethod
    def forward(ctx: Any, candidate_CD: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        num_candidates, dim = candidate_CD.shape
        all_candidates = candidate_CD.new_empty(group.size() * num_candidates, dim)
        distributed.all_gather_single(all_candidates, candidate_CD.contiguous(), group=group)
        return all_candidates

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        num_gathered, dim = gradient.shape
        gradient_CD = gradient.new_empty(num_gathered // ctx.group.size(), dim)
        distributed.reduce_scatter_single(gradient_CD, gradient.contiguous(), group=ctx.group)
        return gradient_CD, None
