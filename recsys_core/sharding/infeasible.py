"""A plan that does not fit: which table, how many bytes short, and what would make it fit, tried before it is named."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torchrec.distributed.planner.types import PlannerError, ShardingOption

from recsys_core.errors import InputError
from recsys_core.sharding.config import ComputeKernel, TableConstraint
from recsys_core.sharding.torchrec_planner import RESERVED_SHARE, TorchrecPlanner
from recsys_core.units import GIB

MOST_RANKS = 1024
"""Clusters beyond are not tried: a search among them takes minutes."""
MOST_GPUS_PER_NODE = 8
MOST_DDR_GB = 16_384.0
_TRIES = 3


def refusal(search: TorchrecPlanner) -> InputError:
    """What to say when no plan fits."""
    sizes = {name: f"{table.num_rows:,} x {table.dim}" for name, table in search.model.tables.items()}
    smallest = {name: min(options, key=_size) for name, options in _resident(search).items()}
    ways = list(_ways(search, smallest))
    out = (
        f"tried, and fits: {'; or '.join(ways)}"
        if ways
        else (
            f"nothing that was tried fits (up to {MOST_RANKS} ranks, {MOST_DDR_GB:,.0f} GB a host); take fewer or narrower rows"
        )
    )
    return InputError(
        f"sharding: no plan for tables {sizes} on {search.world_size} ranks with {search.hbm_gb:g} GB HBM per GPU and "
        f"{search.ddr_gb:g} GB memory per host ({100 * RESERVED_SHARE:.0f} % of it kept for layers, activations and input): "
        f"{why_too_large(search, smallest)}; {out}"
    )


def why_too_large(search: TorchrecPlanner, options: Mapping[str, ShardingOption]) -> str:
    """Which table is too large for one rank, or the largest of those that are too large together; and by how much.

    options: one layout per table.
    """
    tiers = {"hbm": "HBM", "ddr": "main memory"} if search.device == "cuda" else {"ddr": "main memory"}
    told = ""
    for tier, words in tiers.items():
        usable: int = getattr(search.usable, tier)
        largest_shard = {name: max(getattr(shard.storage, tier) for shard in one.shards) for name, one in options.items()}
        worst = max(largest_shard, key=lambda name: largest_shard[name])
        short = largest_shard[worst] - usable
        if short > 0:
            return (
                f"table {worst} needs {largest_shard[worst]:,} bytes of {words} on one rank ({options[worst].sharding_type}), "
                f"but {usable:,} are usable: {short:,} bytes short per rank"
            )
        need = {name: sum(getattr(shard.storage, tier) for shard in one.shards) for name, one in options.items()}
        largest = max(need, key=lambda name: need[name])
        short = sum(need.values()) - usable * search.world_size
        if short > 0:
            return (
                f"table {largest} is the largest, with {need[largest]:,} of {sum(need.values()):,} bytes of {words} that all "
                f"tables need on {search.world_size} ranks together: {short:,} bytes short in all"
            )
        told = told or (
            f"table {largest} is the largest, with {need[largest]:,} of {sum(need.values()):,} bytes of {words}: enough "
            f"in all, but no distribution was found that gives no rank more than its {usable:,} bytes"
        )
    return told


def _resident(search: TorchrecPlanner) -> dict[str, list[ShardingOption]]:
    """Layouts that keep all rows with the processor that looks them up."""
    found = search.options()
    plain = {
        name: [option for option in options if option.compute_kernel in ("fused", "dense")] for name, options in found.items()
    }
    return {name: plain[name] or options for name, options in found.items()}


def _total_bytes(option: ShardingOption) -> int:
    """Over all ranks."""
    return sum(shard.storage.hbm + shard.storage.ddr for shard in option.shards)


def _size(option: ShardingOption) -> tuple[int, int]:
    """Smallest shards first, for they are what has to go somewhere; then the fewest bytes in all."""
    return max(shard.storage.hbm + shard.storage.ddr for shard in option.shards), _total_bytes(option)


def _fits(search: TorchrecPlanner) -> bool:
    try:
        search.best()
    except PlannerError:
        return False
    return True


def _ways(search: TorchrecPlanner, smallest: Mapping[str, ShardingOption]) -> Iterator[str]:
    """Changes that make a plan possible, the cheapest first."""
    yield from _fewer_wishes(search)
    yield from _offloading(search)
    yield from _more_memory(search, smallest)
    yield from _more_ranks(search, smallest)


def _fewer_wishes(search: TorchrecPlanner) -> Iterator[str]:
    for name, wish in search.config.tables.items():
        if wish.sharding_types is not None and _fits(_wishing(search, {name: {"sharding_types": None}})):
            yield f"leave sharding.tables.{name}.sharding_types out"


def _offloading(search: TorchrecPlanner) -> Iterator[str]:
    """Rows in main memory, where the user has left that out; elsewhere the planner has tried it itself."""
    if search.device == "cpu":
        return
    caching: tuple[ComputeKernel, ...] = ("fused", "fused_uvm_caching")
    for name, wish in search.config.tables.items():
        beside = set(wish.compute_kernels or caching) & {"fused_uvm", "fused_uvm_caching"}
        if not beside and _fits(_wishing(search, {name: {"compute_kernels": caching}})):
            yield f"sharding.tables.{name}.compute_kernels: [fused, fused_uvm_caching] with the main memory there is"


def _wishing(search: TorchrecPlanner, changes: Mapping[str, dict[str, object]]) -> TorchrecPlanner:
    tables = dict(search.config.tables)
    for name, change in changes.items():
        tables[name] = tables.get(name, TableConstraint()).model_copy(update=change)
    config = search.config.model_copy(update={"tables": tables})
    return replace(search, config=config)


def _more_memory(search: TorchrecPlanner, smallest: Mapping[str, ShardingOption]) -> Iterator[str]:
    """More main memory: for the tables on CPUs, for rows beside the GPUs else."""
    need = sum(map(_total_bytes, smallest.values())) / search.config.cluster.num_nodes / GIB / (1 - RESERVED_SHARE)
    kernel = "" if search.device == "cpu" else " (rows in main memory: kernel fused_uvm_caching or fused_uvm)"
    for wanted in (need, 1.25 * need, 2 * need, 4 * need):
        ddr_gb = float(math.ceil(max(wanted, search.ddr_gb) / 16) * 16)
        if search.ddr_gb < ddr_gb <= MOST_DDR_GB and _fits(search.on(ddr_gb=ddr_gb)):
            yield f"sharding.cluster.ddr_gb: {ddr_gb:g}{kernel}"
            return


def _more_ranks(search: TorchrecPlanner, smallest: Mapping[str, ShardingOption]) -> Iterator[str]:
    """More GPUs on the host, then more hosts: from the number that could hold the bytes at all."""
    cluster = search.config.cluster
    usable = search.usable.hbm if search.device == "cuda" else search.usable.ddr
    need = math.ceil(sum(map(_total_bytes, smallest.values())) / usable)
    if search.device == "cuda" and cluster.num_nodes == 1:
        for processes in (2, 4, MOST_GPUS_PER_NODE):
            hopeless = processes <= search.processes or 2 * processes < need
            if not hopeless and _fits(search.on(processes=processes, processes_per_node=processes)):
                yield f"sharding.cluster.processes_per_node: {processes}"
                return
        search = search.on(processes=MOST_GPUS_PER_NODE, processes_per_node=MOST_GPUS_PER_NODE)
    nodes = max(cluster.num_nodes + 1, math.ceil(need / search.processes))
    for _ in range(_TRIES):
        if nodes * search.processes > MOST_RANKS:
            return
        if _fits(search.on(num_nodes=nodes)):
            yield f"sharding.cluster.num_nodes: {nodes} with processes_per_node {search.processes}"
            return
        nodes = math.ceil(1.3 * nodes)
