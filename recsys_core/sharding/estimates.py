"""Estimates in plan.json: memory and time of each rank, and why each table got its sharding type."""

import math
from collections.abc import Mapping, Sequence
from typing import get_args

from torchrec.distributed.planner.types import PlannerError, Shard, ShardingOption, Storage

from recsys_core.models.spec import TableSpec
from recsys_core.sharding.config import ComputeKernel, ShardingKind, TableConstraint
from recsys_core.sharding.constraints import CACHE_LOAD_FACTOR, NOT_SUPPORTED, SSD_CACHE_MB, optimizer_kind, why_not_offered
from recsys_core.sharding.infeasible import describe_shortage
from recsys_core.sharding.plan_file import Alternative, NaivePlan, RankEstimate, TableMemory
from recsys_core.sharding.torchrec_planner import TorchrecPlanner

STATE_PER_WEIGHT = {"sgd": 0.0, "none": 0.0, "adagrad": 1.0, "adam": 2.0, "partial_rowwise_adam": 1.0}
"""Bytes of optimizer state per byte of weights, as TorchRec counts them; rowwise_adagrad has one number per row instead."""
MAX_TABLES_REPLANNED = 8
"""With more tables, planning again for each faster alternative would take minutes."""
NAIVE_TYPES: tuple[ShardingKind, ...] = ("row_wise", "table_wise")
_FLOAT_BYTES = 4


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
            memory = _memory(planner, name, option=option, shard=shard)
            tables[name] = _add(tables[name], memory) if name in tables else memory
        perfs = [shard.perf for _, _, shard in shards]
        estimates.append(
            RankEstimate(
                hbm_bytes=sum(shard.storage.hbm for _, _, shard in shards),
                ddr_bytes=sum(shard.storage.ddr for _, _, shard in shards),
                ssd_bytes=sum(shard.storage.ssd for _, _, shard in shards),
                step_ms=sum(perf.total for perf in perfs),
                forward_compute_ms=sum(perf.fwd_compute for perf in perfs),
                forward_comms_ms=sum(perf.fwd_comms for perf in perfs),
                backward_compute_ms=sum(perf.bwd_compute for perf in perfs),
                backward_comms_ms=sum(perf.bwd_comms for perf in perfs),
                prefetch_ms=sum(perf.prefetch_compute for perf in perfs),
                tables=tables,
            )
        )
    return tuple(estimates)


def _memory(planner: TorchrecPlanner, name: str, *, option: ShardingOption, shard: Shard) -> TableMemory:
    table = planner.model.tables[name]
    kind = optimizer_kind(table, default=planner.optimizer)
    state = 1 / table.dim if kind == "rowwise_adagrad" else STATE_PER_WEIGHT[kind]
    rows, columns = shard.size
    weights = rows * columns * _FLOAT_BYTES
    optimizer, cache = math.ceil(weights * state), 0
    fast: int = shard.storage.hbm if planner.device == "cuda" else shard.storage.ddr
    if option.compute_kernel == "fused_uvm_caching":
        share = option.cache_load_factor or CACHE_LOAD_FACTOR
        # Besides rows and optimizer state, the cache index takes 4 bytes per row and 16 bytes per cached row.
        cache = math.ceil(share * weights * (1 + state) + rows * (4 + 16 * share))
    elif option.compute_kernel == "key_value":
        cache = min(SSD_CACHE_MB << 20, math.ceil(table.num_rows * CACHE_LOAD_FACTOR * table.dim * _FLOAT_BYTES))
    resident = 0 if option.compute_kernel in ("fused_uvm", "fused_uvm_caching", "key_value") else weights + optimizer
    return TableMemory(weights=weights, optimizer=optimizer, cache=cache, buffers=max(0, fast - resident - cache))


def _add(one: TableMemory, other: TableMemory) -> TableMemory:
    """Return the memory of two shards of a table on one rank."""
    return TableMemory(**{name: value + getattr(other, name) for name, value in one.model_dump().items()})


def alternatives(planner: TorchrecPlanner, chosen: Mapping[str, ShardingOption]) -> dict[str, tuple[Alternative, ...]]:
    """Return for each table every sharding type with its estimates and why it was chosen or not."""
    tables = planner.model.tables
    all_types: tuple[ShardingKind, ...] = get_args(ShardingKind)
    supported = {
        name: tuple(kind for kind in all_types if _is_supported(kind, table, planner=planner)) for name, table in tables.items()
    }
    kernels: tuple[ComputeKernel, ...] = ("fused", "dense")
    if planner.device == "cuda":
        kernels += ("fused_uvm_caching", "fused_uvm")
    with_dense = {
        name: tuple(dict.fromkeys((*(_constraint(planner, name).compute_kernels or kernels), "dense"))) for name in tables
    }
    options = planner.options(kinds=supported, kernels=with_dense)
    return {
        name: tuple(
            _alternative(
                planner, name, kind, [option for option in options[name] if option.sharding_type == kind], chosen=chosen
            )
            for kind in all_types
        )
        for name in sorted(tables)
    }


