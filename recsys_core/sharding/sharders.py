"""The sharder that training and planning share."""

from typing import Any

from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingType


class BagSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]  # TorchRec has no types
    """EmbeddingBagCollectionSharder with every sharding type on every device.

    TorchRec 1.8 offers the row-wise kinds on CUDA only; with the `fused` kernel they run on gloo just as well.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Names of all sharding types, whatever the device."""
        return [kind.value for kind in ShardingType]


def bag_sharder(**fused_params: Any) -> BagSharder:
    """A sharder whose tables are updated in the backward pass with `fused_params` (optimizer, learning_rate, eps)."""
    return BagSharder(fused_params=fused_params or None)
