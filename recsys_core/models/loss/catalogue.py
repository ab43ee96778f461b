"""Softmax over the whole catalogue, whose items are divided among the ranks.

Each rank scores the queries of all ranks against its share of the items, one block of queries at a time. Memory therefore
grows with the share of the items, and not with the number of scores.

Shapes: B queries of a rank, G queries of all ranks, I items, N items of the rank's share, P queries of a block, L hidden
pairs, D width of a vector.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from recsys_core.errors import InputError
from recsys_core.models.loss.collectives import gather_without_gradient
from recsys_core.models.spec import ModelSpec

MAX_BLOCK_SCORES = 1 << 21
"""Largest number of scores of a block, 8 MiB of float32. A block has at least one query."""
BYTES_PER_VALUE = 8
"""A float32 value and its gradient."""
_MASKED_LOGIT = torch.finfo(torch.float32).min


def catalogue_share(item_count_I: NDArray[np.int64], *, rank: int, world_size: int) -> NDArray[np.int64]:
    """Return the rows of the items that `rank` scores: every world_size-th item that has a training event.

    >>> catalogue_share(np.array([3, 0, 1, 2, 5]), rank=1, world_size=2).tolist()
    [2, 4]
    """
    return np.flatnonzero(item_count_I)[rank::world_size]


def require_catalogue_fits(
    spec: ModelSpec, *, limit_gb: float, world_size: int, num_values_by_list: Mapping[str, int] | None = None
) -> None:
    """Raise InputError if the vectors of a rank's share of the items and their gradients exceed `limit_gb`.

    num_values_by_list: number of values of all items, by list feature. Each value has a vector before the list is pooled.
    """
    item_tables = spec.on_side("item")
    vector_dims = [table.dim for table in item_tables.values()] + [spec.config.trained_dim]
    vector_dims += [
        math.ceil(num_values * item_tables[feature_name].dim / spec.num_items)
        for feature_name, num_values in (num_values_by_list or {}).items()
        if feature_name in item_tables
    ]
    num_share_items = -(-spec.num_items // world_size)
    share_gb = num_share_items * sum(vector_dims) * BYTES_PER_VALUE / 1e9
    if share_gb > limit_gb:
        num_ranks = math.ceil(spec.num_items / (limit_gb * 1e9 // (sum(vector_dims) * BYTES_PER_VALUE) or 1))
        raise InputError(
            f"loss.negatives is all, but a rank's share of the catalogue needs {share_gb:.3g} GB in each step, and "
            f"loss.catalogue_gb is {limit_gb:g}: {spec.num_items:,} items / {world_size} ranks x {sum(vector_dims)} values "
            f"({' + '.join(map(str, vector_dims))}) x {BYTES_PER_VALUE} bytes; set loss.negatives to sampled, use at least "
            f"{num_ranks} ranks, or raise loss.catalogue_gb"
        )


def weighted_log_partition(
    query_BD: Tensor,
    share_ND: Tensor,
    *,
    weight_B: Tensor,
    hidden_pairs: tuple[Tensor, Tensor] | None,
    largest_share_size: int,
    group: ProcessGroup | None,
) -> Tensor:
    """Return sum_b weight_b log(sum_j exp(q_b . x_j)) over the rank's queries b and the items j of all ranks.

    The gradients are computed in the forward pass, while the scores of a block are in memory. Every rank of `group` must call
    the function with equally many queries, and multiply the result by the same factor. As with `gather_candidates`, an item
    has the gradient of the ranks' total loss.

    Args:
        query_BD: query vectors, divided by the temperature.
        share_ND: vectors of the rank's share of the items.
        hidden_pairs: (query, item) pairs that are left out of the sum, as two arrays int64 [L]: ascending indices of the G
            queries, and indices of the N items. None: no pair is left out.
        largest_share_size: number of items in the largest share. All ranks derive the same blocks of queries from it.

    >>> queries, items, weight_B = torch.zeros(2, 3), torch.zeros(5, 3), torch.tensor([1.0, 0.0])
    >>> value = weighted_log_partition(queries, items, weight_B=weight_B, hidden_pairs=None, largest_share_size=5, group=None)
    >>> round(value.item(), 4)  # log 5
    1.6094
    """
    if hidden_pairs is None:
        hidden_pairs = (torch.zeros(0, dtype=torch.int64, device=query_BD.device),) * 2
    value: Tensor = _LogPartition.apply(query_BD, share_ND, weight_B, *hidden_pairs, largest_share_size, group)
    return value


class _LogPartition(torch.autograd.Function):
    """The implementation of `weighted_log_partition`, with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        query_BD: Tensor,
        share_ND: Tensor,
        weight_B: Tensor,
        hidden_query_L: Tensor,
        hidden_item_L: Tensor,
        largest_share_size: int,
        group: ProcessGroup | None,
    ) -> Tensor:
        query_GD, weight_G = gather_without_gradient(query_BD, group=group), gather_without_gradient(weight_B, group=group)
        gradient_GD, gradient_ND = torch.zeros_like(query_GD), torch.zeros_like(share_ND)
        log_partition_G = torch.zeros_like(weight_G)
        num_queries = len(query_GD)
        block_size = max(1, MAX_BLOCK_SCORES // max(1, largest_share_size))
        starts = list(range(0, num_queries, block_size))
        pair_bounds = torch.searchsorted(hidden_query_L, torch.tensor([*starts, num_queries], device=hidden_query_L.device))
        for block_index, start in enumerate(starts):
            block = slice(start, start + block_size)
            pairs = slice(pair_bounds[block_index], pair_bounds[block_index + 1])
            logit_PN = linear(query_GD[block], share_ND).float()
            logit_PN[hidden_query_L[pairs] - start, hidden_item_L[pairs]] = _MASKED_LOGIT
            # The exponentials overwrite the logits. Instead of dividing them by the partition, multiply the
            # results below by `factor_P1`, because the results have fewer values.
            max_logit_P = logit_PN.amax(dim=1) if len(share_ND) else torch.full_like(weight_G[block], -torch.inf)
            exponential_PN = logit_PN.sub_(max_logit_P[:, None]).exp_()
            log_partition_P = _log_sum_over_ranks(exponential_PN.sum(dim=1).log() + max_logit_P, group=group)
            log_partition_G[block] = log_partition_P
            factor_P1 = (weight_G[block] * (max_logit_P - log_partition_P).exp())[:, None]
            gradient_GD[block] = (exponential_PN @ share_ND) * factor_P1
            gradient_ND += exponential_PN.T @ (query_GD[block] * factor_P1)
        rank_queries = slice(0, num_queries)
        if group is not None and group.size() > 1:
            rank_queries = slice(group.rank() * len(query_BD), (group.rank() + 1) * len(query_BD))
            gradient_BD = torch.empty_like(query_BD)
            distributed.reduce_scatter_single(gradient_BD, gradient_GD, group=group)
        else:
            gradient_BD = gradient_GD
        ctx.save_for_backward(gradient_BD, gradient_ND)
        return (weight_G * log_partition_G)[rank_queries].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient_BD, gradient_ND = ctx.saved_tensors
        return gradient_BD * gradient, gradient_ND * gradient, None, None, None, None, None


def _log_sum_over_ranks(log_sum_P: Tensor, *, group: ProcessGroup | None) -> Tensor:
    """Return the logarithm of the sum over the ranks of exp(log_sum_P)."""
    if group is None or group.size() == 1:
        return log_sum_P
    return gather_without_gradient(log_sum_P, group=group).view(group.size(), -1).logsumexp(dim=0)
