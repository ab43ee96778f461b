"""Estimates in plan.json: memory and time of each rank, and the alternative sharding types of each table."""

import math
from collections.abc import Mapping, Sequence
from typing import get_args

from torchrec.distributed.planner.types import PlannerError, Shard, ShardingOption, Storage

from recsys_core.models.spec import TableSpec
from recsys_core.sharding.config import ComputeKernel, ShardingType, TableConstraint
from recsys_core.sharding.constraints import (
    CACHE_LOAD_FACTOR,
    NOT_SUPPORTED_PREFIX,
    OFFLOADING_KERNELS,
    SSD_CACHE_MB,
    optimizer_kind,
    why_not_default,
)
from recsys_core.sharding.infeasible import describe_shortage
from recsys_core.sharding.plan_file import Alternative, NaivePlan, RankEstimate, TableMemory
from recsys_core.sharding.torchrec_planner import TorchrecPlanner

STATE_BYTES_PER_WEIGHT_BYTE = {"sgd": 0.0, "none": 0.0, "adagrad": 1.0, "adam": 2.0, "partial_rowwise_adam": 1.0}
"""TorchRec's estimate of the optimizer state, in bytes per byte of weights. rowwise_adagrad has one number per row instead."""
MAX_REPLANNED_TABLES = 8
"""If the model has more tables, no new plan is computed for each faster alternative, because that would take minutes."""
NAIVE_TYPES: tuple[ShardingType, ...] = ("row_wise", "table_wise")
_FP32_BYTES = 4


def rank_estimates(planner: TorchrecPlanner, options: Mapping[str, ShardingOption]) -> tuple[RankEstimate, ...]:
    """Return the memory and time of each rank. options: the layout of each table."""
    shards_by_rank: list[list[tuple[str, ShardingOption, Shard]]] = [[] for _ in range(planner.world_size)]
    for name, option in options.items():
        for shard in option.shards:
            shards_by_rank[shard.rank].append((name, option, shard))
    estimates = []
    for shards in shards_by_rank:
        tables: dict[str, TableMemory] = {}
        for name, option, shard in shards:
            memory = _shard_memory(planner, name, option=option, shard=shard)
            tables[name] = _add_memory(tables[name], memory) if name in tables else memory
        times = [shard.perf for _, _, shard in shards]
        estimates.append(
            RankEstimate(
                hbm_bytes=sum(shard.storage.hbm for _, _, shard in shards),
                ddr_bytes=sum(shard.storage.ddr for _, _, shard in shards),
                ssd_bytes=sum(shard.storage.ssd for _, _, shard in shards),
                step_ms=sum(perf.total for perf in times),
                forward_compute_ms=sum(perf.fwd_compute for perf in times),
                forward_comms_ms=sum(perf.fwd_comms for perf in times),
                backward_compute_ms=sum(perf.bwd_compute for perf in times),
                backward_comms_ms=sum(perf.bwd_comms for perf in times),
                prefetch_ms=sum(perf.prefetch_compute for perf in times),
                tables=tables,
            )
        )
    return tuple(estimates)


def _shard_memory(planner: TorchrecPlanner, name: str, *, option: ShardingOption, shard: Shard) -> TableMemory:
    """Split the estimated memory of a shard into weights, optimizer state, cache and buffers."""
    table = planner.model.tables[name]
    optimizer = optimizer_kind(table, default=planner.optimizer)
    state_per_weight = 1 / table.dim if optimizer == "rowwise_adagrad" else STATE_BYTES_PER_WEIGHT_BYTE[optimizer]
    rows, columns = shard.size
    weight_bytes = rows * columns * _FP32_BYTES
    optimizer_bytes, cache_bytes = math.ceil(weight_bytes * state_per_weight), 0
    fast_memory_bytes: int = shard.storage.hbm if planner.device == "cuda" else shard.storage.ddr
    if option.compute_kernel == "fused_uvm_caching":
        cache_load_factor = option.cache_load_factor or CACHE_LOAD_FACTOR
        # The cache has the rows with their optimizer state. Its index needs 4 bytes per row and 16 bytes per cached row.
        cache_bytes = math.ceil(cache_load_factor * weight_bytes * (1 + state_per_weight) + rows * (4 + 16 * cache_load_factor))
    elif option.compute_kernel == "key_value":
        cache_bytes = min(SSD_CACHE_MB << 20, math.ceil(table.num_rows * CACHE_LOAD_FACTOR * table.dim * _FP32_BYTES))
    is_offloaded = option.compute_kernel in OFFLOADING_KERNELS
    resident_bytes = 0 if is_offloaded else weight_bytes + optimizer_bytes
    return TableMemory(
        weights=weight_bytes,
        optimizer=optimizer_bytes,
        cache=cache_bytes,
        buffers=max(0, fast_memory_bytes - resident_bytes - cache_bytes),
    )


