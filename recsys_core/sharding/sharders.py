"""TorchRec sharders for training and planning."""

from torch import nn
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.types import ModuleSharder

from recsys_core.patches.lookups import ONE_TABLE_PER_KERNEL, BagSharder, RowSharder
from recsys_core.sharding.config import QuantizedCommsConfig

UNPOOLED_SHARDING_TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel")
"""Sharding types that TorchRec supports for unpooled lookups (EmbeddingCollection). All other types pool the rows."""


def sharders(quantized_comms: QuantizedCommsConfig) -> list[ModuleSharder[nn.Module]]:
    """Return the sharders of pooled and unpooled tables, with quantized communication if it is configured."""
    codecs = None
    if quantized_comms != QuantizedCommsConfig():
        codecs = get_qcomm_codecs_registry(
            QCommsConfig(
                forward_precision=CommType(quantized_comms.forward), backward_precision=CommType(quantized_comms.backward)
            )
        )
    return [
        BagSharder(qcomm_codecs_registry=codecs),
        RowSharder(fused_params=dict(ONE_TABLE_PER_KERNEL), qcomm_codecs_registry=codecs),
    ]
