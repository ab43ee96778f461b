"""Sharders with every sharding type on CPUs, and correct and fast CPU kernels for unpooled lookups.

The unpooled fused kernel is slow on CPUs: a backward pass of 27,740 rows x 64 takes 51 ms instead of the pooled kernel's 4 ms.
Unpooled tables therefore use the pooled kernel with one row per bag. The dense kernel of replicated tables ignores its
pooling_mode and pools the rows, so its results are wrong for a collection with several tables. torch's `embedding` replaces it.

Shapes: L lookups of all features of a kernel, D width of a row.
"""

from collections.abc import Iterator
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
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType

ONE_TABLE_PER_KERNEL = {"use_one_tbe_per_table": True}
"""TorchRec's `fused_params` that give each table its own kernel. All features of a kernel then read the same table, as
`unpooled_fused_lookup` requires."""


class BagSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]  # TorchRec has no types
    """EmbeddingBagCollectionSharder with every sharding type on every device.

    TorchRec offers the row-wise types on CUDA only. With the `fused` kernel they also run on gloo, except on a rank without a
    row.
    """

    def shard(self, *args: Any, **kwargs: Any) -> ShardedEmbeddingBagCollection:
        """Return the sharded collection with kernels that also run on a rank without a row."""
        sharded_collection = super().shard(*args, **kwargs)
        for kernel in _fused_cpu_kernels(sharded_collection):
            kernel.forward = partial(pooled_lookup, kernel, kernel.forward)
        return sharded_collection

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the names of all sharding types, whatever the device."""
        return [sharding_type.value for sharding_type in ShardingType]


class UnpooledSharder(EmbeddingCollectionSharder):  # type: ignore[misc]  # TorchRec has no types
    """EmbeddingCollectionSharder with correct and fast CPU kernels."""

    def shard(self, *args: Any, **kwargs: Any) -> ShardedEmbeddingCollection:
        """Return the sharded collection with patched kernels."""
        sharded_collection = super().shard(*args, **kwargs)
        patch_cpu_kernels(sharded_collection)
        return sharded_collection


def patch_cpu_kernels(sharded_collection: ShardedEmbeddingCollection) -> None:
    """Replace `forward` of the collection's CPU kernels."""
    for kernel in _fused_cpu_kernels(sharded_collection):
        kernel.pooling_mode = PoolingMode.SUM
        kernel.forward = partial(unpooled_fused_lookup, kernel, kernel.forward)
    for module in _lookup_modules(sharded_collection):
        if isinstance(module, BatchedDenseEmbedding) and module.emb_module.use_cpu:
            module.emb_module.forward = partial(dense_lookup, module.emb_module, table_indices=list(module._feature_table_map))


def _lookup_modules(sharded_collection: Any) -> Iterator[nn.Module]:
    """Yield the modules of the lookups, which TorchRec stores in a plain list, so nn.Module.modules() does not visit them."""
    return nn.ModuleList(sharded_collection._lookups).modules()


def _fused_cpu_kernels(sharded_collection: Any) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """Return FBGEMM's CPU kernels of the sharded tables."""
    return [
        module
        for module in _lookup_modules(sharded_collection)
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen) and module.use_cpu
    ]


def pooled_lookup(
    kernel: SplitTableBatchedEmbeddingBagsCodegen, kernel_forward: Any, indices: Tensor, offsets: Tensor, **options: Any
) -> Tensor:
    """Look up and pool rows, [number of bags per feature, sum of the features' widths]; zeros on a rank without any row.

    FBGEMM mistakes a kernel without rows for a GPU kernel, and fails.

    kernel_forward: the original forward method of the kernel.
    """
    if kernel.weights_host.numel():
        pooled_rows: Tensor = kernel_forward(indices, offsets, **options)
        return pooled_rows
    feature_dims = [kernel.embedding_specs[table_index][1] for table_index in kernel.feature_table_map]
    return torch.zeros((len(offsets) - 1) // len(feature_dims), sum(feature_dims), requires_grad=True)


def unpooled_fused_lookup(
    kernel: SplitTableBatchedEmbeddingBagsCodegen, kernel_forward: Any, indices: Tensor, offsets: Tensor
) -> Tensor:
    """Look up unpooled rows with the pooled kernel, one row per bag: [L, D], all rows of the first feature first.

    All features must have the same number of lookups. kernel_forward: the original forward method of the kernel.
    """
    num_features = len(kernel.embedding_specs)
    num_lookups_per_feature = len(indices) // num_features
    if not kernel.weights_host.numel():
        # This rank has no row, because the table has fewer rows than there are ranks. The rank still takes part in the
        # backward pass, so the result requires a gradient.
        return torch.zeros(0, kernel.embedding_specs[0][1], requires_grad=True)
    row_by_bag: Tensor = kernel_forward(indices, torch.arange(len(indices) + 1, dtype=offsets.dtype, device=offsets.device))
    dim = row_by_bag.shape[1] // num_features  # view cannot infer -1 if there are no lookups
    return row_by_bag.view(num_lookups_per_feature, num_features, dim).transpose(0, 1).reshape(len(indices), dim)


def dense_lookup(
    kernel: DenseTableBatchedEmbeddingBagsCodegen, *, indices: Tensor, offsets: Tensor, table_indices: list[int]
) -> Tensor:
    """Look up unpooled rows with torch's `embedding`: [L, D], all rows of the first feature first.

    table_indices: for each feature, the index of its table in the kernel.
    """
    num_bags = (len(offsets) - 1) // len(table_indices)
    rows_by_feature = []
    for feature_index, table_index in enumerate(table_indices):
        num_rows, dim = kernel.embedding_specs[table_index]
        weight_start = kernel.weights_physical_offsets[table_index]
        table_weight = kernel.weights[weight_start : weight_start + num_rows * dim].view(num_rows, dim)
        lookup_start, lookup_end = int(offsets[feature_index * num_bags]), int(offsets[(feature_index + 1) * num_bags])
        rows_by_feature.append(embedding(indices[lookup_start:lookup_end], table_weight))
    return torch.cat(rows_by_feature)
