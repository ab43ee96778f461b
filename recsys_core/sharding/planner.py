"""Offline planning: TorchRec's planner on meta tensors, for a cluster that need not exist."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, ShardingOption, Stats

from recsys_core.errors import InputError
from recsys_core.manifests import PlanManifest, fingerprint_of, produce
from recsys_core.models.lookups import Lookups
from recsys_core.models.optimizer_config import GPU_ONLY, TableOptimizer
from recsys_core.models.spec import ModelSpec, TableSpec, module_name
from recsys_core.models.task import LOOKUPS_PATH
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, ShardingKind, TableConstraint
from recsys_core.sharding.plan_file import PlanFile, RankEstimate, ShardPlan, TablePlan
from recsys_core.sharding.sharders import ROW_LOOKUP_KINDS, sharders

PLAN_NAME = "plan.json"
GIB = 2**30
RESERVED_SHARE = 0.15
"""Memory of each rank that is kept for activations, dense layers and input batches."""


def plan_sharding(
    config: ShardingConfig, *, model: ModelSpec, batch_size: int, folder: Path, optimizer: TableOptimizer | None = None
) -> PlanManifest:
    """Stage `plan`: plan.json for the cluster of `config`. batch_size is per rank; optimizer: the tables' default."""
    optimizer = optimizer or TableOptimizer()

    def build(out: Path) -> dict[str, Any]:
        plan = make_plan(config, model=model, batch_size=batch_size, optimizer=optimizer)
        (out / PLAN_NAME).write_text(plan.model_dump_json(indent=2))
        return {"world_size": plan.world_size, "device": plan.device}

    device, processes = resolve_cluster(config.cluster)
    fingerprint = fingerprint_of("plan", config, model, batch_size, optimizer.kind, device, processes)
    return produce(folder, PlanManifest, fingerprint=fingerprint, build=build)


def resolve_cluster(cluster: ClusterConfig) -> tuple[Literal["cpu", "cuda"], int]:
    """(device, processes per node) with `auto` and the default count filled in from this machine."""
    gpus = torch.cuda.device_count()
    device: Literal["cpu", "cuda"] = ("cuda" if gpus else "cpu") if cluster.device == "auto" else cluster.device
    return device, cluster.processes_per_node or (max(gpus, 1) if device == "cuda" else 2)


def make_plan(
    config: ShardingConfig, *, model: ModelSpec, batch_size: int, optimizer: TableOptimizer | None = None
) -> PlanFile:
    """The planner's best plan. Needs no process group, no GPU and no memory for the tables.

    Raises InputError when a constraint names an unknown table or a kind that the table cannot have, an optimizer does not run
    on the device, or no plan fits the cluster.
    """
    device, processes = resolve_cluster(config.cluster)
    world_size = config.cluster.nodes * processes
    _check_tables(config, model)
    _check_optimizers(config, model, device=device, default=optimizer or TableOptimizer())
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
    module = nn.ModuleDict({LOOKUPS_PATH: Lookups(model, device=torch.device("meta"))})
    try:
        planner.plan(module, sharders())
    except PlannerError as error:
        raise InputError(
            f"sharding: no plan for tables {_sizes(model)} on {world_size} ranks with "
            f"{config.cluster.hbm_gb:g} GB HBM per GPU and {config.cluster.ddr_gb:g} GB memory per host: {error}; "
            "add processes or memory to sharding.cluster, or allow more sharding types per table"
        ) from error
    return PlanFile(
        device=device,
        nodes=config.cluster.nodes,
        processes_per_node=processes,
        batch_size=batch_size,
        tables={
            name: _table_plan(option, model.tables[name])
            for name in sorted(model.tables)
            for option in best.options
            if option.name == module_name(name)
        },
        ranks=_rank_estimates(best.options, world_size),
    )


class _BestPlan(Stats):  # type: ignore[misc]  # TorchRec has no types
    """The planner's public hook for reports; keeps the options it chose, with their estimates."""

    def __init__(self) -> None:
        self.options: list[ShardingOption] = []

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.options = kwargs["best_plan"]


def _sizes(model: ModelSpec) -> dict[str, str]:
    return {name: f"{table.rows:,} x {table.dim}" for name, table in model.tables.items()}


def _check_tables(config: ShardingConfig, model: ModelSpec) -> None:
    for name, wish in config.tables.items():
        if name not in model.tables:
            raise InputError(f"sharding.tables.{name}: no such table; the model has {sorted(model.tables)}")
        impossible = sorted(set(wish.sharding_types or ()) - set(ROW_LOOKUP_KINDS))
        if model.tables[name].side == "item" and impossible:
            raise InputError(
                f"sharding.tables.{name}: {impossible[0]} adds up pooled rows, but item tables are looked up row by row; "
                f"choose among {list(ROW_LOOKUP_KINDS)}"
            )


def _check_optimizers(config: ShardingConfig, model: ModelSpec, *, device: str, default: TableOptimizer) -> None:
    for name, table in model.tables.items():
        kind = (table.settings.optimizer or default).kind
        wish = config.tables.get(name, TableConstraint()).sharding_types
        if kind == "partial_rowwise_adam" and wish is not None and "data_parallel" in wish:
            raise InputError(
                f"sharding.tables.{name}: data_parallel, but optimizer partial_rowwise_adam exists as a fused kernel alone; "
                "choose adam, or another sharding type"
            )
        replicated = kind == "adam" and wish == ("data_parallel",)
        if device == "cpu" and kind in GPU_ONLY and not table.frozen and not replicated:
            way = f", or replicate it: sharding.tables.{name}.sharding_types: [data_parallel]" if kind == "adam" else ""
            raise InputError(
                f"tables.{name}: optimizer {kind} has no fused kernel on a CPU; set rowwise_adagrad, adagrad or sgd{way}"
            )


def _constraints(config: ShardingConfig, model: ModelSpec) -> dict[str, ParameterConstraints]:
    # data_parallel keeps a replica and dense gradients per rank, so it is chosen only where the user asks for it.
    # On one host the kinds that split a table within a host are row_wise and column_wise by another name.
    rows: tuple[ShardingKind, ...] = ("table_wise", "row_wise", "column_wise")
    pooled: tuple[ShardingKind, ...] = rows
    if config.cluster.nodes > 1:
        pooled += ("table_row_wise", "table_column_wise", "grid_shard")
    constraints = {}
    for name, table in model.tables.items():
        kinds = config.tables.get(name, TableConstraint()).sharding_types or (rows if table.side == "item" else pooled)
        constraints[module_name(name)] = ParameterConstraints(
            sharding_types=list(kinds), pooling_factors=[_pooling_factor(model, table)]
        )
    return constraints


def _pooling_factor(model: ModelSpec, table: TableSpec) -> float:
    """Expected values per query; a full history of items that nobody else has is assumed."""
    return 1.0 + model.config.history.length if table.side == "item" else 1.0


def _table_plan(option: ShardingOption, table: TableSpec) -> TablePlan:
    shards = tuple(
        ShardPlan(rank=shard.rank, offset=(shard.offset[0], shard.offset[1]), size=(shard.size[0], shard.size[1]))
        for shard in option.shards
    )
    return TablePlan(
        rows=table.rows,
        dim=table.dim,
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
