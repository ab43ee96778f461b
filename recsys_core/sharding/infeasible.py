"""Error for a cluster without a feasible plan: the table, the missing bytes, and changes that make a plan feasible."""

import math
from collections.abc import Iterator, Mapping

from torchrec.distributed.planner.types import PlannerError, ShardingOption

from recsys_core.errors import InputError
from recsys_core.sharding.config import ComputeKernel
from recsys_core.sharding.constraints import check_constraints
from recsys_core.sharding.torchrec_planner import RESERVED_SHARE, TorchrecPlanner
from recsys_core.units import GIB

MAX_RANKS = 1024
"""Larger clusters are not tried, because planning for a larger cluster takes minutes."""
MAX_GPUS_PER_NODE = 8
MAX_DDR_GB = 16_384.0
MAX_TRIED_NODE_COUNTS = 3
CACHING_KERNELS: tuple[ComputeKernel, ...] = ("fused", "fused_uvm_caching")

Change = tuple[str, TorchrecPlanner]
"""The setting with its new value, and the planner for the changed config."""


def infeasible_error(planner: TorchrecPlanner) -> InputError:
    """Return the error with the missing bytes and the changes that make a plan feasible."""
    size_text_by_table = {table_name: f"{table.num_rows:,} x {table.dim}" for table_name, table in planner.model.tables.items()}
    smallest_layout_by_table = {
        table_name: min(_without_offloading(layouts), key=_shard_and_total_bytes)
        for table_name, layouts in planner.layouts().items()
    }
    total_bytes = sum(_shard_and_total_bytes(layout)[1] for layout in smallest_layout_by_table.values())
    feasible_settings = [
        next((setting for setting, changed_planner in alternatives if _has_plan(changed_planner)), None)
        for alternatives in _config_changes(planner, total_bytes=total_bytes)
    ]
    settings_text = "; or with ".join(setting for setting in feasible_settings if setting is not None)
    advice = (
        f"a plan exists with {settings_text}"
        if settings_text
        else f"no larger cluster has a plan either (tried up to {MAX_RANKS} ranks, {MAX_DDR_GB:,.0f} GB per host); use fewer "
        "or narrower rows"
    )
    return InputError(
        f"sharding: no plan for tables {size_text_by_table} on {planner.world_size} ranks with {planner.hbm_gb:g} GB HBM per "
        f"GPU and {planner.ddr_gb:g} GB memory per host ({100 * RESERVED_SHARE:.0f} % of both are reserved for layers, "
        f"activations and input): {_describe_shortage(planner, smallest_layout_by_table)}; {advice}"
    )


def _without_offloading(layouts: list[ShardingOption]) -> list[ShardingOption]:
    """Return the layouts without offloading, or all of them if every layout offloads rows."""
    return [layout for layout in layouts if layout.compute_kernel in ("fused", "dense")] or layouts


def _shard_and_total_bytes(layout: ShardingOption) -> tuple[int, int]:
    """Return (bytes of the largest shard, bytes of all shards), by which layouts are compared."""
    shard_bytes = [shard.storage.hbm + shard.storage.ddr for shard in layout.shards]
    return max(shard_bytes), sum(shard_bytes)


def _has_plan(planner: TorchrecPlanner) -> bool:
    try:
        # Without this check, TorchRec raises RuntimeError if no sharding type supports the compute kernels.
        check_constraints(planner.config, model=planner.model, device=planner.device)
        planner.best_layouts()
    except (InputError, PlannerError):
        return False
    return True


def _describe_shortage(planner: TorchrecPlanner, layout_by_table: Mapping[str, ShardingOption]) -> str:
    """Return a message with the number of missing bytes: on one rank if a shard does not fit, otherwise on all ranks together.

    If the memory of all ranks together is enough, the message says that no layout was found. layout_by_table: the smallest
    layout of each table.
    """
    name_by_tier = {"hbm": "HBM", "ddr": "main memory"} if planner.device == "cuda" else {"ddr": "main memory"}
    no_layout_messages = []
    for tier, tier_name in name_by_tier.items():
        usable_bytes_per_rank: int = getattr(planner.usable_memory, tier)
        shard_bytes_by_table = {
            name: [getattr(shard.storage, tier) for shard in layout.shards] for name, layout in layout_by_table.items()
        }
        max_shard_bytes, table_name = max((max(shard_bytes), name) for name, shard_bytes in shard_bytes_by_table.items())
        if max_shard_bytes > usable_bytes_per_rank:
            return (
                f"table {table_name} needs {max_shard_bytes:,} bytes of {tier_name} on one rank "
                f"({layout_by_table[table_name].sharding_type}), but {usable_bytes_per_rank:,} are usable: "
                f"{max_shard_bytes - usable_bytes_per_rank:,} bytes short per rank"
            )
        total_bytes = sum(map(sum, shard_bytes_by_table.values()))
        max_table_bytes, table_name = max((sum(shard_bytes), name) for name, shard_bytes in shard_bytes_by_table.items())
        needed_memory_text = f"all tables need {total_bytes:,} bytes of {tier_name}"
        largest_table_text = f"table {table_name} is the largest, with {max_table_bytes:,} bytes"
        missing_bytes = total_bytes - usable_bytes_per_rank * planner.world_size
        if missing_bytes > 0:
            return f"{needed_memory_text}, {missing_bytes:,} more than {planner.world_size} ranks have; {largest_table_text}"
        no_layout_messages.append(
            f"{needed_memory_text}, which the ranks have together, but no layout was found in which each rank needs at most "
            f"{usable_bytes_per_rank:,} bytes; {largest_table_text}"
        )
    return no_layout_messages[0]


