"""Bugs that lookups.py works around. If a test fails after an upgrade, remove the test and the workaround that it names."""

import fbgemm_gpu
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

NO_INDEX, ONE_OFFSET = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


def fused_kernel(*, num_rows: int) -> SplitTableBatchedEmbeddingBagsCodegen:
    table_description = (num_rows, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)
    adagrad = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    return SplitTableBatchedEmbeddingBagsCodegen([table_description], optimizer=adagrad, device=torch.device("cpu"))


def test_bag_sharder_is_needed() -> None:
    sharding_types = set(EmbeddingBagCollectionSharder().sharding_types("cpu"))
    assert not sharding_types & {"row_wise", "table_row_wise", "grid_shard"}


def test_dense_lookup_is_needed() -> None:
    kernel = DenseTableBatchedEmbeddingBagsCodegen([(10, 4)], pooling_mode=PoolingMode.NONE, use_cpu=True)
    pooled_rows = kernel(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]))
    assert len(pooled_rows) == 2  # the sums of 2 bags, although PoolingMode.NONE should return 3 rows


def test_empty_shards_are_needed() -> None:
    assert fused_kernel(num_rows=3)(NO_INDEX, ONE_OFFSET).shape == (0, 4)
    with pytest.raises(RuntimeError, match=r"weights\[0\] must be a GPU"):
        fused_kernel(num_rows=0)(NO_INDEX, ONE_OFFSET)


def test_fused_lookup_is_for_the_installed_fbgemm() -> None:
    # Measure whether the unpooled CPU kernel is still slow:
    # python -m benchmarks.train --parts patches
    assert fbgemm_gpu.__version__.startswith("1.9.")
