"""Error for a cluster without a feasible plan: the table, the missing bytes, and changes that were verified to help."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torchrec.distributed.planner.types import PlannerError, ShardingOption

from recsys_core.errors import InputError
from recsys_core.sharding.config import ComputeKernel, TableConstraint
from recsys_core.sharding.torchrec_planner import RESERVED_SHARE, TorchrecPlanner
from recsys_core.units import GIB

MAX_RANKS = 1024
"""Larger clusters are not tried, because planning for them takes minutes."""
MAX_GPUS_PER_NODE = 8
MAX_DDR_GB = 16_384.0
MAX_TRIES = 3


def infeasible_error(planner: TorchrecPlanner) -> InputError:
    """Return the error with the missing bytes and the changes that make a plan feasible."""
    sizes = {name: f"{table.num_rows:,} x {table.dim}" for name, table in planner.model.tables.items()}
    smallest = {name: min(options, key=_size) for name, options in _resident(planner).items()}
    changes = list(_helpful_changes(planner, smallest))
    advice = (
        f"a plan exists with {'; or with '.join(changes)}"
        if changes
        else (
            f"no larger cluster that was tried has a plan (up to {MAX_RANKS} ranks, {MAX_DDR_GB:,.0f} GB per host); use "
            "fewer or narrower rows"
        )
    )
    return InputError(
        f"sharding: no plan for tables {sizes} on {planner.world_size} ranks with {planner.hbm_gb:g} GB HBM per GPU and "
        f"{planner.ddr_gb:g} GB memory per host ({100 * RESERVED_SHARE:.0f} % of it reserved for layers, activations and "
        f"input): {describe_shortage(planner, smallest)}; {advice}"
    )


def describe_shortage(planner: TorchrecPlanner, options: Mapping[str, ShardingOption]) -> str:
    """Return which table is too large for one rank, or the largest if all tables together are too large; and by how much.

    options: one layout per table.
    """
    tiers = {"hbm": "HBM", "ddr": "main memory"} if planner.device == "cuda" else {"ddr": "main memory"}
    message = ""
    for tier, tier_name in tiers.items():
        usable: int = getattr(planner.usable, tier)
        largest_shard = {name: max(getattr(shard.storage, tier) for shard in one.shards) for name, one in options.items()}
        worst = max(largest_shard, key=lambda name: largest_shard[name])
        missing_bytes = largest_shard[worst] - usable
        if missing_bytes > 0:
            return (
                f"table {worst} needs {largest_shard[worst]:,} bytes of {tier_name} on one rank "
                f"({options[worst].sharding_type}), but {usable:,} are usable: {missing_bytes:,} bytes short per rank"
            )
        need = {name: sum(getattr(shard.storage, tier) for shard in one.shards) for name, one in options.items()}
        largest = max(need, key=lambda name: need[name])
        missing_bytes = sum(need.values()) - usable * planner.world_size
        if missing_bytes > 0:
            return (
                f"table {largest} is the largest, with {need[largest]:,} of {sum(need.values()):,} bytes of {tier_name} that "
                f"all tables need on {planner.world_size} ranks together: {missing_bytes:,} bytes short in total"
            )
        message = message or (
            f"table {largest} is the largest, with {need[largest]:,} of {sum(need.values()):,} bytes of {tier_name}: enough "
            f"in total, but no distribution was found that fits the {usable:,} bytes of each rank"
        )
    return message


def _resident(planner: TorchrecPlanner) -> dict[str, list[ShardingOption]]:
    """Return the layouts that store all rows in the memory of the processor that looks them up, if there are any."""
    options_by_table = planner.options()
    resident = {
        name: [option for option in options if option.compute_kernel in ("fused", "dense")]
        for name, options in options_by_table.items()
    }
    return {name: resident[name] or options for name, options in options_by_table.items()}


def _total_bytes(option: ShardingOption) -> int:
    """Return the bytes of a layout on all ranks."""
    return sum(shard.storage.hbm + shard.storage.ddr for shard in option.shards)


def _size(option: ShardingOption) -> tuple[int, int]:
    """Return the sort key (largest shard, total bytes): a layout is feasible only if its largest shard fits a rank."""
    return max(shard.storage.hbm + shard.storage.ddr for shard in option.shards), _total_bytes(option)


def _fits(planner: TorchrecPlanner) -> bool:
    try:
        planner.best()
    except PlannerError:
        return False
    return True


def _helpful_changes(planner: TorchrecPlanner, smallest: Mapping[str, ShardingOption]) -> Iterator[str]:
    """Yield config changes that make a plan feasible, the cheapest first."""
    yield from _fewer_constraints(planner)
    yield from _offloading(planner)
    yield from _more_memory(planner, smallest)
    yield from _more_ranks(planner, smallest)


def _fewer_constraints(planner: TorchrecPlanner) -> Iterator[str]:
    for name, constraint in planner.config.tables.items():
        if constraint.sharding_types is not None and _fits(_with_constraints(planner, {name: {"sharding_types": None}})):
            yield f"sharding.tables.{name}.sharding_types removed"


def _offloading(planner: TorchrecPlanner) -> Iterator[str]:
    """Yield kernels with rows in main memory for tables whose constraints exclude them; the planner has tried the others."""
    if planner.device == "cpu":
        return
    caching: tuple[ComputeKernel, ...] = ("fused", "fused_uvm_caching")
    for name, constraint in planner.config.tables.items():
        offloading = set(constraint.compute_kernels or caching) & {"fused_uvm", "fused_uvm_caching"}
        if not offloading and _fits(_with_constraints(planner, {name: {"compute_kernels": caching}})):
            yield f"sharding.tables.{name}.compute_kernels: [fused, fused_uvm_caching], which uses main memory"


def _with_constraints(planner: TorchrecPlanner, changes: Mapping[str, dict[str, object]]) -> TorchrecPlanner:
    tables = dict(planner.config.tables)
    for name, change in changes.items():
        tables[name] = tables.get(name, TableConstraint()).model_copy(update=change)
    config = planner.config.model_copy(update={"tables": tables})
    return replace(planner, config=config)


def _more_memory(planner: TorchrecPlanner, smallest: Mapping[str, ShardingOption]) -> Iterator[str]:
    """Yield a larger main memory: for all rows on CPUs, for offloaded rows on GPUs."""
    need = sum(map(_total_bytes, smallest.values())) / planner.config.cluster.num_nodes / GIB / (1 - RESERVED_SHARE)
    kernel = "" if planner.device == "cpu" else " (rows in main memory: kernel fused_uvm_caching or fused_uvm)"
    for candidate in (need, 1.25 * need, 2 * need, 4 * need):
        ddr_gb = float(math.ceil(max(candidate, planner.ddr_gb) / 16) * 16)
        if planner.ddr_gb < ddr_gb <= MAX_DDR_GB and _fits(planner.with_cluster(ddr_gb=ddr_gb)):
            yield f"sharding.cluster.ddr_gb: {ddr_gb:g}{kernel}"
            return


def _more_ranks(planner: TorchrecPlanner, smallest: Mapping[str, ShardingOption]) -> Iterator[str]:
    """Yield more GPUs per host or more hosts, starting with the number whose memory could hold all bytes."""
    cluster = planner.config.cluster
    usable = planner.usable.hbm if planner.device == "cuda" else planner.usable.ddr
    need = math.ceil(sum(map(_total_bytes, smallest.values())) / usable)
    if planner.device == "cuda" and cluster.num_nodes == 1:
        for processes in (2, 4, MAX_GPUS_PER_NODE):
            too_few = processes <= planner.processes or 2 * processes < need
            if not too_few and _fits(planner.with_cluster(processes=processes, processes_per_node=processes)):
                yield f"sharding.cluster.processes_per_node: {processes}"
                return
        planner = planner.with_cluster(processes=MAX_GPUS_PER_NODE, processes_per_node=MAX_GPUS_PER_NODE)
    nodes = max(cluster.num_nodes + 1, math.ceil(need / planner.processes))
    for _ in range(MAX_TRIES):
        if nodes * planner.processes > MAX_RANKS:
            return
        if _fits(planner.with_cluster(num_nodes=nodes)):
            yield f"sharding.cluster.num_nodes: {nodes} with processes_per_node {planner.processes}"
            return
        nodes = math.ceil(1.3 * nodes)
