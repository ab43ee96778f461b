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
    table_optimizer_kind,
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


def rank_estimates(planner: TorchrecPlanner, option_by_table: Mapping[str, ShardingOption]) -> tuple[RankEstimate, ...]:
    """Return the memory and time of each rank. options: the layout of each table."""
    shards_by_rank: list[list[tuple[str, ShardingOption, Shard]]] = [[] for _ in range(planner.world_size)]
    for table_name, option in option_by_table.items():
        for shard in option.shards:
            shards_by_rank[shard.rank].append((table_name, option, shard))
    estimates = []
    for shards in shards_by_rank:
        memory_by_table: dict[str, TableMemory] = {}
        for table_name, option, shard in shards:
            memory = _shard_memory(planner, table_name, option=option, shard=shard)
            memory_by_table[table_name] = (
                _add_memory(memory_by_table[table_name], memory) if table_name in memory_by_table else memory
            )
        shard_times = [shard.perf for _, _, shard in shards]
        estimates.append(
            RankEstimate(
                hbm_bytes=sum(shard.storage.hbm for _, _, shard in shards),
                ddr_bytes=sum(shard.storage.ddr for _, _, shard in shards),
                ssd_bytes=sum(shard.storage.ssd for _, _, shard in shards),
                step_ms=sum(shard_time.total for shard_time in shard_times),
                forward_compute_ms=sum(shard_time.fwd_compute for shard_time in shard_times),
                forward_comms_ms=sum(shard_time.fwd_comms for shard_time in shard_times),
                backward_compute_ms=sum(shard_time.bwd_compute for shard_time in shard_times),
                backward_comms_ms=sum(shard_time.bwd_comms for shard_time in shard_times),
                prefetch_ms=sum(shard_time.prefetch_compute for shard_time in shard_times),
                tables=memory_by_table,
            )
        )
    return tuple(estimates)


def _shard_memory(planner: TorchrecPlanner, table_name: str, *, option: ShardingOption, shard: Shard) -> TableMemory:
    """Split the estimated memory of a shard into weights, optimizer state, cache and buffers."""
    table = planner.model.tables[table_name]
    optimizer_kind = table_optimizer_kind(table, default=planner.optimizer)
    state_per_weight = 1 / table.dim if optimizer_kind == "rowwise_adagrad" else STATE_BYTES_PER_WEIGHT_BYTE[optimizer_kind]
    num_rows, num_columns = shard.size
    weight_bytes = num_rows * num_columns * _FP32_BYTES
    optimizer_bytes, cache_bytes = math.ceil(weight_bytes * state_per_weight), 0
    fast_memory_bytes: int = shard.storage.hbm if planner.device == "cuda" else shard.storage.ddr
    if option.compute_kernel == "fused_uvm_caching":
        cache_load_factor = option.cache_load_factor or CACHE_LOAD_FACTOR
        # The cache has the rows with their optimizer state. Its index needs 4 bytes per row and 16 bytes per cached row.
        cache_bytes = math.ceil(
            cache_load_factor * weight_bytes * (1 + state_per_weight) + num_rows * (4 + 16 * cache_load_factor)
        )
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


def _add_memory(first_shard: TableMemory, second_shard: TableMemory) -> TableMemory:
    """Return the memory of two shards of a table on one rank."""
    return TableMemory(
        **{field: num_bytes + getattr(second_shard, field) for field, num_bytes in first_shard.model_dump().items()}
    )


def compare_alternatives(
    planner: TorchrecPlanner, chosen_option_by_table: Mapping[str, ShardingOption]
) -> dict[str, tuple[Alternative, ...]]:
    """Return estimates for all sharding types of each table, and why each type was chosen or not.

    chosen_option_by_table: the layout of each table in the plan.
    """
    table_by_name = planner.model.tables
    all_types: tuple[ShardingType, ...] = get_args(ShardingType)
    supported_types_by_table = {
        table_name: tuple(sharding_type for sharding_type in all_types if _is_supported(sharding_type, table, planner=planner))
        for table_name, table in table_by_name.items()
    }
    default_kernels: tuple[ComputeKernel, ...] = ("fused", "dense")
    if planner.device == "cuda":
        default_kernels += ("fused_uvm_caching", "fused_uvm")
    kernels_by_table = {
        table_name: tuple(dict.fromkeys((*(_constraint(planner, table_name).compute_kernels or default_kernels), "dense")))
        for table_name in table_by_name
    }
    options_by_table = planner.options(sharding_types_by_table=supported_types_by_table, kernels_by_table=kernels_by_table)
    return {
        table_name: tuple(
            _alternative(
                planner,
                table_name,
                sharding_type,
                [option for option in options_by_table[table_name] if option.sharding_type == sharding_type],
                chosen_option=chosen_option_by_table[table_name],
            )
            for sharding_type in all_types
        )
        for table_name in sorted(table_by_name)
    }


def _is_supported(sharding_type: ShardingType, table: TableSpec, *, planner: TorchrecPlanner) -> bool:
    why_not = why_not_default(sharding_type, table, num_nodes=planner.config.cluster.num_nodes, world_size=planner.world_size)
    return why_not is None or not why_not.startswith(NOT_SUPPORTED_PREFIX)


def _constraint(planner: TorchrecPlanner, table_name: str) -> TableConstraint:
    return planner.config.tables.get(table_name, TableConstraint())


