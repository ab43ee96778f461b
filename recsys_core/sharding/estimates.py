"""From the layouts TorchRec estimated to what plan.json tells: memory and time by rank, and why a table got its type."""

import math
from collections.abc import Mapping, Sequence
from typing import get_args

from torchrec.distributed.planner.types import PlannerError, Shard, ShardingOption, Storage

from recsys_core.models.spec import TableSpec
from recsys_core.sharding.config import ComputeKernel, ShardingKind, TableConstraint
from recsys_core.sharding.constraints import CACHE_LOAD_FACTOR, SSD_CACHE_MB, optimizer_kind, why_not_offered
from recsys_core.sharding.infeasible import why_too_large
from recsys_core.sharding.plan_file import Alternative, NaivePlan, RankEstimate, TableMemory
from recsys_core.sharding.torchrec_planner import TorchrecPlanner

STATE_PER_WEIGHT = {"sgd": 0.0, "none": 0.0, "adagrad": 1.0, "adam": 2.0, "partial_rowwise_adam": 1.0}
"""Bytes of optimizer state by byte of weights, as TorchRec counts them; rowwise_adagrad: one number per row."""
MOST_TABLES_TRIED = 8
"""With more tables a search takes seconds, and there are several alternatives to each."""
NAIVE: tuple[ShardingKind, ...] = ("row_wise", "table_wise")
_FLOAT_BYTES = 4


