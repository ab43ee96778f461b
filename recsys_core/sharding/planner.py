"""Offline planning: TorchRec's planner on meta tensors, for a cluster that need not exist."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, ShardingOption, Stats
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recsys_core.errors import InputError
from recsys_core.manifests import PlanManifest, fingerprint_of, produce
from recsys_core.models.config import ModelSpec
from recsys_core.models.two_tower import QUERY_TABLES, embedding_configs, query_features
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, ShardingKind, TableConstraint
from recsys_core.sharding.plan_file import PlanFile, RankEstimate, ShardPlan, TablePlan
from recsys_core.sharding.sharders import bag_sharder

PLAN_NAME = "plan.json"
GIB = 2**30
RESERVED_SHARE = 0.15
"""Memory of each rank that is kept for activations, dense layers and input batches."""


def plan_sharding(config: ShardingConfig, *, model: ModelSpec, batch_size: int, folder: Path) -> PlanManifest:
    """Stage `plan`: plan.json for the cluster of `config`. batch_size is per rank."""

    def build(out: Path) -> dict[str, Any]:
        plan = make_plan(config, model=model, batch_size=batch_size)
        (out / PLAN_NAME).write_text(plan.model_dump_json(indent=2))
        return {"world_size": plan.world_size, "device": plan.device}

    device, processes = resolve_cluster(config.cluster)
    fingerprint = fingerprint_of("plan", config, model, batch_size, device, processes)
    return produce(folder, PlanManifest, fingerprint=fingerprint, build=build)


def resolve_cluster(cluster: ClusterConfig) -> tuple[Literal["cpu", "cuda"], int]:
    """(device, processes per node) with `auto` and the default count filled in from this machine."""
    gpus = torch.cuda.device_count()
    device: Literal["cpu", "cuda"] = ("cuda" if gpus else "cpu") if cluster.device == "auto" else cluster.device
    return device, cluster.processes_per_node or (max(gpus, 1) if device == "cuda" else 2)


def make_plan(config: ShardingConfig, *, model: ModelSpec, batch_size: int) -> PlanFile:
    """The planner's best plan. Needs no process group, no GPU and no memory for the tables.

    Raises InputError when a constraint names an unknown table or no plan fits the cluster.
    """
    device, processes = resolve_cluster(config.cluster)
    world_size = config.cluster.nodes * processes
    _check_tables(config, model)
    topology = Topology(
        world_size=world_size,
        local_world_size=processes,
        compute_device=device,
        hbm_cap=int(config.cluster.hbm_gb * GIB),
        ddr_cap=int(config.cluster.ddr_gb * GIB / processes),
    )
    best = _BestPlan()
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        constraints=_constraints(config, model),
        stats=best,
        debug=False,
        storage_reservation=FixedPercentageStorageReservation(percentage=RESERVED_SHARE),
    )
    module = nn.ModuleDict({"embeddings": EmbeddingBagCollection(tables=embedding_configs(model), device=torch.device("meta"))})
    try:
        planner.plan(module, [bag_sharder()])
    except PlannerError as error:
        raise InputError(
            f"sharding: no plan for tables {model.tables} on {world_size} ranks with "
            f"{config.cluster.hbm_gb:g} GB HBM per GPU and {config.cluster.ddr_gb:g} GB memory per host: {error}; "
            "add processes or memory to sharding.cluster, or allow more sharding types per table"
        ) from error
    return PlanFile(
        device=device,
        nodes=config.cluster.nodes,
        processes_per_node=processes,
        batch_size=batch_size,
        tables={option.name: _table_plan(option, model) for option in sorted(best.options, key=lambda o: o.name)},
        ranks=_rank_estimates(best.options, world_size),
    )


class _BestPlan(Stats):  # type: ignore[misc]  # TorchRec has no types
    """The planner's public hook for reports; keeps the options it chose, with their estimates."""

    def __init__(self) -> None:
        self.options: list[ShardingOption] = []

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.options = kwargs["best_plan"]


def _check_tables(config: ShardingConfig, model: ModelSpec) -> None:
    unknown = sorted(set(config.tables) - set(model.tables))
    if unknown:
        raise InputError(f"sharding.tables.{unknown[0]}: no such table; the model has {sorted(model.tables)}")


def _constraints(config: ShardingConfig, model: ModelSpec) -> dict[str, ParameterConstraints]:
    # data_parallel keeps a replica and dense gradients per rank, so it is chosen only where the user asks for it.
    # On one host the kinds that split a table within a host are row_wise and column_wise by another name.
    kinds: tuple[ShardingKind, ...] = ("table_wise", "row_wise", "column_wise")
    if config.cluster.nodes > 1:
        kinds += ("table_row_wise", "table_column_wise", "grid_shard")
    wishes = {table: config.tables.get(table, TableConstraint()).sharding_types or kinds for table in model.tables}
    return {
        table: ParameterConstraints(sharding_types=list(allowed), pooling_factors=_pooling_factors(model, table))
        for table, allowed in wishes.items()
    }


def _pooling_factors(model: ModelSpec, table: str) -> list[float]:
    """Expected values per sample of each feature on `table`; a full history is assumed."""
    features = [f for f in query_features(model.config) if QUERY_TABLES[f] == table] + (["item"] if table == "item" else [])
    return [float(model.config.max_history) if feature == "history" else 1.0 for feature in features]


def _table_plan(option: ShardingOption, model: ModelSpec) -> TablePlan:
    rows, dim = model.tables[option.name]
    shards = tuple(
        ShardPlan(rank=shard.rank, offset=(shard.offset[0], shard.offset[1]), size=(shard.size[0], shard.size[1]))
        for shard in option.shards
    )
    return TablePlan(
        rows=rows,
        dim=dim,
        sharding_type=option.sharding_type,
        compute_kernel=option.compute_kernel,
        ranks=tuple(shard.rank for shard in shards),
        shards=shards,
    )


def _rank_estimates(options: list[ShardingOption], world_size: int) -> tuple[RankEstimate, ...]:
    shards = [shard for option in options for shard in option.shards]
    return tuple(
        RankEstimate(
            hbm_bytes=sum(s.storage.hbm for s in shards if s.rank == rank and s.storage),
            ddr_bytes=sum(s.storage.ddr for s in shards if s.rank == rank and s.storage),
            step_ms=sum(s.perf.total for s in shards if s.rank == rank and s.perf),
        )
        for rank in range(world_size)
    )
