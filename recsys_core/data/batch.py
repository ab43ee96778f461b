"""What a training step is given: the queries, their candidates, and what is looked up for both, as TorchRec wants it.

Shapes: B queries, N drawn candidates, K = B + N candidates, U distinct items, T items of all histories.
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

from recsys_core.data.jagged import JaggedArray


@dataclass(frozen=True)
class Batch(Pipelineable):  # type: ignore[misc]  # TorchRec has no types
    """B queries with their positives, N candidates more, and the distinct items among all of them and the histories.

    An item is looked up once per step, however many histories it is in; candidates and histories point at it.
    """

    sparse: dict[str, KeyedJaggedTensor]
    """By UNPOOLED, POOLED and POOLED_WEIGHTED (recsys_core.data.batch_keys); the last two only where a feature wants them."""
    batch_size: int
    item_row_V: Tensor
    """int64 [U]: rows of the catalogue."""
    candidate_C: Tensor
    """int64 [K], places among the U: the B positives, then the N drawn ones."""
    history_H: Tensor
    """int64 [T], places among the U: the histories one after the other, each oldest first."""
    history_offset: Tensor
    """int64 [B + 1]."""
    item_weight: dict[str, Tensor]
    """float32, a weight for each value of the items' weighted features."""
    weight: Tensor | None = None
    """float32 [B]: what each query's loss is multiplied by, 1 on average over the training events; None: 1."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """The same on `device`."""
        if self.item_row_V.device == device:
            return self
        return self._moved(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """A copy in page-locked memory."""
        return self._moved(lambda part: part.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory until `stream` has read it."""
        self._moved(lambda part: part.record_stream(stream))

    def _moved(self, move: Callable[[Any], Any]) -> Self:
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                changed[field.name] = {key: move(part) for key, part in value.items()}
            elif isinstance(value, Tensor):
                changed[field.name] = move(value)
        return replace(self, **changed)


def keyed_jagged(
    features: Mapping[str, JaggedArray], *, samples: int, weight_T: NDArray[np.float32] | None = None
) -> KeyedJaggedTensor:
    """`features` over `samples` samples, a list each; a feature of fewer has empty lists after its last.

    weight_T: a weight for each value, in the order of `features`.
    """
    lengths: NDArray[np.int32] = np.zeros((len(features), samples), np.int32)
    for row, feature in zip(lengths, features.values(), strict=True):
        np.subtract(feature.offset[1:], feature.offset[:-1], out=row[: len(feature)], casting="unsafe")
    values = [len(feature.values_L) for feature in features.values()]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.from_numpy(np.concatenate([feature.values_L for feature in features.values()])),
        weights=None if weight_T is None else torch.from_numpy(weight_T),
        lengths=torch.from_numpy(lengths.reshape(-1)),
        stride=samples,
        # Known here; TorchRec would sum them up in the trainer's time.
        length_per_key=values,
        offset_per_key=[0, *accumulate(values)],
    )
