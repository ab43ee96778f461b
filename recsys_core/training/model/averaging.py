"""Average of the weights over the last epochs, which is validated and exported instead of the weights of one epoch.

With a constant learning rate, the weights move around a good point without reaching it, and their average is closer to this
point (Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018).
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsys_core.training.model.dense_parallel import local_part
from recsys_core.training.model.sharded_model import fused_kernels


class WeightAverage:
    """Exponential average of the weights at the ends of the epochs, on this rank's part of the model.

    After each epoch, the average moves towards the weights by 2 / (`num_epochs` + 1) of the difference. The averaged weights
    then have the same mean age as in a mean over the last `num_epochs` epochs. In the first epochs, the average moves by
    1 / epoch of the difference, so it is the mean over all epochs so far.

    Attributes:
        state: the average, with the keys and the shards of the model's state dict.
    """

    def __init__(self, model: DistributedModelParallel, *, num_epochs: int) -> None:
        self._model, self._num_epochs = model, num_epochs
        self.state: Mapping[str, Any] = copy.deepcopy(model.state_dict())

    @torch.no_grad()
    def add_epoch(self, epoch: int) -> None:
        """Move the average towards the weights at the end of `epoch`, which counts from 1."""
        difference_share = max(1 / epoch, 2 / (self._num_epochs + 1))
        for average, weight in self._averages_and_weights():
            if average.is_floating_point():
                average.lerp_(weight, difference_share)
            else:
                average.copy_(weight)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Replace the model's weights by their average in the block."""
        self._swap_average_and_weights()
        try:
            yield
        finally:
            self._swap_average_and_weights()

    @torch.no_grad()
    def _swap_average_and_weights(self) -> None:
        for average, weight in self._averages_and_weights():
            previous_weight = weight.clone()
            weight.copy_(average)
            average.copy_(previous_weight)
        for kernel in fused_kernels(self._model):
            kernel.reset_cache_states()  # the rows in the cache are the previous weights

    def _averages_and_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the average and the weight of each entry or shard. `state_dict()` first copies cached rows to the weights."""
        for key, weight in self._model.state_dict().items():
            yield from zip(_local_tensors(self.state[key]), _local_tensors(weight), strict=True)


def _local_tensors(value: Any) -> list[Tensor]:
    """Return this rank's part of an entry of a state dict, as views."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [local_part(value)]