def _add_memory(first: TableMemory, second: TableMemory) -> TableMemory:
    """Return the memory of two shards of a table on one rank."""
    return TableMemory(**{name: num_bytes + getattr(second, name) for name, num_bytes in first.model_dump().items()})


def compare_alternatives(
    planner: TorchrecPlanner, chosen_options: Mapping[str, ShardingOption]
) -> dict[str, tuple[Alternative, ...]]:
    """Return estimates for all sharding types of each table, and why each type was chosen or not.

    chosen_options: the layout of each table in the plan.
    """
    tables = planner.model.tables
    all_types: tuple[ShardingType, ...] = get_args(ShardingType)
    supported_types = {
        name: tuple(sharding_type for sharding_type in all_types if _is_supported(sharding_type, table, planner=planner))
        for name, table in tables.items()
    }
    default_kernels: tuple[ComputeKernel, ...] = ("fused", "dense")
    if planner.device == "cuda":
        default_kernels += ("fused_uvm_caching", "fused_uvm")
    kernels = {
        name: tuple(dict.fromkeys((*(_constraint(planner, name).compute_kernels or default_kernels), "dense")))
        for name in tables
    }
    options = planner.options(sharding_types=supported_types, kernels=kernels)
    return {
        name: tuple(
            _alternative(
                planner,
                name,
                sharding_type,
                [option for option in options[name] if option.sharding_type == sharding_type],
                chosen=chosen_options[name],
            )
            for sharding_type in all_types
        )
        for name in sorted(tables)
    }


def _is_supported(sharding_type: ShardingType, table: TableSpec, *, planner: TorchrecPlanner) -> bool:
    why_not = why_not_default(sharding_type, table, num_nodes=planner.config.cluster.num_nodes, world_size=planner.world_size)
    return why_not is None or not why_not.startswith(NOT_SUPPORTED_PREFIX)


def _constraint(planner: TorchrecPlanner, name: str) -> TableConstraint:
    return planner.config.tables.get(name, TableConstraint())


def _alternative(
    planner: TorchrecPlanner,
    name: str,
    sharding_type: ShardingType,
    options: list[ShardingOption],
    *,
    chosen: ShardingOption,
) -> Alternative:
    table = planner.model.tables[name]
    reason_not_default = why_not_default(
        sharding_type, table, num_nodes=planner.config.cluster.num_nodes, world_size=planner.world_size
    )
    if not options:
        return Alternative(sharding_type=sharding_type, verdict=reason_not_default or "no kernel supports it on this device")
    if chosen.sharding_type == sharding_type:
        option = next(candidate for candidate in options if candidate.compute_kernel == chosen.compute_kernel)
    else:
        # Choose the fastest option that would fit without the other tables, or the option with the least excess memory.
        option = min(options, key=lambda candidate: (_excess_bytes(candidate, planner.usable_memory), table_ms(candidate)))
    return Alternative(
        sharding_type=sharding_type,
        compute_kernel=option.compute_kernel,
        step_ms=table_ms(option),
        hbm_bytes=max(shard.storage.hbm for shard in option.shards),
        ddr_bytes=max(shard.storage.ddr for shard in option.shards),
        verdict=_verdict(planner, name, option, chosen=chosen, reason_not_default=reason_not_default),
    )


