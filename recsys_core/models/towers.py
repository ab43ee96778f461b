"""The dense part of both towers, over rows that were looked up.

Shapes: B queries, U distinct items, T items of all histories, D width in which features are added up, O output width,
H width of what stands for an item in a history.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from recsys_core.models.config import TowerConfig
from recsys_core.models.history import HistoryPooling, last_items
from recsys_core.models.normalisation import direction
from recsys_core.models.spec import ModelSpec
from recsys_core.models.table_config import OFFSET


class MLP(nn.Module):
    """Features [n, width] of one side -> [n, O]: their sum, layers over them side by side, or both added.

    The last layer has no activation, so that a vector can point anywhere. With `residual` it starts at zero: training starts
    from the plain sum (Zhang et al., "Fixup initialization", ICLR 2019).
    """

    def __init__(self, config: TowerConfig, *, layers: Sequence[int], widths: Sequence[int], dim: int) -> None:
        super().__init__()
        self.input_dropout = nn.Dropout(config.dropout)
        self.adds = config.skip_connection or not layers
        if self.adds:
            self.projections = nn.ModuleList(
                nn.Identity() if width == dim else nn.Linear(width, dim, bias=False) for width in widths
            )
        self.layers = _layers(sum(widths), layers, config=config) if layers else None
        if self.layers is not None and config.skip_connection:
            last = self.layers[-1]
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """[n, O]."""
        inputs = [self.input_dropout(feature) for feature in features]
        if self.layers is None:
            return self._sum(inputs)
        out: Tensor = self.layers(torch.cat(inputs, dim=1) if len(inputs) > 1 else inputs[0])
        return out + self._sum(inputs) if self.adds else out

    def _sum(self, inputs: list[Tensor]) -> Tensor:
        return torch.stack([project(one) for project, one in zip(self.projections, inputs, strict=True)]).sum(dim=0)


def _layers(width: int, sizes: Sequence[int], *, config: TowerConfig) -> nn.Sequential:
    modules: list[nn.Module] = []
    for size in sizes[:-1]:
        modules.append(nn.Linear(width, size))
        if config.layer_norm:
            modules.append(nn.LayerNorm(size))
        modules += [nn.ReLU(inplace=True), nn.Dropout(config.hidden_dropout)]
        width = size
    return nn.Sequential(*modules, nn.Linear(width, sizes[-1]))


class QueryTower(nn.Module):
    """Everything dense that the query needs, and nothing else: what is served."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        config = spec.config
        self.cosine = config.similarity == "cosine"
        self.last_item = config.history.last_item
        self.tables = (["user"] if config.user_id else []) + spec.features("query")
        widths = [spec.tables[name].dim for name in self.tables]
        self.pooling: HistoryPooling | None = None
        if config.history.length:
            self.pooling = HistoryPooling(config.history, dim=config.history_dim, std=spec.history_std)
            widths = [config.history_dim] * (1 + self.last_item) + widths
        self.tower = MLP(config.query, layers=config.query_layers, widths=widths, dim=config.embedding_dim)
        # The mean over a history of random rows is shorter than one of them.
        self.floor = spec.row_norm / math.sqrt(max(config.history.length, 1))

    def forward(self, item_UH: Tensor, item_T: Tensor, offset: Tensor, *, features: Mapping[str, Tensor]) -> Tensor:
        """Query vectors [B, O], of unit length under cosine similarity.

        item_UH, item_T, offset: the histories, as HistoryPooling takes them. features: pooled [B, width] by table.
        """
        inputs = []
        if self.pooling is not None:
            inputs.append(self.pooling(item_UH, item_T, offset))
            if self.last_item:
                inputs.append(last_items(item_UH, item_T, offset, start=self.pooling.start))
        query_BO: Tensor = self.tower(inputs + [features[name] for name in self.tables])
        return direction(query_BO.float(), floor=self.floor) if self.cosine else query_BO.float()


class CandidateTower(nn.Module):
    """What an item is: its embedding (trained, frozen, or frozen plus a learned offset), and its vector."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        config = spec.config
        self.cosine = config.similarity == "cosine"
        self.id_dropout = spec.tables["item"].settings.id_dropout
        self.features = spec.features("item")
        dim = config.embedding_dim
        width = spec.tables["item"].dim
        self.projection = nn.Identity() if width == dim else nn.Linear(width, dim, bias=False)
        widths = [dim, *(spec.tables[name].dim for name in self.features)]
        self.tower = MLP(config.candidate, layers=config.candidate_layers, widths=widths, dim=dim)
        self.floor = spec.row_norm

    def embed(self, looked_up: Mapping[str, Tensor]) -> Tensor:
        """Embeddings [U, D] from the rows [U, width] of the tables `item` and, where there are offsets, OFFSET."""
        item_UD: Tensor = self.projection(looked_up["item"])
        if OFFSET not in looked_up:
            return item_UD
        offset_UD = looked_up[OFFSET]
        if self.training and self.id_dropout:
            # Whole rows, not numbers, and nothing scaled up: the towers learn to live without an offset.
            offset_UD = offset_UD * (torch.rand(len(offset_UD), 1, device=offset_UD.device) >= self.id_dropout)
        return item_UD + offset_UD

    def forward(self, item_UD: Tensor, *, features: Mapping[str, Tensor]) -> Tensor:
        """Candidate vectors [U, O], of unit length under cosine similarity. features: pooled [U, width] by table."""
        candidate_UO: Tensor = self.tower([item_UD, *(features[name] for name in self.features)])
        return direction(candidate_UO.float(), floor=self.floor) if self.cosine else candidate_UO.float()
