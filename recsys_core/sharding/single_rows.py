"""Rows looked up one by one: what FBGEMM 1.8 lacks for them on a CPU.

Its fused kernel for lookups that are not pooled has no tuned CPU code: the backward pass took 105 ms for 27,740 rows x 64 where
the pooled one took 2 to 7. A row alone is a bag of one, so such tables go through the pooled kernel. Its dense kernel, that of
replicated tables, pools whatever its pooling_mode says: where a collection has several, their rows come out mixed up, without
a word. Both end when `split_embedding_nobag_backward_codegen_*_cpu` and DenseTableBatchedEmbeddingBagsCodegen catch up.
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
from torchrec.distributed.embedding import ShardedEmbeddingCollection

ONE_TABLE_PER_KERNEL = {"use_one_tbe_per_table": True}
"""Fused parameter that bags of one need: the features of a kernel then have the same rows, those of one table's shards."""


def mend_cpu_kernels(sharded: ShardedEmbeddingCollection) -> None:
    """Replaces how the collection's kernels look rows up, where they are on a CPU."""
    # TorchRec keeps the lookups of a sharded collection in a plain list, where nn.Module does not see them.
    for module in nn.ModuleList(sharded._lookups).modules():
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen) and module.use_cpu:
            module.pooling_mode = PoolingMode.SUM
            module.forward = partial(_bags_of_one, module, module.forward)
        if isinstance(module, BatchedDenseEmbedding) and module.emb_module.use_cpu:
            module.emb_module.forward = partial(_dense_rows, module.emb_module, tables=list(module._feature_table_map))


def _bags_of_one(kernel: SplitTableBatchedEmbeddingBagsCodegen, forward: Any, indices: Tensor, offsets: Tensor) -> Tensor:
    """[T * n, W], feature after feature, as the kernel that does not pool gives it."""
    features = len(kernel.embedding_specs)
    count = len(indices) // features
    if not kernel.weights_host.numel():
        # A table of fewer rows than ranks: this one holds none and is asked for none, but takes part in the backward pass.
        return torch.zeros(0, kernel.embedding_specs[0][1], requires_grad=True)
    pooled: Tensor = forward(indices, torch.arange(len(indices) + 1, dtype=offsets.dtype, device=offsets.device))
    width = pooled.shape[1] // features  # told, since -1 cannot be inferred where no row is asked for
    return pooled.view(count, features, width).transpose(0, 1).reshape(len(indices), width)


def _dense_rows(
    kernel: DenseTableBatchedEmbeddingBagsCodegen, *, indices: Tensor, offsets: Tensor, tables: list[int]
) -> Tensor:
    """The row of each value [n, W], features one after the other. tables: of the kernel, which each feature reads."""
    samples = (len(offsets) - 1) // len(tables)
    found = []
    for place, table in enumerate(tables):
        rows, width = kernel.embedding_specs[table]
        start = kernel.weights_physical_offsets[table]
        weight = kernel.weights[start : start + rows * width].view(rows, width)
        found.append(embedding(indices[int(offsets[place * samples]) : int(offsets[(place + 1) * samples])], weight))
    return torch.cat(found)