def _verdict(
    planner: TorchrecPlanner,
    name: str,
    option: ShardingOption,
    *,
    chosen: ShardingOption,
    reason_not_default: str | None,
) -> str:
    """Return why the option of one sharding type was chosen or not.

    chosen: the option of the table in the plan.
    reason_not_default: the result of `why_not_default` for the type.
    """
    sharding_type, allowed_types = option.sharding_type, _constraint(planner, name).sharding_types
    if chosen.sharding_type == sharding_type:
        return "chosen"
    if allowed_types is not None and sharding_type not in allowed_types:
        return f"excluded by sharding.tables.{name}.sharding_types"
    if allowed_types is None and reason_not_default is not None:
        return reason_not_default
    excess_bytes = _excess_bytes(option, planner.usable_memory)
    if excess_bytes:
        return f"does not fit: {excess_bytes:,} bytes short on one rank"
    extra_ms = table_ms(option) - table_ms(chosen)
    if extra_ms >= 0:
        times = f"{table_ms(option):.3g} ms instead of {table_ms(chosen):.3g} ms"
        return f"slower: {times}" if extra_ms else "as fast as the chosen type"
    if len(planner.model.tables) > MAX_REPLANNED_TABLES:
        return "faster for this table alone; the plan for all tables together prefers the chosen type"
    try:
        all_tables_ms = step_ms(planner, planner.best_options(sharding_types={name: (sharding_type,)}))
    except PlannerError:
        return "faster for this table alone, but it does not fit together with the other tables"
    return f"faster for this table alone, but the lookups of all tables would take {all_tables_ms:.3g} ms"


def table_ms(option: ShardingOption) -> float:
    """Return the milliseconds per step that the slowest rank needs for this table."""
    return max(float(shard.perf.total) for shard in option.shards)


def step_ms(planner: TorchrecPlanner, options: Mapping[str, ShardingOption]) -> float:
    """Return the milliseconds per step that the slowest rank needs for all tables."""
    return max(rank.step_ms for rank in rank_estimates(planner, options))


def _excess_bytes(option: ShardingOption, usable_memory: Storage) -> int:
    """Return the bytes by which the largest shard exceeds the usable memory of a rank; 0 if it fits."""
    tiers = ("hbm", "ddr")
    excess_by_shard: list[int] = [
        getattr(shard.storage, tier) - getattr(usable_memory, tier) for shard in option.shards for tier in tiers
    ]
    return max(0, *excess_by_shard)


def naive_plans(planner: TorchrecPlanner) -> tuple[NaivePlan, ...]:
    """Return plans with one sharding type for all tables and the kernel fused, for a comparison with the chosen plan."""
    return tuple(_naive_plan(planner, sharding_type) for sharding_type in NAIVE_TYPES)


def _naive_plan(planner: TorchrecPlanner, sharding_type: ShardingType) -> NaivePlan:
    table_names: Sequence[str] = list(planner.model.tables)
    sharding_types: dict[str, tuple[ShardingType, ...]] = dict.fromkeys(table_names, (sharding_type,))
    kernels: dict[str, tuple[ComputeKernel, ...]] = dict.fromkeys(table_names, ("fused",))
    try:
        ranks = rank_estimates(planner, planner.best_options(sharding_types=sharding_types, kernels=kernels))
    except PlannerError:
        problem = describe_shortage(
            planner,
            {name: options[0] for name, options in planner.options(sharding_types=sharding_types, kernels=kernels).items()},
        )
        return NaivePlan(name=f"all {sharding_type}", problem=f"does not fit: {problem}")
    return NaivePlan(
        name=f"all {sharding_type}",
        step_ms=max(rank.step_ms for rank in ranks),
        hbm_bytes=max(rank.hbm_bytes for rank in ranks),
        ddr_bytes=max(rank.ddr_bytes for rank in ranks),
    )
