"""The query tower on padded lists, which torch.export and ONNX can express.

Shapes: B queries, H entries of a history, L values of a feature with padding, D width of a vector, M width of the item vectors
of the spectral block.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize

from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.models.ensemble import encode_by_member
from recsys_core.models.history import (
    AttentionEncoder,
    HistoryEncoder,
    MeanEncoder,
    RecencyEncoder,
    SelfAttentionEncoder,
    SumEncoder,
)
from recsys_core.models.spec import module_name
from recsys_core.models.towers import QueryTower
from recsys_core.serving.quantise import BLOCK_TABLE, HISTORY_TABLE, ServedQueryTower

if TYPE_CHECKING:
    from recsys_core.serving.given_features import GivenFeature

HISTORY, HISTORY_MASK, WEIGHT_SUFFIX = "history", "history_mask", "_weight"


class PaddedQueryTower(nn.Module):
    """The query tower of a package, with a dictionary of tensors as its input and the same tables as the served tower.

    Inputs by name:

    - history int64 [B, H]: item rows, oldest first, at most the longest history that the model reads.
    - history_mask bool [B, H]: whether an entry is an item. Padding may be on either side.
    - <table> int64 [B, L]: rows in each other table of the query tower, such as `user` or `user__genres`.
    - <table>_weight float32 [B, L]: weight of each row, 1 for a feature without weights; 0 for padding.
    """

    def __init__(self, tower: ServedQueryTower) -> None:
        super().__init__()
        self.tables, self.dense, self.block, spec = tower.tables, tower.dense, tower.block, tower.spec
        self._history_length = spec.history_length
        self._block_history_length = 0 if spec.config.spectral_block is None else spec.config.spectral_block.history_length
        self._is_mean_by_table = {
            table_name: spec.forms.get(table_name) in ("list", "weighted_list")
            and spec.tables[table_name].settings.pooling == "mean"
            for table_name in self.dense.feature_names
        }
        self.eval()

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the query vectors, [B, D]."""
        item_BHD, mask_BH = None, None
        if HISTORY_TABLE in self.tables:
            mask_BH = _newest_mask(inputs[HISTORY_MASK], length=self._history_length)
            item_BHD = self._look_up(HISTORY_TABLE, torch.where(mask_BH, inputs[HISTORY], 0))
        features = {}
        for table_name, is_mean in self._is_mean_by_table.items():
            input_name = module_name(table_name)
            weight_BL = inputs[input_name + WEIGHT_SUFFIX]
            value_BLD = self._look_up(input_name, torch.where(weight_BL != 0, inputs[input_name], 0))
            if is_mean:
                weight_BL = weight_BL / weight_BL.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            features[table_name] = (value_BLD * weight_BL[:, :, None]).sum(dim=1)
        query_BD = encode_by_member(self.dense, item_BHD, features, lambda *arguments: _encode(*arguments, mask_BH=mask_BH))
        if self.block is None:
            return query_BD
        block_mask_BH = _newest_mask(inputs[HISTORY_MASK], length=self._block_history_length)
        item_BHM = self._look_up(BLOCK_TABLE, torch.where(block_mask_BH, inputs[HISTORY], 0))
        joined_BD: Tensor = self.block(query_BD, (item_BHM * block_mask_BH[:, :, None]).sum(dim=1))
        return joined_BD

    def _look_up(self, table_name: str, row_BL: Tensor) -> Tensor:
        value_LD: Tensor = self.tables[table_name](row_BL.flatten())
        return value_LD.reshape(*row_BL.shape, value_LD.shape[1])


def _num_items_after(mask_BH: Tensor) -> Tensor:
    """Return the number of items after each entry of a history."""
    return mask_BH.sum(dim=1, keepdim=True) - mask_BH.long().cumsum(dim=1)


def _newest_mask(mask_BH: Tensor, *, length: int) -> Tensor:
    """Return the mask of the last `length` items of each history."""
    return mask_BH & (_num_items_after(mask_BH) < length)


def _encode(tower: QueryTower, item_BHD: Tensor | None, features: Mapping[str, Tensor], *, mask_BH: Tensor | None) -> Tensor:
    """Compute the result of `QueryTower.forward` from padded histories, [B, D]."""
    inputs = []
    if tower.pooling is not None:
        assert item_BHD is not None
        assert mask_BH is not None
        num_newer_BH = _num_items_after(mask_BH)
        inputs.append(_pool_history(tower.pooling, item_BHD, mask_BH, num_newer_BH))
        if tower.uses_last_item:
            is_last_BH = mask_BH & (num_newer_BH == 0)
            last_BD = (item_BHD * is_last_BH[:, :, None]).sum(dim=1)
            inputs.append(torch.where(mask_BH.any(dim=1, keepdim=True), last_BD, tower.pooling.start))
    query_BD: Tensor = tower.tower(inputs + [features[table_name] for table_name in tower.feature_names])
    query_BD = normalize(query_BD, dim=1) if tower.is_cosine else query_BD
    return query_BD if tower.popularity is None else tower.popularity(query_BD)


