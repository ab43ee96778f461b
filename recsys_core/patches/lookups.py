"""Sharders with every sharding type on a CPU, and kernels that look rows up right and fast there.

Rows looked up one by one: the fused kernel for lookups that are not pooled has no tuned CPU code (a backward pass of 27,740
rows x 64 takes 51 ms, 4 pooled), so such tables go through the pooled kernel, a row alone being a bag of one. The dense kernel,
that of replicated tables, pools whatever its pooling_mode says: where a collection has several, their rows come out mixed up.
Shapes: n rows looked up, T features of a kernel, W their width.
"""

from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.nn.functional import embedding
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingType

ONE_TABLE_PER_KERNEL = {"use_one_tbe_per_table": True}
"""Fused parameter that bags of one need: the features of a kernel then have the same rows, those of one table's shards."""


class BagSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]  # TorchRec has no types
    """EmbeddingBagCollectionSharder with every sharding type on every device.

    TorchRec offers the row-wise kinds on CUDA only; with the `fused` kernel they run on gloo just as well.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Names of all sharding types, whatever the device."""
        return [kind.value for kind in ShardingType]


class RowSharder(EmbeddingCollectionSharder):  # type: ignore[misc]  # TorchRec has no types
    """EmbeddingCollectionSharder with kernels that are fast and right on a CPU."""

    def shard(self, *args: Any, **kwargs: Any) -> ShardedEmbeddingCollection:
        """The sharded collection, its kernels patched."""
        sharded = super().shard(*args, **kwargs)
        patch_cpu_kernels(sharded)
        return sharded


def patch_cpu_kernels(sharded: ShardedEmbeddingCollection) -> None:
    """Replaces how the collection's kernels look rows up, where they are on a CPU."""
    # TorchRec keeps the lookups of a sharded collection in a plain list, where nn.Module does not see them.
    for module in nn.ModuleList(sharded._lookups).modules():
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen) and module.use_cpu:
            module.pooling_mode = PoolingMode.SUM
            module.forward = partial(bags_of_one, module, module.forward)
        if isinstance(module, BatchedDenseEmbedding) and module.emb_module.use_cpu:
            module.emb_module.forward = partial(dense_rows, module.emb_module, tables=list(module._feature_table_map))


def bags_of_one(kernel: SplitTableBatchedEmbeddingBagsCodegen, forward: Any, indices: Tensor, offsets: Tensor) -> Tensor:
    """[T * n, W], feature after feature, as the kernel that does not pool gives it."""
    features = len(kernel.embedding_specs)
    count = len(indices) // features
    if not kernel.weights_host.numel():
        # A table of fewer rows than ranks: this one holds none and gets no index, but takes part in the backward pass.
        return torch.zeros(0, kernel.embedding_specs[0][1], requires_grad=True)
    pooled: Tensor = forward(indices, torch.arange(len(indices) + 1, dtype=offsets.dtype, device=offsets.device))
    width = pooled.shape[1] // features  # given, since -1 cannot be inferred where there is no row
    return pooled.view(count, features, width).transpose(0, 1).reshape(len(indices), width)


def dense_rows(kernel: DenseTableBatchedEmbeddingBagsCodegen, *, indices: Tensor, offsets: Tensor, tables: list[int]) -> Tensor:
    """The row of each value [n, W], features one after the other. tables: of the kernel, which each feature reads."""
    samples = (len(offsets) - 1) // len(tables)
    rows_by_feature = []
    for place, table in enumerate(tables):
        rows, width = kernel.embedding_specs[table]
        start = kernel.weights_physical_offsets[table]
        weight = kernel.weights[start : start + rows * width].view(rows, width)
        rows_by_feature.append(embedding(indices[int(offsets[place * samples]) : int(offsets[(place + 1) * samples])], weight))
    return torch.cat(rows_by_feature)
