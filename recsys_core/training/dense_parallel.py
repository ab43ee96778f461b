"""The towers' layers: a replica on every rank (DDP), or spread over the ranks (FSDP2) where replicas would be large."""

import logging
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from recsys_core.errors import InputError
from recsys_core.models.spec import ModelSpec
from recsys_core.models.task import RetrievalHead
from recsys_core.models.towers import MLP, CandidateTower, QueryTower
from recsys_core.training.config import DenseParallel

logger = logging.getLogger(__name__)
PARAMETER_BYTES = 16
"""What a replica costs a rank per parameter, in float32: weight, gradient and Adam's two moments."""
REPLICA_BYTES = 2**30
"""Replicas above this are sharded under `auto`: 67 million parameters, as of two layers of 5,800 x 5,800. Below it sharding
gives back a hundredth of a GPU's memory, and asks for two all-gathers per layer and step.
"""


def require_layers(wish: DenseParallel, *, spec: ModelSpec) -> None:
    """InputError where `sharded` is asked for and neither tower has a layer."""
    with torch.device("meta"):
        modules = _modules(QueryTower(spec), CandidateTower(spec))
    if wish == "sharded" and not modules:
        raise InputError(
            "training.dense_parallel is sharded, but there is no layer to shard: model.query.layers are "
            f"{list(spec.config.query_layers)}, model.candidate.layers {list(spec.config.candidate_layers)}, and all features "
            f"are {spec.config.embedding_dim} wide; give a tower layers, or set training.dense_parallel to auto"
        )


def is_sharded(wish: DenseParallel, *, parameters: int, world_size: int) -> bool:
    """Whether layers of so many parameters are spread over the ranks.

    >>> [is_sharded("auto", parameters=millions * 2**20, world_size=8) for millions in (64, 65)]
    [False, True]
    >>> is_sharded("auto", parameters=2**30, world_size=1)  # nothing to spread over
    False
    """
    return wish == "sharded" or (wish == "auto" and world_size > 1 and parameters * PARAMETER_BYTES > REPLICA_BYTES)


def shard_layers(head: RetrievalHead, *, wish: DenseParallel, device: torch.device) -> set[str]:
    """Leaves this rank its rows of each layer's weights if `wish` says so; names of what DDP has to leave alone.

    What the towers do not hold, the weights of the pooling and the temperature, is small and stays replicated. Under bf16 the
    rounded copies of the gathered weights live until the backward pass, as autocast keeps them.
    """
    modules = _modules(head.query, head.item)
    parameters = sum(parameter.numel() for module in modules for parameter in module.parameters())
    if not is_sharded(wish, parameters=parameters, world_size=dist.get_world_size()):
        return set()
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    for module in modules:
        if isinstance(module, MLP):
            for layer in module.layers or ():
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        # One more group for what is left: the projections, and what lies between the layers. It too is given back after the
        # forward pass, so that a state dict and whoever looks at a parameter always find the shard.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    logger.info("towers: %s parameters, sharded over %d ranks", f"{parameters:,}", dist.get_world_size())
    return {name for name, parameter in head.named_parameters() if isinstance(parameter, DTensor)}


def _modules(query: QueryTower, item: CandidateTower) -> list[nn.Module]:
    """What is sharded: modules that are called, which is when FSDP gathers their parameters, and that have some."""
    return [module for module in (query.tower, item.tower, item.projection) if next(module.parameters(), None) is not None]


def local(value: Tensor) -> Tensor:
    """What this rank holds of a layer's weights, gradients or optimizer state."""
    return value.to_local() if isinstance(value, DTensor) else value


def whole(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Collective. The entries of a state dict one after the other, each gathered from all ranks."""
    for name, value in state.items():
        yield name, value.full_tensor() if isinstance(value, DTensor) else value


def fill(parameter: Tensor, value: Tensor) -> None:
    """Overwrites `parameter`, or this rank's part of it, with the whole `value`, which every rank has."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)
