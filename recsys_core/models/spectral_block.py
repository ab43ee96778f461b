"""The spectral block of a query vector: a sum over the history, appended to the trained vector.

Shapes: B queries, V items, M width of the block, T width of a trained vector, D width of the result, H entries of all
histories.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, normalize

from recsys_core.models.config import TwoTowerConfig

BLOCK_HISTORY_FILE, BLOCK_MAPS_FILE = "block_history.npy", "block_maps.safetensors"
"""Files of an export; see ExportManifest."""


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
