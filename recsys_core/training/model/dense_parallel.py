"""Parallelism of the towers' layers: replicated on every rank (DDP), or sharded over the ranks (FSDP2)."""

import logging
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from recsys_core.errors import InputError
from recsys_core.models.ensemble import (
    AnyCandidateTower,
    AnyQueryTower,
    candidate_towers,
    make_candidate_tower,
    make_query_tower,
    query_towers,
)
from recsys_core.models.spec import ModelSpec
from recsys_core.models.task import RetrievalHead
from recsys_core.models.towers import MLP
from recsys_core.training.config import DenseParallel

logger = logging.getLogger(__name__)
REPLICA_BYTES_PER_PARAMETER = 16
"""float32 weight, gradient and Adam's two moments."""
MAX_REPLICA_BYTES = 2**30
"""Size above which training.dense_parallel `auto` shards the layers: 67 million parameters, about two layers of
5,800 x 5,800. Sharding a smaller replica would save about 1 % of a GPU's memory and cost two all-gathers per layer and step.
"""


def require_shardable_layers(mode: DenseParallel, *, spec: ModelSpec) -> None:
    """Raise InputError if `mode` is sharded and neither tower has a layer."""
    if mode != "sharded":
        return
    with torch.device("meta"):
        modules = _shardable_modules(make_query_tower(spec), make_candidate_tower(spec))
    if not modules:
        raise InputError(
            "training.dense_parallel is sharded, but there is no layer to shard: model.query.layers are "
            f"{list(spec.config.query_layers)}, model.candidate.layers {list(spec.config.candidate_layers)}, and all features "
            f"are {spec.config.embedding_dim} wide; give a tower layers, or set training.dense_parallel to auto"
        )


def is_sharded(mode: DenseParallel, *, num_parameters: int, world_size: int) -> bool:
    """Return whether layers with `num_parameters` parameters in total are sharded.

    >>> [is_sharded("auto", num_parameters=millions * 2**20, world_size=8) for millions in (64, 65)]
    [False, True]
    >>> is_sharded("auto", num_parameters=2**30, world_size=1)
    False
    """
    is_large = num_parameters * REPLICA_BYTES_PER_PARAMETER > MAX_REPLICA_BYTES
    return mode == "sharded" or (mode == "auto" and world_size > 1 and is_large)


def shard_layers(head: RetrievalHead, *, mode: DenseParallel, device: torch.device) -> set[str]:
    """Collective. Shard the weights of the towers' layers if `mode` requires it.

    `head.query` is the query tower, and `head.item` the candidate tower. The weights of the pooling and the temperature are
    small and stay replicated. With bf16, autocast keeps a rounded copy of the gathered weights in memory until the backward
    pass.

    Returns:
        Names of the sharded parameters, which DDP has to ignore.
    """
    modules = _shardable_modules(head.query, head.item)
    num_parameters = sum(parameter.numel() for module in modules for parameter in module.parameters())
    if not is_sharded(mode, num_parameters=num_parameters, world_size=dist.get_world_size()):
        return set()
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    for module in modules:
        if isinstance(module, MLP):
            for layer in module.layers or ():
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        # One more FSDP group for the remaining parameters: the projections and the norms between the layers. This group is also
        # resharded after the forward pass, so that a state dict always holds shards.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    logger.info("towers: %s parameters, sharded over %d ranks", f"{num_parameters:,}", dist.get_world_size())
    return {name for name, parameter in head.named_parameters() if isinstance(parameter, DTensor)}


def _shardable_modules(query_tower: AnyQueryTower, candidate_tower: AnyCandidateTower) -> list[nn.Module]:
    """Return the modules of both towers whose parameters can be sharded.

    FSDP gathers the parameters of a module in a hook that runs when the module is called. The towers must therefore call these
    modules, and must not use the parameters directly.
    """
    modules: list[nn.Module] = []
    members = zip(query_towers(query_tower), candidate_towers(candidate_tower), strict=True)
    for member_query_tower, member_candidate_tower in members:
        modules += [member_query_tower.tower, member_candidate_tower.tower, member_candidate_tower.projection]
    return [module for module in modules if next(module.parameters(), None) is not None]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a layer's weights, gradients or optimizer state."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_tensors(tensor_by_name: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Collective. Yield (name, whole tensor) of a state dict, gathering one tensor at a time."""
    for name, tensor in tensor_by_name.items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_into(parameter: Tensor, tensor: Tensor) -> None:
    """Copy `tensor` into `parameter`, or only this rank's part if `parameter` is sharded. Every rank has the whole `tensor`."""
    if isinstance(parameter, DTensor):
        tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(tensor)
