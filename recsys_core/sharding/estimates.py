"""Estimates in plan.json: memory and time of each rank."""

import math
from collections.abc import Mapping

from torchrec.distributed.planner.types import Shard, ShardingOption

from recsys_core.sharding.constraints import (
    CACHE_LOAD_FACTOR,
    OFFLOADING_KERNELS,
    SSD_CACHE_MB,
)
from recsys_core.sharding.plan_file import RankEstimate, TableMemory
from recsys_core.sharding.torchrec_planner import TorchrecPlanner

STATE_BYTES_PER_WEIGHT_BYTE = {"sgd": 0.0, "none": 0.0, "adagrad": 1.0, "adam": 2.0, "partial_rowwise_adam": 1.0}
"""TorchRec's estimate of the optimizer state, in bytes per byte of weights. rowwise_adagrad has one number per row instead."""
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
    state_per_weight = (
        1 / table.dim if table.optimizer_kind == "rowwise_adagrad" else STATE_BYTES_PER_WEIGHT_BYTE[table.optimizer_kind]
    )
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
