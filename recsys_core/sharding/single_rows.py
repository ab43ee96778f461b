"""Rows looked up one by one, fast on a CPU too.

FBGEMM 1.8 has no tuned CPU kernel for lookups that are not pooled: its backward pass took 105 ms for 27,740 rows x 64 where the
pooled one took 2 to 7 (benchmarks/train.md will tell the whole step). A row alone is a bag of one, so on a CPU the tables of an
EmbeddingCollection go through the pooled kernel. Ends when FBGEMM's `split_embedding_nobag_backward_codegen_*_cpu` catches up.
Shapes: n rows looked up, T column shards of one table on this rank, W their width.
"""

from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection

ONE_TABLE_PER_KERNEL = {"use_one_tbe_per_table": True}
"""Fused parameter that `pool_single_rows` needs: the features of a kernel then have the same rows, those of one table."""


def pool_single_rows(model: nn.Module) -> None:
    """Sends the CPU lookups that are not pooled through the pooled kernel, as bags of one."""
    # TorchRec keeps the lookups of a sharded collection in a plain list, where nn.Module does not see them.
    collections = (module for module in model.modules() if isinstance(module, ShardedEmbeddingCollection))
    lookups = (lookup for collection in collections for lookup in collection._lookups)
    for kernel in (part for lookup in lookups for part in lookup.modules()):
        if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen) and kernel.use_cpu:
            kernel.pooling_mode = PoolingMode.SUM
            kernel.forward = partial(_bags_of_one, kernel, kernel.forward)


def _bags_of_one(kernel: SplitTableBatchedEmbeddingBagsCodegen, forward: Any, indices: Tensor, offsets: Tensor) -> Tensor:
    """[T * n, W], feature after feature, as the kernel that does not pool gives it."""
    features = len(kernel.embedding_specs)
    count = len(indices) // features
    pooled: Tensor = forward(indices, torch.arange(len(indices) + 1, dtype=offsets.dtype, device=offsets.device))
    width = pooled.shape[1] // features  # told, since -1 cannot be inferred where a rank is asked for no row
    return pooled.view(count, features, width).transpose(0, 1).reshape(len(indices), width)
