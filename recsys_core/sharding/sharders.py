"""The sharders that training and planning share."""

from typing import Any

from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.types import ModuleSharder, ShardingType

from recsys_core.sharding.config import CommunicationConfig
from recsys_core.sharding.single_rows import ONE_TABLE_PER_KERNEL, mend_cpu_kernels

ROW_LOOKUP_KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
"""What TorchRec 1.8 can do with an EmbeddingCollection; the kinds that split a table within a host pool their rows."""


class BagSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]  # TorchRec has no types
    """EmbeddingBagCollectionSharder with every sharding type on every device.

    TorchRec 1.8 offers the row-wise kinds on CUDA only; with the `fused` kernel they run on gloo just as well.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Names of all sharding types, whatever the device."""
        return [kind.value for kind in ShardingType]


class RowSharder(EmbeddingCollectionSharder):  # type: ignore[misc]  # TorchRec has no types
    """EmbeddingCollectionSharder with all that it can do on every device, and kernels that are fast and right on a CPU."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Names of the sharding types, whatever the device."""
        return list(ROW_LOOKUP_KINDS)

    def shard(self, *args: Any, **kwargs: Any) -> ShardedEmbeddingCollection:
        """The sharded collection, see mend_cpu_kernels."""
        sharded = super().shard(*args, **kwargs)
        mend_cpu_kernels(sharded)
        return sharded


def sharders(communication: CommunicationConfig) -> list[ModuleSharder[nn.Module]]:
    """For pooled tables, and for those looked up row by row."""
    codecs = None
    if communication != CommunicationConfig():
        codecs = get_qcomm_codecs_registry(
            QCommsConfig(forward_precision=CommType(communication.forward), backward_precision=CommType(communication.backward))
        )
    return [
        BagSharder(qcomm_codecs_registry=codecs),
        RowSharder(fused_params=dict(ONE_TABLE_PER_KERNEL), qcomm_codecs_registry=codecs),
    ]
