"""The popularity term of a score: a weight times a popularity, the last numbers of the query vector and of the item vector.

The score stays one inner product, so indexes, packages and vector stores need no change. Under cosine similarity, the norms
are then above 1.

Shapes: B queries, V items, I items of the catalogue, D width of a vector.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recsys_core.models.config import FixedPopularity, LearnedPopularity, ValidatedPopularity

UNSEEN_POPULARITY = 0.0
"""Popularity of an item without a training event."""


def item_popularity(item_count_I: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return log(1 + number of training events) of each item, divided by its largest value.

    >>> item_popularity(np.array([0, 1, 3])).tolist()
    [0.0, 0.5, 1.0]
    """
    log_count_I = np.log1p(item_count_I)
    popularity_I: NDArray[np.float32] = (log_count_I / max(log_count_I.max(initial=0), np.log(2))).astype(np.float32)
    return popularity_I


class PopularityWeight(nn.Module):
    """The weight of the popularity, which is appended to the query vectors."""

    def __init__(self, config: FixedPopularity | LearnedPopularity | ValidatedPopularity) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1)) if isinstance(config, LearnedPopularity) else None
        self.served_weight: float | None
        match config:
            case LearnedPopularity():
                self.served_weight = config.served_weight
            case FixedPopularity():
                self.served_weight = config.weight
            case ValidatedPopularity():
                self.served_weight = 0.0  # until the export has chosen it

    def forward(self, query_BD: Tensor) -> Tensor:
        """Append the weight: the trained one in training and by default, otherwise the served one. Returns [B, D + 1]."""
        weight: Tensor | float = 0.0 if self.training or self.served_weight is None else self.served_weight
        if self.weight is not None and (self.training or self.served_weight is None):
            weight = self.weight
        # An expansion to len(query_BD) would be a constant in a torch.export program.
        return torch.cat([query_BD, torch.ones_like(query_BD[:, :1]) * weight], dim=1)


def append_popularity(candidate_VD: Tensor, popularity_V: Tensor) -> Tensor:
    """Append the popularity of each item to its vector. Returns [V, D + 1]."""
    return torch.cat([candidate_VD, popularity_V[:, None].to(candidate_VD.dtype)], dim=1)
