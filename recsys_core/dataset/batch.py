"""The input of a training step: queries, candidates and histories, with the features to look up as KeyedJaggedTensors.

Shapes: B queries, N drawn negatives, C = B + N candidates, V distinct items, H history entries of all queries.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsys_core.dataset.jagged import JaggedArray


@dataclass(frozen=True)
class Batch(Pipelineable):  # type: ignore[misc]  # TorchRec has no types
    """B queries with their positives, N drawn negatives, and the V distinct items of candidates and histories.

    Candidates and histories are indices into the V items, so each item is looked up once per step.
    """

    sparse: dict[str, KeyedJaggedTensor]
    """Values to look up, by kind of lookup (recsys_core.dataset.batch_keys). A kind without features has no entry."""
    batch_size: int
    item_row_V: Tensor
    """int64 [V]: row of each distinct item in the catalogue."""
    candidate_index_C: Tensor
    """int64 [C], indices into the V items: the B positives, then the N drawn negatives."""
    history_index_H: Tensor
    """int64 [H], indices into the V items: the histories one after the other, each oldest first."""
    history_offset: Tensor
    """int64 [B + 1]: the history of query b is history_index_H[history_offset[b]:history_offset[b + 1]]."""
    item_feature_weight: dict[str, Tensor]
    """For each weighted item feature, a float32 tensor with one weight per value of the feature."""
    loss_weight: Tensor | None = None
    """float32 [B]: factor of each query's loss. The mean over all training events is 1. None: all factors are 1."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Copy the batch to `device`."""
        if self.item_row_V.device == device:
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Copy the batch to page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory allocated until `stream` has read it."""
        self._map(lambda tensor: tensor.record_stream(stream))

    def _map(self, function: Callable[[Any], Any]) -> Self:
        mapped_fields: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                mapped_fields[field.name] = {key: function(tensor) for key, tensor in value.items()}
            elif isinstance(value, Tensor):
                mapped_fields[field.name] = function(value)
        return replace(self, **mapped_fields)


def keyed_jagged(
    features: Mapping[str, JaggedArray], *, num_samples: int, weight_L: NDArray[np.float32] | None = None
) -> KeyedJaggedTensor:
    """Build a KeyedJaggedTensor; a feature with fewer than `num_samples` lists gets empty lists at its end.

    weight_L: one weight for each value, in the order of `features`.
    """
    length_FB: NDArray[np.int32] = np.zeros((len(features), num_samples), np.int32)
    for feature_lengths, feature in zip(length_FB, features.values(), strict=True):
        np.subtract(feature.offset[1:], feature.offset[:-1], out=feature_lengths[: len(feature)], casting="unsafe")
    num_values_per_feature = [len(feature.values_L) for feature in features.values()]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.from_numpy(np.concatenate([feature.values_L for feature in features.values()])),
        weights=None if weight_L is None else torch.from_numpy(weight_L),
        lengths=torch.from_numpy(length_FB.reshape(-1)),
        stride=num_samples,
        # Without these two arguments TorchRec would compute them in the training thread.
        length_per_key=num_values_per_feature,
        offset_per_key=[0, *accumulate(num_values_per_feature)],
    )