def _config_changes(planner: TorchrecPlanner, *, total_bytes: int) -> Iterator[list[Change]]:
    """Yield lists of alternative config changes that may make a plan feasible, the cheapest change first in each list."""
    for table_name, constraint in planner.config.tables.items():
        if constraint.sharding_types is not None:
            planner_with_free_types = planner.with_constraint(table_name, sharding_types=None)
            alternatives = [(f"sharding.tables.{table_name}.sharding_types removed", planner_with_free_types)]
            if constraint.compute_kernels is not None:
                planner_with_free_layout = planner_with_free_types.with_constraint(table_name, compute_kernels=None)
                alternatives.append(
                    (f"sharding.tables.{table_name}.sharding_types and compute_kernels removed", planner_with_free_layout)
                )
            yield alternatives
    for table_name, constraint in planner.config.tables.items():
        kernels = set(constraint.compute_kernels or CACHING_KERNELS)
        if planner.device == "cuda" and not kernels & {"fused_uvm", "fused_uvm_caching"}:
            setting = f"sharding.tables.{table_name}.compute_kernels: [fused, fused_uvm_caching], which uses main memory"
            yield [(setting, planner.with_constraint(table_name, compute_kernels=CACHING_KERNELS))]
    yield _memory_changes(planner, total_bytes=total_bytes)
    yield _rank_changes(planner, total_bytes=total_bytes)


def _memory_changes(planner: TorchrecPlanner, *, total_bytes: int) -> list[Change]:
    """Return increasing sizes of the main memory, in multiples of 16 GB. With GPUs, the main memory stores offloaded rows."""
    needed_gb = total_bytes / planner.config.cluster.num_nodes / GIB / (1 - RESERVED_SHARE)
    kernel_note = "" if planner.device == "cpu" else " (the kernels fused_uvm_caching and fused_uvm store rows in main memory)"
    sizes_gb = [float(math.ceil(max(factor * needed_gb, planner.ddr_gb) / 16) * 16) for factor in (1, 1.25, 2, 4)]
    return [
        (f"sharding.cluster.ddr_gb: {ddr_gb:g}{kernel_note}", planner.with_cluster(ddr_gb=ddr_gb))
        for ddr_gb in sizes_gb
        if planner.ddr_gb < ddr_gb <= MAX_DDR_GB
    ]


def _rank_changes(planner: TorchrecPlanner, *, total_bytes: int) -> list[Change]:
    """Return increasing numbers of GPUs for a single host, then increasing numbers of hosts.

    The numbers start near the smallest number of ranks whose memory together is large enough for all tables.
    """
    cluster, changes = planner.config.cluster, []
    usable_bytes_per_rank = planner.usable_memory.hbm if planner.device == "cuda" else planner.usable_memory.ddr
    num_needed_ranks = math.ceil(total_bytes / max(1, usable_bytes_per_rank))
    if planner.device == "cuda" and cluster.num_nodes == 1:
        for num_gpus in (2, 4, MAX_GPUS_PER_NODE):
            if num_gpus > planner.processes_per_node and 2 * num_gpus >= num_needed_ranks:
                changed_planner = planner.with_cluster(processes_per_node=num_gpus)
                changes.append((f"sharding.cluster.processes_per_node: {num_gpus}", changed_planner))
        planner = planner.with_cluster(processes_per_node=MAX_GPUS_PER_NODE)
    ranks_per_node = planner.processes_per_node
    num_nodes = max(cluster.num_nodes + 1, math.ceil(num_needed_ranks / ranks_per_node))
    for _ in range(MAX_TRIED_NODE_COUNTS):
        if num_nodes * ranks_per_node <= MAX_RANKS:
            setting = f"sharding.cluster.num_nodes: {num_nodes} with processes_per_node {ranks_per_node}"
            changes.append((setting, planner.with_cluster(num_nodes=num_nodes)))
        num_nodes = math.ceil(1.3 * num_nodes)
    return changes