def _pool_history(encoder: HistoryEncoder, item_BHD: Tensor, mask_BH: Tensor, num_newer_BH: Tensor) -> Tensor:
    """Compute the result of `HistoryEncoder.forward` from padded histories, [B, D]. num_newer_BH: number of newer items."""
    is_item_BH = mask_BH.to(item_BHD.dtype)
    match encoder:
        case SelfAttentionEncoder():
            vector_BD = encoder.encode(item_BHD, mask_BH, num_newer_BH.clamp(0, encoder.length - 1))
            return torch.where(mask_BH.any(dim=1, keepdim=True), vector_BD, encoder.start)
        case RecencyEncoder():
            weight_BH = encoder.recency.exp()[num_newer_BH.clamp(0, encoder.length - 1)] * is_item_BH
        case AttentionEncoder():
            score_BH = item_BHD @ encoder.attention / encoder.attention.shape[0] ** 0.5
            score_BH = score_BH.masked_fill(~mask_BH, torch.finfo(score_BH.dtype).min)
            weight_BH = (score_BH - score_BH.amax(dim=1, keepdim=True)).exp() * is_item_BH
        case MeanEncoder() | SumEncoder():
            weight_BH = is_item_BH
        case _:  # HistorySettings.has_padded_form rejects such a config
            raise NotImplementedError(f"{type(encoder).__name__} has no form for padded histories")
    total_weight_B1 = weight_BH.sum(dim=1, keepdim=True)
    if encoder.is_normalised:
        weight_BH = weight_BH / total_weight_B1.clamp(min=torch.finfo(torch.float32).tiny)
    pooled_BD = (item_BHD * weight_BH[:, :, None]).sum(dim=1)
    return torch.where(total_weight_B1 > 0, pooled_BD, encoder.start)


def padded_inputs(
    tower: ServedQueryTower,
    user_row_B: NDArray[np.int64],
    history: JaggedArray,
    *,
    features: FeatureStore,
    given_features: "Mapping[str, GivenFeature] | None" = None,
) -> dict[str, NDArray[np.generic]]:
    """Return the inputs of PaddedQueryTower for the arguments of `ServedQueryTower.forward`."""
    inputs: dict[str, NDArray[np.generic]] = {}
    if history_width := tower.spec.served_history_length:
        history = history.last_values(history_width)
        inputs[HISTORY] = _padded(history, history.values_L, width=history_width)
        inputs[HISTORY_MASK] = _padded(history, np.ones(len(history.values_L), np.bool_), width=history_width)
    for table_name in tower.dense.feature_names:
        rows, weight_L = tower.rows_and_weights(table_name, user_row_B, features, (given_features or {}).get(table_name))
        weight_L = np.ones(len(rows.values_L), np.float32) if weight_L is None else weight_L
        width = list_width(tower, table_name, max_length=int(rows.lengths.max(initial=0)))
        inputs[module_name(table_name)] = _padded(rows, rows.values_L, width=width)
        inputs[module_name(table_name) + WEIGHT_SUFFIX] = _padded(rows, weight_L, width=width)
    return inputs


def list_width(tower: ServedQueryTower, table_name: str, *, max_length: int) -> int:
    """Return the width of a feature's inputs: 1, or at least 2 for a list, because torch.export fixes the sizes 0 and 1."""
    return max(2, max_length) if is_list(tower, table_name) else 1


def is_list(tower: ServedQueryTower, table_name: str) -> bool:
    """Return whether a query can have several rows in a table."""
    return tower.spec.forms.get(table_name) in ("list", "weighted_list")


def _padded(lists: JaggedArray, value_L: NDArray[np.generic], *, width: int) -> NDArray[np.generic]:
    """Return an array with one list per row, padded with zeros at the end."""
    padded_lists = np.zeros((len(lists), width), value_L.dtype)
    padded_lists[lists.list_index_L, np.arange(len(value_L)) - np.repeat(lists.offset[:-1], lists.lengths)] = value_L
    return padded_lists
