"""A user's items become one vector.

Shapes: B queries, U distinct items, T items of all histories, H width of what stands for an item.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from recsys_core.models.config import HistoryConfig


class HistoryPooling(nn.Module):
    """Weighted sums over the items of each history; the weights are one, learned by place, or given by one learned query.

    recency: weight exp(a[p]) for the item p places before the end, a learned, zero at first, so that training starts from the
    mean. attention: weight exp(q . x / sqrt(H)) for item x, q learned, zero at first (one head of Yang et al., "Hierarchical
    Attention Networks", NAACL 2016). Both are divided by their sum over the history.

    A history without an item counts as a history of one item, `start`, which is learned.

    Args:
        std: standard deviation of the first values of `start`.
    """

    def __init__(self, config: HistoryConfig, *, dim: int, std: float) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(dim) * std)
        self.kind, self.item_dropout = config.pooling, config.item_dropout
        if self.kind == "recency":
            self.recency = nn.Parameter(torch.zeros(config.length))
        if self.kind == "attention":
            self.attention = nn.Parameter(torch.zeros(dim))

    def forward(self, item_UH: Tensor, item_T: Tensor, offset: Tensor) -> Tensor:
        """Pooled histories [B, H]; `start` for an empty one, and for one of which dropout leaves no item.

        item_T: which of the U items, oldest first within a history; offset: int64 [B + 1], where each history starts and ends.
        """
        length_B = offset.diff()
        owner_T = torch.repeat_interleave(torch.arange(len(length_B), device=offset.device), length_B, output_size=len(item_T))
        weight_T = self._weights(item_UH, item_T, owner_T=owner_T, offset=offset)
        if self.training and self.item_dropout:
            weight_T = weight_T * (torch.rand_like(weight_T) >= self.item_dropout)
        total_B = torch.zeros(len(length_B), dtype=weight_T.dtype, device=weight_T.device).index_add(0, owner_T, weight_T)
        if self.kind != "sum":
            weight_T = weight_T / total_B.clamp(min=torch.finfo(weight_T.dtype).tiny)[owner_T]
        pooled_BH: Tensor = embedding_bag(
            item_T, item_UH, offset, mode="sum", per_sample_weights=weight_T.to(item_UH.dtype), include_last_offset=True
        )
        return torch.where(total_B[:, None] > 0, pooled_BH, self.start.to(pooled_BH.dtype))

    def _weights(self, item_UH: Tensor, item_T: Tensor, *, owner_T: Tensor, offset: Tensor) -> Tensor:
        if self.kind == "recency":
            age_T = offset[1:][owner_T] - 1 - torch.arange(len(item_T), device=item_T.device)
            weight_T: Tensor = self.recency.exp()[age_T]
            return weight_T
        if self.kind == "attention":
            score_T = (item_UH @ self.attention / self.attention.shape[0] ** 0.5)[item_T]
            # Less the highest of its own history: that of the batch would leave nothing of a history far below it.
            highest_B = score_T.new_full((len(offset) - 1,), -torch.inf).scatter_reduce(0, owner_T, score_T.detach(), "amax")
            attention_T: Tensor = (score_T - highest_B[owner_T]).exp()
            return attention_T
        return torch.ones(len(item_T), device=item_T.device)


def last_items(item_UH: Tensor, item_T: Tensor, offset: Tensor, *, start: Tensor) -> Tensor:
    """[B, H]: the last item of each history; `start` [H] where there is none.

    >>> items = torch.tensor([[1.0], [2.0], [3.0]])
    >>> last_items(items, torch.tensor([0, 2]), torch.tensor([0, 2, 2]), start=torch.tensor([7.0])).tolist()
    [[3.0], [7.0]]
    """
    filled_B = offset.diff() > 0
    last_B = item_T[(offset[1:] - 1).clamp(min=0)] if len(item_T) else torch.zeros_like(offset[1:])
    if not len(item_UH):
        return start.expand(len(filled_B), -1)
    return torch.where(filled_B[:, None], item_UH[last_B], start.to(item_UH.dtype))
