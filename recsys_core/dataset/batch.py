"""The input of a training step, and its assembly from users, histories and candidates.

Shapes: B queries, C candidates, V distinct items, H entries of all histories, L entries of a ragged array.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsys_core.dataset.feature_store import POOLED, POOLED_WEIGHTED, UNPOOLED, Feature, FeatureStore
from recsys_core.dataset.jagged import Int64Array, JaggedArray


@dataclass(frozen=True)
class Batch(Pipelineable):  # type: ignore[misc]  # TorchRec has no types
    """B queries, their candidates (positives and negatives), and the V distinct items of candidates and histories.

    Candidates and histories are indices into the V items, so each item is looked up once per step.
    """

    sparse: dict[str, KeyedJaggedTensor]
    """Values to look up, by kind of lookup (recsys_core.dataset.feature_store). A kind without features has no entry."""
    batch_size: int
    item_row_V: Tensor
    """int64 [V]: row of each distinct item in the catalogue."""
    candidate_index_C: Tensor
    """int64 [C], indices into the V items: the B positives, then the negatives; see TrainLoader."""
    history_index_H: Tensor
    """int64 [H], indices into the V items: the histories one after the other, each oldest first."""
    history_offset: Tensor
    """int64 [B + 1]: the history of query b is history_index_H[history_offset[b]:history_offset[b + 1]]."""
    item_feature_weight: dict[str, Tensor]
    """Weights of the weighted item features, by feature key: float32, one weight for each value."""
    loss_weight: Tensor | None = None
    """float32 [B]: factor of each query's loss, with a mean of 1 over all training events; None: all factors are 1."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Copy the batch to `device`."""
        if self.item_row_V.device == device:
            return self
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Copy the batch to page-locked memory."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory allocated until `stream` has read it."""
        self._map_tensors(lambda tensor: tensor.record_stream(stream))

    def _map_tensors(self, tensor_function: Callable[[Any], Any]) -> Self:
        mapped_fields: dict[str, Any] = {}
        for field in fields(self):
            field_value = getattr(self, field.name)
            if isinstance(field_value, dict):
                mapped_fields[field.name] = {key: tensor_function(tensor) for key, tensor in field_value.items()}
            elif isinstance(field_value, Tensor):
                mapped_fields[field.name] = tensor_function(field_value)
        return replace(self, **mapped_fields)


