"""What a training step is given: the queries, their candidates, and the features of both as TorchRec wants them.

Shapes: B queries, N extra candidates, K = B + N samples of the KeyedJaggedTensors, T values of all lists together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsys_core.data.lists import Lists


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]  # TorchRec has no types
    """B queries with their positives, and N candidates more.

    All K samples ride in one KeyedJaggedTensor: the extra ones have empty query features, so one lookup serves both towers.
    """

    sparse: KeyedJaggedTensor
    batch_size: int
    item_rows: Tensor
    """int64 [K]: the B positives, then the N extra candidates."""
    weighted: KeyedJaggedTensor | None = None
    """The weighted lists: TorchRec wants all or none of a KeyedJaggedTensor weighted."""
    weight: Tensor | None = None
    """float32 [B]: how much each query counts in the loss; None: all the same."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """A copy on `device`."""
        return type(self)(
            sparse=self.sparse.to(device, non_blocking=non_blocking),
            batch_size=self.batch_size,
            item_rows=self.item_rows.to(device, non_blocking=non_blocking),
            weighted=None if self.weighted is None else self.weighted.to(device, non_blocking=non_blocking),
            weight=None if self.weight is None else self.weight.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory until `stream` has read it."""
        for part in (self.sparse, self.item_rows, self.weighted, self.weight):
            if part is not None:
                part.record_stream(stream)

    def pin_memory(self) -> Self:
        """A copy in page-locked memory."""
        return type(self)(
            sparse=self.sparse.pin_memory(),
            batch_size=self.batch_size,
            item_rows=self.item_rows.pin_memory(),
            weighted=None if self.weighted is None else self.weighted.pin_memory(),
            weight=None if self.weight is None else self.weight.pin_memory(),
        )


def keyed_jagged(
    features: Mapping[str, Lists], *, samples: int, weight_T: NDArray[np.float32] | None = None
) -> KeyedJaggedTensor:
    """`features` over `samples` samples; one that has fewer lists is empty for the rest.

    weight_T: a weight for each value, in the order of `features`.
    """
    lengths: NDArray[np.int32] = np.zeros((len(features), samples), np.int32)
    for row, feature in zip(lengths, features.values(), strict=True):
        row[: len(feature)] = feature.length_N
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.from_numpy(np.concatenate([feature.row_T for feature in features.values()])),
        weights=None if weight_T is None else torch.from_numpy(weight_T),
        lengths=torch.from_numpy(lengths.reshape(-1)),
    )
