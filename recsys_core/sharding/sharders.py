"""The sharders that training and planning share.

Shapes: T values of all features.
"""

from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.nn.functional import embedding
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ModuleSharder, ShardingType

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
    """EmbeddingCollectionSharder with all that it can do on every device."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Names of the sharding types, whatever the device."""
        return list(ROW_LOOKUP_KINDS)

    def shard(self, *args: Any, **kwargs: Any) -> ShardedEmbeddingCollection:
        """The sharded collection, whose replicated tables give rows as they are on a CPU too.

        FBGEMM 1.8's dense kernel for CPUs pools whatever its pooling_mode says: where a collection has several replicated
        tables their rows would come out mixed up, without a word.
        """
        sharded = super().shard(*args, **kwargs)
        for kernel in nn.ModuleList(sharded._lookups).modules():
            if isinstance(kernel, BatchedDenseEmbedding) and kernel.emb_module.use_cpu:
                kernel.emb_module.forward = partial(_rows, kernel.emb_module, tables=list(kernel._feature_table_map))
        return sharded


def _rows(kernel: DenseTableBatchedEmbeddingBagsCodegen, *, indices: Tensor, offsets: Tensor, tables: list[int]) -> Tensor:
    """[T, width]: the row of each value, features one after the other. tables: of the kernel, which each feature reads."""
    samples = (len(offsets) - 1) // len(tables)
    found = []
    for place, table in enumerate(tables):
        rows, width = kernel.embedding_specs[table]
        start = kernel.weights_physical_offsets[table]
        weight = kernel.weights[start : start + rows * width].view(rows, width)
        found.append(embedding(indices[int(offsets[place * samples]) : int(offsets[(place + 1) * samples])], weight))
    return torch.cat(found)


def sharders(**fused_params: Any) -> list[ModuleSharder[nn.Module]]:
    """For pooled tables and for those looked up row by row; `fused_params` where a table says nothing else."""
    return [BagSharder(fused_params=fused_params or None), RowSharder(fused_params=fused_params or None)]