@dataclass(frozen=True)
class Assembler:
    """Builds batches from rows of users and items, and adds their features.

    Args:
        user_batch_key: key of the user ids in Batch.sparse; None: the model has no table of user ids.
        features: features of users, events and items; None: the model uses none.
    """

    user_batch_key: str | None
    features: FeatureStore | None = None

    def batch(
        self,
        *,
        user_row_B: Int64Array,
        event_index_B: Int64Array,
        history: JaggedArray,
        candidate_row_C: Int64Array,
        loss_weight_B: NDArray[np.float32] | None = None,
    ) -> Batch:
        """Build a batch of B queries and C candidates.

        Args:
            user_row_B: rows of the users.
            event_index_B: index of each query's event in the log; it selects the values of the context features.
            history: B lists of item rows.
            candidate_row_C: item rows, the B positives first; empty if only queries are encoded.
            loss_weight_B: factor of each query's loss; None: all factors are 1.
        """
        distinct_index, item_row_V = pd.factorize(np.concatenate([candidate_row_C, history.values_L]))
        item_row_V = _at_least_one_row(item_row_V)  # one unused item if there are no candidates and no histories
        sparse, item_feature_weight = self._query_features(user_row_B, event_index_B), {}
        unpooled_rows_by_key = {"item": JaggedArray.from_single_values(item_row_V)}
        for key, feature in self._keyed_features("item"):
            unpooled_rows_by_key[key], weight_L = feature.rows_and_weights(item_row_V)
            if weight_L is not None:
                item_feature_weight[key] = torch.from_numpy(weight_L)
        if self.user_batch_key == UNPOOLED:
            unpooled_rows_by_key["user"] = JaggedArray.from_single_values(_at_least_one_row(user_row_B))
        sparse[UNPOOLED] = keyed_jagged(unpooled_rows_by_key, num_samples=max(len(item_row_V), len(user_row_B)))
        return Batch(
            sparse=sparse,
            batch_size=len(user_row_B),
            item_row_V=torch.from_numpy(item_row_V),
            candidate_index_C=torch.from_numpy(distinct_index[: len(candidate_row_C)]),
            history_index_H=torch.from_numpy(distinct_index[len(candidate_row_C) :]),
            history_offset=torch.from_numpy(history.offset),
            item_feature_weight=item_feature_weight,
            loss_weight=None if loss_weight_B is None else torch.from_numpy(loss_weight_B),
        )

    def item_batch(self, item_row: Int64Array) -> Batch:
        """Build a batch of candidates without queries. The rows in `item_row` must be distinct; the batch keeps their order."""
        empty_B = np.zeros(0, np.int64)
        return self.batch(user_row_B=empty_B, event_index_B=empty_B, history=JaggedArray.empty(0), candidate_row_C=item_row)

    def _query_features(self, user_row_B: Int64Array, event_index_B: Int64Array) -> dict[str, KeyedJaggedTensor]:
        """Return the values to look up for each query (user ids, user features, context features), by kind of lookup."""
        pooled_rows_by_key = {"user": JaggedArray.from_single_values(user_row_B)} if self.user_batch_key == POOLED else {}
        weighted_rows_by_key: dict[str, JaggedArray] = {}
        weight_arrays: list[NDArray[np.float32]] = []
        for owner_kind, index_B in (("user", user_row_B), ("context", event_index_B)):
            for key, feature in self._keyed_features(owner_kind):
                table_rows, weight_L = feature.rows_and_weights(index_B)
                if weight_L is None:
                    pooled_rows_by_key[key] = table_rows
                else:
                    weighted_rows_by_key[key] = table_rows
                    weight_arrays.append(weight_L)
        sparse = {}
        if pooled_rows_by_key:
            sparse[POOLED] = keyed_jagged(pooled_rows_by_key, num_samples=len(user_row_B))
        if weighted_rows_by_key:
            weight_L = np.concatenate(weight_arrays)
            sparse[POOLED_WEIGHTED] = keyed_jagged(weighted_rows_by_key, num_samples=len(user_row_B), weight_L=weight_L)
        return sparse

    def _keyed_features(self, owner_kind: str) -> list[tuple[str, Feature]]:
        """Return the features of `owner_kind` with their keys. owner_kind: "user", "item" or "context"."""
        feature_by_key = self.features.feature_by_key if self.features is not None else {}
        return [(key, feature) for key, feature in feature_by_key.items() if key.startswith(f"{owner_kind}.")]


def _at_least_one_row(rows: Int64Array) -> Int64Array:
    """Return `rows`, or [0] if `rows` is empty. FBGEMM on a GPU rejects an empty lookup (pytorch/FBGEMM#3750)."""
    return rows if len(rows) else np.zeros(1, np.int64)


def keyed_jagged(
    features: Mapping[str, JaggedArray], *, num_samples: int, weight_L: NDArray[np.float32] | None = None
) -> KeyedJaggedTensor:
    """Build a KeyedJaggedTensor. A feature with fewer than `num_samples` lists gets empty lists at its end.

    weight_L: one weight for each value, feature by feature in the order of `features`.
    """
    lengths_by_feature: NDArray[np.int32] = np.zeros((len(features), num_samples), np.int32)
    for feature_lengths, feature in zip(lengths_by_feature, features.values(), strict=True):
        np.subtract(feature.offset[1:], feature.offset[:-1], out=feature_lengths[: len(feature)], casting="unsafe")
    num_values_per_feature = [len(feature.values_L) for feature in features.values()]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.from_numpy(np.concatenate([feature.values_L for feature in features.values()])),
        weights=None if weight_L is None else torch.from_numpy(weight_L),
        lengths=torch.from_numpy(lengths_by_feature.reshape(-1)),
        stride=num_samples,
        # Without these two arguments, TorchRec would compute them in the training thread.
        length_per_key=num_values_per_feature,
        offset_per_key=[0, *accumulate(num_values_per_feature)],
    )