def rank_estimates(search: TorchrecPlanner, options: Mapping[str, ShardingOption]) -> tuple[RankEstimate, ...]:
    """Memory and time of each rank under the layouts of `options`, by table."""
    held: list[list[tuple[str, ShardingOption, Shard]]] = [[] for _ in range(search.world_size)]
    for name, option in options.items():
        for shard in option.shards:
            held[shard.rank].append((name, option, shard))
    made = []
    for shards in held:
        tables: dict[str, TableMemory] = {}
        for name, option, shard in shards:
            found, before = _memory(search, name, option=option, shard=shard), tables.get(name)
            tables[name] = found if before is None else _sum(before, found)
        perfs = [shard.perf for _, _, shard in shards]
        made.append(
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
    return tuple(made)


def _memory(search: TorchrecPlanner, name: str, *, option: ShardingOption, shard: Shard) -> TableMemory:
    table = search.model.tables[name]
    kind = optimizer_kind(table, default=search.optimizer)
    state = 1 / table.dim if kind == "rowwise_adagrad" else STATE_PER_WEIGHT[kind]
    rows, columns = shard.size
    weights = rows * columns * _FLOAT_BYTES
    optimizer, cache = math.ceil(weights * state), 0
    fast: int = shard.storage.hbm if search.device == "cuda" else shard.storage.ddr
    if option.compute_kernel == "fused_uvm_caching":
        share = option.cache_load_factor or CACHE_LOAD_FACTOR
        # Beside the rows and their state 4 bytes per row and 16 per cached one, for who is in the cache and since when.
        cache = math.ceil(share * weights * (1 + state) + rows * (4 + 16 * share))
    elif option.compute_kernel == "key_value":
        cache = min(SSD_CACHE_MB << 20, math.ceil(table.num_rows * CACHE_LOAD_FACTOR * table.dim * _FLOAT_BYTES))
    resident = 0 if option.compute_kernel in ("fused_uvm", "fused_uvm_caching", "key_value") else weights + optimizer
    return TableMemory(weights=weights, optimizer=optimizer, cache=cache, buffers=max(0, fast - resident - cache))


def _sum(one: TableMemory, other: TableMemory) -> TableMemory:
    """Two column shards of one table on a rank."""
    return TableMemory(**{name: value + getattr(other, name) for name, value in one.model_dump().items()})


def alternatives(search: TorchrecPlanner, chosen: Mapping[str, ShardingOption]) -> dict[str, tuple[Alternative, ...]]:
    """By table every sharding type: its estimates alone, and why it was chosen or not."""
    tables = search.model.tables
    every: tuple[ShardingKind, ...] = get_args(ShardingKind)
    possible = {
        name: tuple(kind for kind in every if not _cannot_be(kind, table, search=search)) for name, table in tables.items()
    }
    kernels: tuple[ComputeKernel, ...] = ("fused", "dense")
    if search.device == "cuda":
        kernels += ("fused_uvm_caching", "fused_uvm")
    with_dense = {name: tuple(dict.fromkeys((*(_wish(search, name).compute_kernels or kernels), "dense"))) for name in tables}
    found = search.options(kinds=possible, kernels=with_dense)
    return {
        name: tuple(
            _alternative(search, name, kind, [option for option in found[name] if option.sharding_type == kind], chosen=chosen)
            for kind in every
        )
        for name in sorted(tables)
    }


def _cannot_be(kind: ShardingKind, table: TableSpec, *, search: TorchrecPlanner) -> bool:
    reason = why_not_offered(kind, table, num_nodes=search.config.cluster.num_nodes, world_size=search.world_size)
    return reason is not None and reason.startswith("cannot be")


def _wish(search: TorchrecPlanner, name: str) -> TableConstraint:
    return search.config.tables.get(name, TableConstraint())


def _alternative(
    search: TorchrecPlanner, name: str, kind: ShardingKind, found: list[ShardingOption], *, chosen: Mapping[str, ShardingOption]
) -> Alternative:
    table, allowed = search.model.tables[name], _wish(search, name).sharding_types
    reason = why_not_offered(kind, table, num_nodes=search.config.cluster.num_nodes, world_size=search.world_size)
    if not found:
        return Alternative(sharding_type=kind, verdict=reason or "no kernel for it here")
    taken = chosen[name]
    if taken.sharding_type == kind:
        best = next(option for option in found if option.compute_kernel == taken.compute_kernel)
    else:
        # The fastest of those that fit alone; where none does, the one that is the least short.
        best = min(found, key=lambda option: (_short(option, search.usable), cost_ms(option)))
    return Alternative(
        sharding_type=kind,
        compute_kernel=best.compute_kernel,
        step_ms=cost_ms(best),
        hbm_bytes=max(shard.storage.hbm for shard in best.shards),
        ddr_bytes=max(shard.storage.ddr for shard in best.shards),
        verdict=_verdict(search, name, best, taken=taken, allowed=allowed, reason=reason),
    )


def _verdict(
    search: TorchrecPlanner,
    name: str,
    option: ShardingOption,
    *,
    taken: ShardingOption,
    allowed: tuple[ShardingKind, ...] | None,
    reason: str | None,
) -> str:
    kind = option.sharding_type
    if taken.sharding_type == kind:
        return "chosen"
    if allowed is not None and kind not in allowed:
        return f"left out by sharding.tables.{name}.sharding_types"
    if allowed is None and reason is not None:
        return reason
    short = _short(option, search.usable)
    if short:
        return f"does not fit: {short:,} bytes short on one rank"
    slower = cost_ms(option) - cost_ms(taken)
    if slower >= 0:
        return f"slower: {cost_ms(option):.3g} ms, {cost_ms(taken):.3g} as chosen" if slower else "as fast, no better"
    if len(search.model.tables) > MOST_TABLES_TRIED:
        return "faster alone, but not found to be with the other tables"
    try:
        step = step_ms(search, search.best(kinds={name: (kind,)}))
    except PlannerError:
        return "faster alone, but it does not fit beside the other tables"
    return f"faster alone, but the step of all tables would take {step:.3g} ms"


def cost_ms(option: ShardingOption) -> float:
    """Of the slowest rank, were the table alone."""
    return max(float(shard.perf.total) for shard in option.shards)


def step_ms(search: TorchrecPlanner, options: Mapping[str, ShardingOption]) -> float:
    """Of the slowest rank."""
    return max(rank.step_ms for rank in rank_estimates(search, options))


def _short(option: ShardingOption, usable: Storage) -> int:
    """Bytes that the largest shard alone is too large by."""
    tiers = ("hbm", "ddr")
    over: list[int] = [getattr(shard.storage, tier) - getattr(usable, tier) for shard in option.shards for tier in tiers]
    return max(0, *over)


def naive_plans(search: TorchrecPlanner) -> tuple[NaivePlan, ...]:
    """All tables of one sharding type with the plain kernel: what the plan is worth, or why there has to be one."""
    return tuple(_naive(search, kind) for kind in NAIVE)


def _naive(search: TorchrecPlanner, kind: ShardingKind) -> NaivePlan:
    tables: Sequence[str] = list(search.model.tables)
    kinds: dict[str, tuple[ShardingKind, ...]] = dict.fromkeys(tables, (kind,))
    kernels: dict[str, tuple[ComputeKernel, ...]] = dict.fromkeys(tables, ("fused",))
    try:
        ranks = rank_estimates(search, search.best(kinds=kinds, kernels=kernels))
    except PlannerError:
        problem = why_too_large(
            search, {name: found[0] for name, found in search.options(kinds=kinds, kernels=kernels).items()}
        )
        return NaivePlan(name=f"all {kind}", problem=f"does not fit: {problem}")
    return NaivePlan(
        name=f"all {kind}",
        step_ms=max(rank.step_ms for rank in ranks),
        hbm_bytes=max(rank.hbm_bytes for rank in ranks),
        ddr_bytes=max(rank.ddr_bytes for rank in ranks),
    )