def _alternative(
    planner: TorchrecPlanner,
    table_name: str,
    sharding_type: ShardingType,
    options: list[ShardingOption],
    *,
    chosen_option: ShardingOption,
) -> Alternative:
    table = planner.model.tables[table_name]
    reason_not_default = why_not_default(
        sharding_type, table, num_nodes=planner.config.cluster.num_nodes, world_size=planner.world_size
    )
    if not options:
        return Alternative(sharding_type=sharding_type, verdict=reason_not_default or "no kernel supports it on this device")
    if chosen_option.sharding_type == sharding_type:
        option = next(
            candidate_option for candidate_option in options if candidate_option.compute_kernel == chosen_option.compute_kernel
        )
    else:
        # Choose the fastest option that would fit without the other tables, or the option with the least excess memory.
        option = min(
            options,
            key=lambda candidate_option: (_excess_bytes(candidate_option, planner.usable_memory), table_ms(candidate_option)),
        )
    return Alternative(
        sharding_type=sharding_type,
        compute_kernel=option.compute_kernel,
        step_ms=table_ms(option),
        hbm_bytes=max(shard.storage.hbm for shard in option.shards),
        ddr_bytes=max(shard.storage.ddr for shard in option.shards),
        verdict=_verdict(planner, table_name, option, chosen_option=chosen_option, reason_not_default=reason_not_default),
    )


def _verdict(
    planner: TorchrecPlanner,
    table_name: str,
    option: ShardingOption,
    *,
    chosen_option: ShardingOption,
    reason_not_default: str | None,
) -> str:
    """Return why the option of one sharding type was chosen or not.

    chosen_option: the option of the table in the plan.
    reason_not_default: the result of `why_not_default` for the type.
    """
    sharding_type, allowed_types = option.sharding_type, _constraint(planner, table_name).sharding_types
    if chosen_option.sharding_type == sharding_type:
        return "chosen"
    if allowed_types is not None and sharding_type not in allowed_types:
        return f"excluded by sharding.tables.{table_name}.sharding_types"
    if allowed_types is None and reason_not_default is not None:
        return reason_not_default
    excess_bytes = _excess_bytes(option, planner.usable_memory)
    if excess_bytes:
        return f"does not fit: {excess_bytes:,} bytes short on one rank"
    extra_ms = table_ms(option) - table_ms(chosen_option)
    if extra_ms >= 0:
        time_comparison = f"{table_ms(option):.3g} ms instead of {table_ms(chosen_option):.3g} ms"
        return f"slower: {time_comparison}" if extra_ms else "as fast as the chosen type"
    if len(planner.model.tables) > MAX_REPLANNED_TABLES:
        return "faster for this table alone; the plan for all tables together prefers the chosen type"
    try:
        all_tables_ms = step_ms(planner, planner.best_options(sharding_types_by_table={table_name: (sharding_type,)}))
    except PlannerError:
        return "faster for this table alone, but it does not fit together with the other tables"
    return f"faster for this table alone, but the lookups of all tables would take {all_tables_ms:.3g} ms"


def table_ms(option: ShardingOption) -> float:
    """Return the milliseconds per step that the slowest rank needs for this table."""
    return max(float(shard.perf.total) for shard in option.shards)


def step_ms(planner: TorchrecPlanner, option_by_table: Mapping[str, ShardingOption]) -> float:
    """Return the milliseconds per step that the slowest rank needs for all tables."""
    return max(rank.step_ms for rank in rank_estimates(planner, option_by_table))


def _excess_bytes(option: ShardingOption, usable_memory: Storage) -> int:
    """Return the bytes by which the largest shard exceeds the usable memory of a rank; 0 if it fits."""
    memory_tiers = ("hbm", "ddr")
    excess_bytes: list[int] = [
        getattr(shard.storage, tier) - getattr(usable_memory, tier) for shard in option.shards for tier in memory_tiers
    ]
    return max(0, *excess_bytes)


def naive_plans(planner: TorchrecPlanner) -> tuple[NaivePlan, ...]:
    """Return plans with one sharding type for all tables and the kernel fused, for a comparison with the chosen plan."""
    return tuple(_naive_plan(planner, sharding_type) for sharding_type in NAIVE_TYPES)


def _naive_plan(planner: TorchrecPlanner, sharding_type: ShardingType) -> NaivePlan:
    table_names: Sequence[str] = list(planner.model.tables)
    sharding_types_by_table: dict[str, tuple[ShardingType, ...]] = dict.fromkeys(table_names, (sharding_type,))
    kernels_by_table: dict[str, tuple[ComputeKernel, ...]] = dict.fromkeys(table_names, ("fused",))
    try:
        ranks = rank_estimates(
            planner, planner.best_options(sharding_types_by_table=sharding_types_by_table, kernels_by_table=kernels_by_table)
        )
    except PlannerError:
        shortage = describe_shortage(
            planner,
            {
                table_name: options[0]
                for table_name, options in planner.options(
                    sharding_types_by_table=sharding_types_by_table, kernels_by_table=kernels_by_table
                ).items()
            },
        )
        return NaivePlan(name=f"all {sharding_type}", problem=f"does not fit: {shortage}")
    return NaivePlan(
        name=f"all {sharding_type}",
        step_ms=max(rank.step_ms for rank in ranks),
        hbm_bytes=max(rank.hbm_bytes for rank in ranks),
        ddr_bytes=max(rank.ddr_bytes for rank in ranks),
    )
