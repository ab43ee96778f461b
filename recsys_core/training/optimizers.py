"""Who updates what: tables in the backward pass, dense layers by Adam, data-parallel tables by row-wise Adagrad."""

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys_core.training.config import TrainingConfig
from recsys_core.training.distributed import ADAGRAD_EPS


def make_optimizer(model: DistributedModelParallel, *, config: TrainingConfig) -> CombinedOptimizer:
    """One optimizer over the fused ones and those for what the backward pass does not update."""
    dense: dict[str, torch.Tensor] = {}
    replicated: dict[str, torch.Tensor] = {}
    for name, parameter in in_backward_optimizer_filter(model.named_parameters()):
        (replicated if "embedding_bags" in name else dense)[name] = parameter
    parts: list[KeyedOptimizer | tuple[str, KeyedOptimizer]] = [model.fused_optimizer]
    if dense:
        adam = KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adam(p, lr=config.dense_learning_rate))
        parts.append(("dense", adam))
    if replicated:
        adagrad = KeyedOptimizerWrapper(replicated, lambda p: RowWiseAdagrad(p, lr=config.table_learning_rate, eps=ADAGRAD_EPS))
        parts.append(("replicated", adagrad))
    return CombinedOptimizer(parts)


class Warmup:
    """Scales every learning rate of `optimizer` linearly from 0 to its full value over `steps`.

    The scale is a function of the step alone, so there is no state to save.
    """

    def __init__(self, optimizer: CombinedOptimizer, *, steps: int) -> None:
        self._groups = [(group, group["lr"]) for group in optimizer.param_groups]
        self._steps = steps

    def set_step(self, step: int) -> float:
        """Sets the learning rates for `step` (0-based); returns the scale."""
        scale = min(1.0, (step + 1) / (self._steps + 1))
        for group, full in self._groups:
            group["lr"] = full * scale
        return scale
