"""Terms that are added to the similarity of query and item: the popularity, and the spectral block.

The popularity term is the product of a weight, the last number of the query vector, and a popularity, the last number of the
item vector. The spectral block is a sum over the history, appended to the trained query vector. The score stays one inner
product, so indexes, packages and vector stores need no change. With a popularity term, the vectors have norms above 1 under
cosine similarity.

Shapes: B queries, V items, I items of the catalogue, D width of a vector, M width of the block, T width of a trained vector, H
entries of all histories.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, normalize

from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.score_config import FixedPopularity, LearnedPopularity, ValidatedPopularity

BLOCK_HISTORY_FILE, BLOCK_MAPS_FILE = "block_history.npy", "block_maps.safetensors"
"""Files of an export; see ExportManifest."""
UNSEEN_POPULARITY = 0.0
"""Popularity of an item without a training event."""


def item_popularity(item_count_I: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return log(1 + number of training events) of each item, divided by the largest such value.

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
                self.served_weight = 0.0  # until the export has chosen the weight

    def forward(self, query_BD: Tensor) -> Tensor:
        """Return the vectors with a weight appended, [B, D + 1].

        While training, it is the trained weight, or 0 if the weight is not trained. Otherwise, it is the served weight, or the
        trained weight if no served weight is set.
        """
        weight: Tensor | float = 0.0 if self.weight is None else self.weight
        if not self.training and self.served_weight is not None:
            weight = self.served_weight
        # torch.export would turn the size in `expand(len(query_BD), 1)` into a constant, so multiply by ones.
        return torch.cat([query_BD, torch.ones_like(query_BD[:, :1]) * weight], dim=1)


def append_popularity(candidate_VD: Tensor, popularity_V: Tensor) -> Tensor:
    """Return the vectors with the popularity of each item appended, [V, D + 1]."""
    return torch.cat([candidate_VD, popularity_V[:, None].to(candidate_VD.dtype)], dim=1)


class SpectralBlock(nn.Module):
    """Concatenation of trained query vectors with blocks of norm 1, multiplied by a matrix.

    `query_map` contains the weight of the block and the reduction to `output_dim`. `similar_map` turns the vector of an item
    into a query for similar items.
    """

    query_map: Tensor
    similar_map: Tensor

    def __init__(self, config: TwoTowerConfig) -> None:
        super().__init__()
        assert config.spectral_block is not None
        self.register_buffer("query_map", torch.empty(config.trained_dim + config.spectral_block.dim, config.output_dim))
        self.register_buffer("similar_map", torch.empty(config.output_dim, config.output_dim))

    def forward(self, query_BT: Tensor, total_BM: Tensor) -> Tensor:
        """Return query vectors [B, D]. total_BM: sum of the items' vectors over each history; 0 for an empty history."""
        vector_BD: Tensor = torch.cat([query_BT, normalize(total_BM, dim=1)], dim=1) @ self.query_map
        return vector_BD


def history_totals(item_VM: Tensor, history_H: Tensor, offset: Tensor) -> Tensor:
    """Return the sum of the vectors of each history, [B, M].

    Args:
        history_H: int64, index into `item_VM` of each history entry.
        offset: [B + 1], the bounds of each history in `history_H`.

    >>> history_totals(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1, 1]), torch.tensor([0, 2, 2, 3])).tolist()
    [[3.0], [0.0], [2.0]]
    """
    total_BM: Tensor = embedding_bag(history_H, item_VM, offset, mode="sum", include_last_offset=True)
    return total_BM
