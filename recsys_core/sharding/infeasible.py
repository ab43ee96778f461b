"""Error for a cluster without a feasible plan: the table, the missing bytes, and changes that make a plan feasible."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torchrec.distributed.planner.types import PlannerError, ShardingOption

from recsys_core.errors import InputError
from recsys_core.sharding.config import ComputeKernel, TableConstraint
from recsys_core.sharding.torchrec_planner import RESERVED_SHARE, TorchrecPlanner
from recsys_core.units import GIB

MAX_RANKS = 1024
"""Larger clusters are not tried, because planning for a larger cluster takes minutes."""
MAX_GPUS_PER_NODE = 8
MAX_DDR_GB = 16_384.0
MAX_NODE_COUNTS = 3


def infeasible_error(planner: TorchrecPlanner) -> InputError:
    """Build the error with the missing bytes and the changes that make a plan feasible."""
    shown_size_by_table = {
        table_name: f"{table.num_rows:,} x {table.dim}" for table_name, table in planner.model.tables.items()
    }
    smallest_option_by_table = {
        table_name: min(options, key=_shard_and_total_bytes) for table_name, options in _resident_options(planner).items()
    }
    changes = list(_helpful_changes(planner, smallest_option_by_table))
    advice = (
        f"a plan exists with {'; or with '.join(changes)}"
        if changes
        else (
            f"no larger cluster has a plan either (tried up to {MAX_RANKS} ranks, {MAX_DDR_GB:,.0f} GB per host); use "
            "fewer or narrower rows"
        )
    )
    return InputError(
        f"sharding: no plan for tables {shown_size_by_table} on {planner.world_size} ranks with {planner.hbm_gb:g} GB HBM per "
        f"GPU and {planner.ddr_gb:g} GB memory per host ({100 * RESERVED_SHARE:.0f} % of both are reserved for layers, "
        f"activations and input): {describe_shortage(planner, smallest_option_by_table)}; {advice}"
    )


def describe_shortage(planner: TorchrecPlanner, option_by_table: Mapping[str, ShardingOption]) -> str:
    """Return a message with the missing bytes: of a table that is too large for a rank, or of all tables together.

    option_by_table: one layout per table.
    """
    name_by_tier = {"hbm": "HBM", "ddr": "main memory"} if planner.device == "cuda" else {"ddr": "main memory"}
    shortage = ""
    for tier, tier_name in name_by_tier.items():
        usable_bytes: int = getattr(planner.usable_memory, tier)
        shard_bytes_by_table = {
            name: [getattr(shard.storage, tier) for shard in option.shards] for name, option in option_by_table.items()
        }
        largest_shard_by_table = {name: max(shard_bytes) for name, shard_bytes in shard_bytes_by_table.items()}
        table_name = max(largest_shard_by_table, key=lambda name: largest_shard_by_table[name])
        missing_bytes = largest_shard_by_table[table_name] - usable_bytes
        if missing_bytes > 0:
            return (
                f"table {table_name} needs {largest_shard_by_table[table_name]:,} bytes of {tier_name} on one rank "
                f"({option_by_table[table_name].sharding_type}), but {usable_bytes:,} are usable: {missing_bytes:,} bytes "
                "short per rank"
            )
        bytes_by_table = {name: sum(shard_bytes) for name, shard_bytes in shard_bytes_by_table.items()}
        total_bytes = sum(bytes_by_table.values())
        table_name = max(bytes_by_table, key=lambda name: bytes_by_table[name])
        largest_table = (
            f"table {table_name} is the largest, with {bytes_by_table[table_name]:,} of {total_bytes:,} bytes of {tier_name}"
        )
        missing_bytes = total_bytes - usable_bytes * planner.world_size
        if missing_bytes > 0:
            return (
                f"{largest_table} that all tables need on {planner.world_size} ranks together: "
                f"{missing_bytes:,} bytes short in total"
            )
        shortage = shortage or (
            f"{largest_table}; all ranks together have enough memory, but no layout was found in which each rank needs at most "
            f"{usable_bytes:,} bytes"
        )
    return shortage


def _resident_options(planner: TorchrecPlanner) -> dict[str, list[ShardingOption]]:
    """Return the layouts of each table without offloading, or all its layouts if every layout offloads rows."""
    options_by_table = planner.options()
    resident_options_by_table = {
        table_name: [option for option in options if option.compute_kernel in ("fused", "dense")]
        for table_name, options in options_by_table.items()
    }
    return {table_name: resident_options_by_table[table_name] or options for table_name, options in options_by_table.items()}


def _total_bytes(option: ShardingOption) -> int:
    """Return the bytes that a layout needs on all ranks."""
    return sum(shard.storage.hbm + shard.storage.ddr for shard in option.shards)


def _shard_and_total_bytes(option: ShardingOption) -> tuple[int, int]:
    """Return (bytes of the largest shard, bytes of all shards). Layouts with lower values are preferred."""
    return max(shard.storage.hbm + shard.storage.ddr for shard in option.shards), _total_bytes(option)


def _fits(planner: TorchrecPlanner) -> bool:
    try:
        planner.best_options()
    except PlannerError:
        return False
    return True


def _helpful_changes(planner: TorchrecPlanner, smallest_option_by_table: Mapping[str, ShardingOption]) -> Iterator[str]:
    """Yield config changes that make a plan feasible, the cheapest change first."""
    yield from _constraint_changes(planner)
    yield from _offloading_changes(planner)
    yield from _memory_changes(planner, smallest_option_by_table)
    yield from _rank_changes(planner, smallest_option_by_table)


def _constraint_changes(planner: TorchrecPlanner) -> Iterator[str]:
    for table_name, constraint in planner.config.tables.items():
        if constraint.sharding_types is not None and _fits(_with_constraints(planner, {table_name: {"sharding_types": None}})):
            yield f"sharding.tables.{table_name}.sharding_types removed"


def _offloading_changes(planner: TorchrecPlanner) -> Iterator[str]:
    """Yield offloading kernels for tables whose constraints exclude these kernels."""
    if planner.device == "cpu":
        return
    caching_kernels: tuple[ComputeKernel, ...] = ("fused", "fused_uvm_caching")
    for table_name, constraint in planner.config.tables.items():
        allowed_offloading_kernels = set(constraint.compute_kernels or caching_kernels) & {"fused_uvm", "fused_uvm_caching"}
        if not allowed_offloading_kernels and _fits(
            _with_constraints(planner, {table_name: {"compute_kernels": caching_kernels}})
        ):
            yield f"sharding.tables.{table_name}.compute_kernels: [fused, fused_uvm_caching], which uses main memory"


def _with_constraints(planner: TorchrecPlanner, update_by_table: Mapping[str, dict[str, object]]) -> TorchrecPlanner:
    constraint_by_table = dict(planner.config.tables)
    for table_name, constraint_update in update_by_table.items():
        constraint_by_table[table_name] = constraint_by_table.get(table_name, TableConstraint()).model_copy(
            update=constraint_update
        )
    config = planner.config.model_copy(update={"tables": constraint_by_table})
    return replace(planner, config=config)


def _memory_changes(planner: TorchrecPlanner, smallest_option_by_table: Mapping[str, ShardingOption]) -> Iterator[str]:
    """Yield a size of the main memory that is large enough. On GPUs, the main memory stores the offloaded rows."""
    total_bytes = sum(map(_total_bytes, smallest_option_by_table.values()))
    needed_gb = total_bytes / planner.config.cluster.num_nodes / GIB / (1 - RESERVED_SHARE)
    advice = "" if planner.device == "cpu" else " (the kernels fused_uvm_caching and fused_uvm store rows in main memory)"
    for candidate_gb in (needed_gb, 1.25 * needed_gb, 2 * needed_gb, 4 * needed_gb):
        ddr_gb = float(math.ceil(max(candidate_gb, planner.ddr_gb) / 16) * 16)
        if planner.ddr_gb < ddr_gb <= MAX_DDR_GB and _fits(planner.with_cluster(ddr_gb=ddr_gb)):
            yield f"sharding.cluster.ddr_gb: {ddr_gb:g}{advice}"
            return


def _rank_changes(planner: TorchrecPlanner, smallest_option_by_table: Mapping[str, ShardingOption]) -> Iterator[str]:
    """Yield a sufficient number of GPUs per host, or a sufficient number of hosts.

    The search starts near `num_needed_ranks`, the number of ranks whose total memory is large enough for all tables.
    """
    cluster = planner.config.cluster
    usable_bytes = planner.usable_memory.hbm if planner.device == "cuda" else planner.usable_memory.ddr
    num_needed_ranks = math.ceil(sum(map(_total_bytes, smallest_option_by_table.values())) / usable_bytes)
    if planner.device == "cuda" and cluster.num_nodes == 1:
        for processes_per_node in (2, 4, MAX_GPUS_PER_NODE):
            is_too_few = processes_per_node <= planner.processes_per_node or 2 * processes_per_node < num_needed_ranks
            if not is_too_few and _fits(planner.with_cluster(processes_per_node=processes_per_node)):
                yield f"sharding.cluster.processes_per_node: {processes_per_node}"
                return
        planner = planner.with_cluster(processes_per_node=MAX_GPUS_PER_NODE)
    num_nodes = max(cluster.num_nodes + 1, math.ceil(num_needed_ranks / planner.processes_per_node))
    for _ in range(MAX_NODE_COUNTS):
        if num_nodes * planner.processes_per_node > MAX_RANKS:
            return
        if _fits(planner.with_cluster(num_nodes=num_nodes)):
            yield f"sharding.cluster.num_nodes: {num_nodes} with processes_per_node {planner.processes_per_node}"
            return
        num_nodes = math.ceil(1.3 * num_nodes)
