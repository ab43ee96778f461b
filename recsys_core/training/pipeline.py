"""What overlaps with what in a step."""

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer

from recsys_core.training.process import Process

CACHED = ("fused_uvm_caching", "key_value")
"""Kernels whose rows come from slower memory: fetched a step ahead."""


def make_pipeline(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, *, process: Process
) -> TrainPipelineSparseDist[object, torch.Tensor]:
    """TorchRec's pipeline: while a batch is trained, the next one's ids are on their way to the ranks that hold their rows,
    and where a table is cached in GPU memory its rows too.
    """
    kernels = {table.compute_kernel for module in model.plan.plan.values() for table in module.values()}
    kind = PrefetchTrainPipelineSparseDist if kernels & set(CACHED) else TrainPipelineSparseDist
    return kind(model, optimizer, process.device)