def _is_supported(kind: ShardingKind, table: TableSpec, *, planner: TorchrecPlanner) -> bool:
    reason = why_not_offered(kind, table, num_nodes=planner.config.cluster.num_nodes, world_size=planner.world_size)
    return reason is None or not reason.startswith(NOT_SUPPORTED)


def _constraint(planner: TorchrecPlanner, name: str) -> TableConstraint:
    return planner.config.tables.get(name, TableConstraint())


def _alternative(
    planner: TorchrecPlanner,
    name: str,
    kind: ShardingKind,
    options: list[ShardingOption],
    *,
    chosen: Mapping[str, ShardingOption],
) -> Alternative:
    table = planner.model.tables[name]
    reason = why_not_offered(kind, table, num_nodes=planner.config.cluster.num_nodes, world_size=planner.world_size)
    if not options:
        return Alternative(sharding_type=kind, verdict=reason or "no kernel supports it on this device")
    chosen_option = chosen[name]
    if chosen_option.sharding_type == kind:
        best = next(option for option in options if option.compute_kernel == chosen_option.compute_kernel)
    else:
        # The fastest option that fits without the other tables; if none fits, the one that exceeds the memory least.
        best = min(options, key=lambda option: (_excess_bytes(option, planner.usable), cost_ms(option)))
    return Alternative(
        sharding_type=kind,
        compute_kernel=best.compute_kernel,
        step_ms=cost_ms(best),
        hbm_bytes=max(shard.storage.hbm for shard in best.shards),
        ddr_bytes=max(shard.storage.ddr for shard in best.shards),
        verdict=_verdict(planner, name, best, chosen=chosen_option, reason=reason),
    )


def _verdict(
    planner: TorchrecPlanner,
    name: str,
    option: ShardingOption,
    *,
    chosen: ShardingOption,
    reason: str | None,
) -> str:
    """Return why an option was chosen or not. reason: why its type is not offered by default, if it is not."""
    kind, allowed = option.sharding_type, _constraint(planner, name).sharding_types
    if chosen.sharding_type == kind:
        return "chosen"
    if allowed is not None and kind not in allowed:
        return f"excluded by sharding.tables.{name}.sharding_types"
    if allowed is None and reason is not None:
        return reason
    excess_bytes = _excess_bytes(option, planner.usable)
    if excess_bytes:
        return f"does not fit: {excess_bytes:,} bytes short on one rank"
    slower = cost_ms(option) - cost_ms(chosen)
    if slower >= 0:
        return (
            f"slower: {cost_ms(option):.3g} ms instead of {cost_ms(chosen):.3g} ms" if slower else "as fast as the chosen type"
        )
    if len(planner.model.tables) > MAX_TABLES_REPLANNED:
        return "faster for this table alone, but not chosen together with the other tables"
    try:
        step = step_ms(planner, planner.best(kinds={name: (kind,)}))
    except PlannerError:
        return "faster for this table alone, but it does not fit together with the other tables"
    return f"faster for this table alone, but the lookups of all tables would take {step:.3g} ms"


def cost_ms(option: ShardingOption) -> float:
    """Return the time of the slowest rank for this table alone."""
    return max(float(shard.perf.total) for shard in option.shards)


def step_ms(planner: TorchrecPlanner, options: Mapping[str, ShardingOption]) -> float:
    """Return the time of the slowest rank for all tables."""
    return max(rank.step_ms for rank in rank_estimates(planner, options))


def _excess_bytes(option: ShardingOption, usable: Storage) -> int:
    """Return by how many bytes the largest shard exceeds the memory of a rank; 0 if it fits."""
    tiers = ("hbm", "ddr")
    excess: list[int] = [getattr(shard.storage, tier) - getattr(usable, tier) for shard in option.shards for tier in tiers]
    return max(0, *excess)


def naive_plans(planner: TorchrecPlanner) -> tuple[NaivePlan, ...]:
    """Return plans with one sharding type for all tables and the kernel fused, to compare the plan with."""
    return tuple(_naive(planner, kind) for kind in NAIVE_TYPES)


def _naive(planner: TorchrecPlanner, kind: ShardingKind) -> NaivePlan:
    tables: Sequence[str] = list(planner.model.tables)
    kinds: dict[str, tuple[ShardingKind, ...]] = dict.fromkeys(tables, (kind,))
    kernels: dict[str, tuple[ComputeKernel, ...]] = dict.fromkeys(tables, ("fused",))
    try:
        ranks = rank_estimates(planner, planner.best(kinds=kinds, kernels=kernels))
    except PlannerError:
        problem = describe_shortage(
            planner, {name: options[0] for name, options in planner.options(kinds=kinds, kernels=kernels).items()}
        )
        return NaivePlan(name=f"all {kind}", problem=f"does not fit: {problem}")
    return NaivePlan(
        name=f"all {kind}",
        step_ms=max(rank.step_ms for rank in ranks),
        hbm_bytes=max(rank.hbm_bytes for rank in ranks),
        ddr_bytes=max(rank.ddr_bytes for rank in ranks),
    )
