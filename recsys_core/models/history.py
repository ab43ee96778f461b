"""Encoders of a user's history into one vector, and the pooling of lists of vectors.

Shapes: B queries or lists, V distinct items, D width of a vector, H entries of all histories, BH entries of padded histories,
L vectors of all lists.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, embedding_bag

from recsys_core.models.history_config import (
    AttentionHistory,
    HistorySettings,
    MeanHistory,
    RecencyHistory,
    SelfAttentionHistory,
    SumHistory,
)
from recsys_core.models.self_attention import SelfAttention, groups_of_similar_length


class HistoryEncoder(nn.Module):
    """Base class of the encoders: a weighted sum of the item vectors of each history.

    The weights are divided by their sum over the history, unless `is_normalised` is false. The result for an empty history
    is the learned vector `start`. An encoder that is not a weighted sum overrides `forward`.

    Args:
        dim: width of an item vector, and of the result.
        std: standard deviation of the values of an item vector at the start of training, and of the initial values of `start`.
    """

    is_normalised: ClassVar[bool] = True

    def __init__(self, config: HistorySettings, *, dim: int, std: float) -> None:
        super().__init__()
        start = torch.empty(dim)
        if not start.is_meta:  # on the meta device, both calls import torch._dynamo and SymPy, which takes two seconds
            start.normal_().mul_(std)
        self.start = nn.Parameter(start)
        self.length, self.item_dropout = config.length, config.item_dropout

    def forward(self, item_VD: Tensor, history_H: Tensor, offset: Tensor) -> Tensor:
        """Return one vector per history [B, D]; `start` for a history that is empty, or that dropout left empty.

        Args:
            item_VD: vectors of the distinct items of the batch.
            history_H: index into `item_VD` of each history entry, oldest first within a history.
            offset: int64 [B + 1], the bounds of each history in `history_H`.
        """
        length_B = offset.diff()
        # The index of the query to which each history entry belongs.
        query_H = torch.repeat_interleave(
            torch.arange(len(length_B), device=offset.device), length_B, output_size=len(history_H)
        )
        weight_H = self._weights(item_VD, history_H, query_H=query_H, offset=offset)
        if self.training and self.item_dropout:
            weight_H = weight_H * (torch.rand_like(weight_H) >= self.item_dropout)
        total_weight_B = torch.zeros(len(length_B), dtype=weight_H.dtype, device=weight_H.device).index_add(
            0, query_H, weight_H
        )
        if self.is_normalised:
            weight_H = weight_H / total_weight_B.clamp(min=torch.finfo(weight_H.dtype).tiny)[query_H]
        pooled_BD: Tensor = embedding_bag(
            history_H, item_VD, offset, mode="sum", per_sample_weights=weight_H.to(item_VD.dtype), include_last_offset=True
        )
        return torch.where(total_weight_B[:, None] > 0, pooled_BD, self.start.to(pooled_BD.dtype))

    def _weights(self, item_VD: Tensor, history_H: Tensor, *, query_H: Tensor, offset: Tensor) -> Tensor:
        """Return the weight of each history entry before normalisation, [H]. query_H: index of the query of each entry."""
        return torch.ones(len(history_H), device=history_H.device)

    def expected_norm(self, row_norm: float) -> float:
        """Return the expected norm of an encoded history of random rows: the norm of their mean. row_norm: norm of a row."""
        return row_norm / math.sqrt(self.length)


class MeanEncoder(HistoryEncoder):
    """Mean of the item vectors."""


class SumEncoder(HistoryEncoder):
    """Sum of the item vectors."""

    is_normalised = False


class RecencyEncoder(HistoryEncoder):
    """Weighted mean of the item vectors, with the weight exp(a[p]) for position p from the end and a learned vector a.

    The vector starts at zero, so that training starts from the mean.
    """

    def __init__(self, config: HistorySettings, *, dim: int, std: float) -> None:
        super().__init__(config, dim=dim, std=std)
        self.recency = nn.Parameter(torch.zeros(config.length))

    def _weights(self, item_VD: Tensor, history_H: Tensor, *, query_H: Tensor, offset: Tensor) -> Tensor:
        position_from_end_H = offset[1:][query_H] - 1 - torch.arange(len(history_H), device=history_H.device)
        weight_H: Tensor = self.recency.exp()[position_from_end_H]
        return weight_H


class AttentionEncoder(HistoryEncoder):
    """Weighted mean of the item vectors, with the weight exp(q . x / sqrt(D)) for item vector x and a learned query q.

    The query starts at zero, so that training starts from the mean. This is one head of Yang et al., "Hierarchical Attention
    Networks", NAACL 2016.
    """

    def __init__(self, config: HistorySettings, *, dim: int, std: float) -> None:
        super().__init__(config, dim=dim, std=std)
        self.attention = nn.Parameter(torch.zeros(dim))

    def _weights(self, item_VD: Tensor, history_H: Tensor, *, query_H: Tensor, offset: Tensor) -> Tensor:
        # Autocast may compute the product in bf16, in which the sum of more than 256 weights would stop rising.
        score_V = item_VD @ self.attention / self.attention.shape[0] ** 0.5
        score_H = score_V.to(torch.promote_types(score_V.dtype, torch.float32))[history_H]
        # Subtract the maximum of each history. With the maximum of the batch, all weights of a history could underflow.
        max_score_B = score_H.new_full((len(offset) - 1,), -torch.inf).scatter_reduce(0, query_H, score_H.detach(), "amax")
        weight_H: Tensor = (score_H - max_score_B[query_H]).exp()
        return weight_H


class SelfAttentionEncoder(HistoryEncoder):
    """The state of the last item after blocks of self-attention. Histories of similar length are padded together.

    With `recency_residual`, the result is the sum of the state and the weighted mean of RecencyEncoder. The state starts at
    zero, so that training starts from the mean.
    """

    def __init__(self, config: HistorySettings, *, dim: int, std: float) -> None:
        super().__init__(config, dim=dim, std=std)
        assert isinstance(config, SelfAttentionHistory)
        self.attention = SelfAttention(config, dim=dim, std=std)
        self.recency = nn.Parameter(torch.zeros(config.length)) if config.recency_residual else None

    def forward(self, item_VD: Tensor, history_H: Tensor, offset: Tensor) -> Tensor:
        """Return one vector per history [B, D]; see HistoryEncoder.forward."""
        if self.training and self.item_dropout:
            is_retained_H = torch.rand(len(history_H), device=history_H.device) >= self.item_dropout
            num_retained_before = nn.functional.pad(is_retained_H.cumsum(dim=0), (1, 0))
            history_H, offset = history_H[is_retained_H], num_retained_before[offset]
        length_B = offset.diff()
        if not len(history_H):
            return self._encode_empty_histories(item_VD, num_histories=len(length_B))
        vectors_by_group, indices_by_group = [], []
        for index_B, padded_length in groups_of_similar_length(length_B, max_length=self.length):
            vectors_by_group.append(
                self._encode_group(item_VD, history_H, offset[index_B], length_B[index_B], padded_length=padded_length)
            )
            indices_by_group.append(index_B)
        original_order_B = torch.cat(indices_by_group).argsort()
        vector_BD = torch.cat(vectors_by_group)[original_order_B]
        return torch.where(length_B[:, None] > 0, vector_BD, self.start.to(vector_BD.dtype))

    def _encode_empty_histories(self, item_VD: Tensor, *, num_histories: int) -> Tensor:
        """Return `start` for each history. All layers are used, because DDP needs the same parameters in every step."""
        padding_B1 = torch.zeros(num_histories, 1, dtype=torch.int64, device=item_VD.device)
        is_item_B1 = padding_B1.bool()
        unused_BD = self.encode(item_VD.new_zeros(num_histories, 1, item_VD.shape[1]), is_item_B1, padding_B1)
        return torch.where(is_item_B1, unused_BD, self.start.to(unused_BD.dtype))

    def _encode_group(
        self, item_VD: Tensor, history_H: Tensor, first_entry_B: Tensor, length_B: Tensor, *, padded_length: int
    ) -> Tensor:
        """Return the vectors [B, D] of histories that start at `first_entry_B` in `history_H`, padded to `padded_length`."""
        if not padded_length:
            return self.start.expand(len(length_B), -1)
        column = torch.arange(padded_length, device=history_H.device)
        is_item_BH = column < length_B[:, None]
        entry_BH = torch.where(is_item_BH, first_entry_B[:, None] + column, 0)
        position_BH = (length_B[:, None] - 1 - column).clamp(min=0)
        item_BHD = embedding(history_H[entry_BH], item_VD)
        return self.encode(item_BHD, is_item_BH, position_BH)

    def encode(self, item_BHD: Tensor, is_item_BH: Tensor, position_BH: Tensor) -> Tensor:
        """Return one vector per padded history [B, D]; see SelfAttention.forward."""
        vector_BD: Tensor = self.attention(item_BHD, is_item_BH, position_BH)
        if self.recency is None:
            return vector_BD
        score_BH = self.recency[position_BH]
        weight_BH = score_BH.masked_fill(~is_item_BH, torch.finfo(score_BH.dtype).min).softmax(dim=1)
        return vector_BD + (weight_BH[:, None, :].to(item_BHD.dtype) @ item_BHD).squeeze(1)

    def expected_norm(self, row_norm: float) -> float:
        """Return the expected norm of an encoded history at the start of training.

        The last layer norm scales the vectors to the norm of one item. With `recency_residual`, the result is the norm of the
        mean of random rows.
        """
        return row_norm if self.recency is None else super().expected_norm(row_norm)


_ENCODER_BY_CONFIG: dict[type[HistorySettings], type[HistoryEncoder]] = {
    MeanHistory: MeanEncoder,
    SumHistory: SumEncoder,
    RecencyHistory: RecencyEncoder,
    AttentionHistory: AttentionEncoder,
    SelfAttentionHistory: SelfAttentionEncoder,
}


def make_encoder(config: HistorySettings, *, dim: int, std: float) -> HistoryEncoder:
    """Return the encoder of a config, with the arguments of HistoryEncoder."""
    return _ENCODER_BY_CONFIG[type(config)](config, dim=dim, std=std)


def last_items(item_VD: Tensor, history_H: Tensor, offset: Tensor, *, start: Tensor) -> Tensor:
    """Return the vector of the last item of each history [B, D]; `start` [D] for an empty history.

    >>> items = torch.tensor([[1.0], [2.0], [3.0]])
    >>> last_items(items, torch.tensor([0, 2]), torch.tensor([0, 2, 2]), start=torch.tensor([7.0])).tolist()
    [[3.0], [7.0]]
    """
    has_item_B = offset.diff() > 0
    last_item_B = history_H[(offset[1:] - 1).clamp(min=0)] if len(history_H) else torch.zeros_like(offset[1:])
    if not len(item_VD):
        return start.expand(len(has_item_B), -1)
    return torch.where(has_item_B[:, None], item_VD[last_item_B], start.to(item_VD.dtype))


def pool_lists(value_LD: Tensor, offset: Tensor, *, weight_L: Tensor | None, is_mean: bool) -> Tensor:
    """Return the weighted sum of each list of vectors, or its weighted mean if `is_mean`: [B, D]. An empty list gives zeros.

    Args:
        offset: [B + 1], the bounds of each list in `value_LD`.
        weight_L: weights of the vectors; None for weights of 1.
    """
    offset = offset.long()
    weight_L = torch.ones_like(value_LD[:, 0]) if weight_L is None else weight_L
    if is_mean:
        total_weight_B = torch.segment_reduce(weight_L, "sum", offsets=offset, initial=0.0)
        total_weight_B = total_weight_B.clamp(min=torch.finfo(torch.float32).tiny)
        weight_L = weight_L / torch.repeat_interleave(total_weight_B, offset.diff(), output_size=len(weight_L))
    index_L = torch.arange(len(value_LD), device=value_LD.device)
    pooled_BD: Tensor = embedding_bag(
        index_L, value_LD, offset, mode="sum", per_sample_weights=weight_L, include_last_offset=True
    )
    return pooled_BD
