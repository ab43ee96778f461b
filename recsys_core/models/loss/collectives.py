"""Collectives that the loss needs: candidates of all ranks, and the L2 penalty on the rows of all ranks.

Shapes: C candidates of a rank, V looked-up rows of a rank, D width of a vector, W ranks.
"""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup


def gather_candidates(candidate_CD: Tensor, item_row_C: Tensor, *, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the candidates of all ranks in rank order: vectors [W * C, D] with a gradient, and item rows [W * C].

    Every rank of `group` must call the function with the same number of candidates, and run the backward pass, which adds up
    the gradients of a candidate over all ranks. The result is the gradient of the ranks' total loss.
    Training then averages the gradients of the parameters over the ranks, which gives the gradient of the mean loss.

    >>> vectors, rows = gather_candidates(torch.ones(2, 3), torch.tensor([4, 5]), group=None)
    >>> tuple(vectors.shape), rows.tolist()
    ((2, 3), [4, 5])
    """
    if group is None or group.size() == 1:
        return candidate_CD, item_row_C
    all_candidate_vectors: Tensor = _AllGather.apply(candidate_CD, group)
    return all_candidate_vectors, gather_without_gradient(item_row_C, group=group)


def gather_without_gradient(tensor: Tensor, *, group: ProcessGroup | None) -> Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension in rank order, without a gradient.

    `tensor` has the same shape on every rank.
    """
    if group is None or group.size() == 1:
        return tensor
    all_tensors = tensor.new_empty(group.size() * len(tensor), *tensor.shape[1:])
    distributed.all_gather_single(all_tensors, tensor.contiguous(), group=group)
    return all_tensors


def l2_penalty(value_VD: Tensor, row_V: Tensor, *, max_rows: int, group: ProcessGroup | None) -> Tensor:
    """Return half the squared norm of the rows that a step looks up, scaled for training on several ranks.

    The mean of the results of all ranks counts each row once, even if several ranks look it up. The function is a collective:
    the ranks of `group` exchange their row numbers.

    Args:
        value_VD: values of the rows.
        row_V: row numbers in the table; a row may occur several times.
        max_rows: length to which `row_V` is padded for the exchange; equal on every rank, at least len(row_V).
        group: process group of the ranks; None for a single process.

    >>> l2_penalty(torch.tensor([[2.0], [3.0], [3.0]]), torch.tensor([7, 5, 5]), max_rows=3, group=None).item()
    6.5
    """
    world_size = 1 if group is None else group.size()
    all_rows = row_V
    if world_size > 1:
        padded_rows = row_V.new_full((max_rows,), -1)
        padded_rows[: len(row_V)] = row_V
        all_rows = gather_without_gradient(padded_rows, group=group)
    sorted_rows = all_rows.sort().values
    count_V = torch.searchsorted(sorted_rows, row_V, right=True) - torch.searchsorted(sorted_rows, row_V)
    return (value_VD.square().sum(dim=1) * (world_size / 2 / count_V)).sum()


class _AllGather(torch.autograd.Function):
    """all_gather with a reduce_scatter as its backward pass (torch 2.13 deprecates its own differentiable all_gather)."""

    @staticmethod
    def forward(ctx: Any, candidate_CD: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        num_candidates, dim = candidate_CD.shape
        all_candidate_vectors = candidate_CD.new_empty(group.size() * num_candidates, dim)
        distributed.all_gather_single(all_candidate_vectors, candidate_CD.contiguous(), group=group)
        return all_candidate_vectors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        num_all_candidates, dim = gradient.shape
        gradient_CD = gradient.new_empty(num_all_candidates // ctx.group.size(), dim)
        distributed.reduce_scatter_single(gradient_CD, gradient.contiguous(), group=ctx.group)
        return gradient_CD, None
