"""Stage `plan_sharding`: a sharding plan for the configured cluster, computed offline by TorchRec's planner on meta tensors."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import psutil
import torch
from torchrec.distributed.planner.types import PlannerError, Shard, ShardingOption

from recsys_core.errors import InputError
from recsys_core.manifests import PlanManifest, StageFolder
from recsys_core.models.spec import ModelSpec
from recsys_core.preflight import cgroup_limits
from recsys_core.sharding.config import PLAN_NAME, ClusterConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.constraints import CACHE_LOAD_FACTOR, KEY_VALUE_GPU_CACHE_MIB, OFFLOADING_KERNELS, check_constraints
from recsys_core.sharding.infeasible import infeasible_error
from recsys_core.sharding.lookup_stats import LookupStats
from recsys_core.sharding.plan_file import (
    PlanFile,
    RankEstimate,
    ShardPlan,
    TableMemory,
    TablePlan,
    layout_fingerprint,
    to_html,
)
from recsys_core.sharding.torchrec_planner import TorchrecPlanner
from recsys_core.units import GIB

PAGE_NAME = "plan.html"
DEFAULT_HBM_GB, DEFAULT_DDR_GB = 80.0, 16.0
"""Default memory per GPU and per host of a cluster other than this machine."""
STATE_BYTES_PER_WEIGHT_BYTE = {"sgd": 0.0, "none": 0.0, "adagrad": 1.0, "adam": 2.0, "partial_rowwise_adam": 1.0}
"""TorchRec's estimate of the optimizer state. rowwise_adagrad is not listed, because its state is one number per row."""
FP32_BYTES = 4


def plan_sharding(
    config: ShardingConfig,
    *,
    model: ModelSpec,
    batch_size: int,
    folder: Path,
    lookup_stats: LookupStats | None = None,
) -> PlanManifest:
    """Write plan.json for the cluster of `config`, and plan.html, which explains the plan.

    See `make_plan` for the arguments.

    Raises:
        InputError: as in `make_plan`; or a constraint allows the kernel `key_value`, which training does not support.
    """
    for table_name, constraint in config.tables.items():
        if "key_value" in (constraint.compute_kernels or ()):
            raise InputError(
                f"sharding.tables.{table_name}.compute_kernels: key_value can be planned (`nightjar plan`), but training "
                "cannot fill and checkpoint tables on an SSD; choose fused_uvm_caching"
            )

    device, processes_per_node = resolve_cluster(config.cluster)
    cluster = with_default_memory(config.cluster)
    # The fingerprint contains only the kinds of the optimizers, because another learning rate does not change the plan.
    model_settings = model.model_dump(mode="json", exclude={"tables": {"__all__": {"optimizer"}}})
    optimizer_kinds = [table.optimizer_kind for table in model.tables.values()]
    stage = StageFolder(
        folder,
        PlanManifest,
        inputs=[
            "plan_sharding",
            config,
            cluster,
            model_settings,
            optimizer_kinds,
            batch_size,
            device,
            processes_per_node,
            lookup_stats,
        ],
    )
    if stage.manifest is not None:
        return stage.manifest
    with stage.writing() as output_folder:
        plan = make_plan(config, model=model, batch_size=batch_size, lookup_stats=lookup_stats)
        write_plan(plan, output_folder)
        return stage.commit(world_size=plan.world_size, device=plan.device)


def write_plan(plan: PlanFile, folder: Path) -> tuple[Path, Path]:
    """Write plan.json and plan.html into `folder`; return their paths."""
    plan_path, page_path = folder / PLAN_NAME, folder / PAGE_NAME
    plan_path.write_text(plan.model_dump_json(indent=2), encoding="utf-8")
    page_path.write_text(to_html(plan), encoding="utf-8")
    return plan_path, page_path


def resolve_cluster(cluster: ClusterConfig) -> tuple[Literal["cpu", "cuda"], int]:
    """Return (device, number of ranks per host). The values of this machine replace settings that are auto or None."""
    num_gpus = torch.cuda.device_count()
    device: Literal["cpu", "cuda"] = ("cuda" if num_gpus else "cpu") if cluster.device == "auto" else cluster.device
    return device, cluster.processes_per_node or (max(num_gpus, 1) if device == "cuda" else 2)


def with_default_memory(cluster: ClusterConfig) -> ClusterConfig:
    """Return `cluster` with default values for hbm_gb and ddr_gb if they are None.

    The defaults are the memory of this machine if the device is auto, otherwise DEFAULT_HBM_GB and DEFAULT_DDR_GB.
    """
    hbm_gb, ddr_gb = DEFAULT_HBM_GB, DEFAULT_DDR_GB
    if cluster.device == "auto":
        total_memory_bytes = psutil.virtual_memory().total
        ddr_gb = _whole_gb(min(cgroup_limits().memory_bytes or total_memory_bytes, total_memory_bytes))
        bytes_by_gpu = [
            torch.cuda.get_device_properties(gpu_index).total_memory for gpu_index in range(torch.cuda.device_count())
        ]
        hbm_gb = _whole_gb(min(bytes_by_gpu, default=DEFAULT_HBM_GB * GIB))
    return cluster.model_copy(update={"hbm_gb": cluster.hbm_gb or hbm_gb, "ddr_gb": cluster.ddr_gb or ddr_gb})


def _whole_gb(num_bytes: float) -> float:
    """Convert bytes to GB of 2^30 bytes.

    Values above 1 GB are rounded down, so that the plan stays the same if a kernel update changes the memory by some megabytes.
    """
    return float(num_bytes // GIB) or num_bytes / GIB


def make_plan(
    config: ShardingConfig,
    *,
    model: ModelSpec,
    batch_size: int,
    lookup_stats: LookupStats | None = None,
) -> PlanFile:
    """Return the plan with the shortest estimated step, without a process group, a GPU or memory for the tables.

    Args:
        batch_size: queries per rank and step.
        lookup_stats: measured lookups. If it is None, the estimates assume that every query has a full history, and that no two
            queries of a batch look up the same item.

    Raises:
        InputError: a table, its optimizer or the device does not support a constraint.
        InputError: no plan fits the cluster. The message names the table, the missing bytes, and changes that make a plan
            feasible.
    """
    device, processes_per_node = resolve_cluster(config.cluster)
    config = config.model_copy(update={"cluster": with_default_memory(config.cluster)})
    check_constraints(config, model=model, device=device)
    planner = TorchrecPlanner(
        config=config,
        model=model,
        batch_size=batch_size,
        device=device,
        processes_per_node=processes_per_node,
        lookup_stats=lookup_stats,
    )
    try:
        layout_by_table = planner.best_layouts()
    except PlannerError:
        raise infeasible_error(planner) from None
    plan_by_table = {
        table_name: _table_plan(planner, table_name, layout=layout) for table_name, layout in layout_by_table.items()
    }
    return PlanFile(
        device=device,
        num_nodes=config.cluster.num_nodes,
        processes_per_node=processes_per_node,
        batch_size=batch_size,
        fingerprint=layout_fingerprint(plan_by_table, device=device, world_size=planner.world_size),
        cluster=config.cluster,
        quantized_comms=config.quantized_comms,
        usable_hbm_bytes=planner.usable_memory.hbm,
        usable_ddr_bytes=planner.usable_memory.ddr,
        tables=plan_by_table,
        ranks=tuple(_rank_estimate(planner, layout_by_table, rank=rank) for rank in range(planner.world_size)),
    )


def _table_plan(planner: TorchrecPlanner, table_name: str, *, layout: ShardingOption) -> TablePlan:
    table, constraint = planner.model.tables[table_name], planner.config.tables.get(table_name)
    shards = tuple(
        ShardPlan(rank=shard.rank, offset=(shard.offset[0], shard.offset[1]), size=(shard.size[0], shard.size[1]))
        for shard in layout.shards
    )
    has_cache = layout.compute_kernel == "fused_uvm_caching"
    return TablePlan(
        rows=table.num_rows,
        dim=table.dim,
        optimizer=table.optimizer_kind,
        sharding_type=layout.sharding_type,
        compute_kernel=layout.compute_kernel,
        cache_load_factor=(layout.cache_load_factor or CACHE_LOAD_FACTOR) if has_cache else None,
        ssd_path=planner.config.cluster.ssd_path if layout.compute_kernel == "key_value" else None,
        ranks=tuple(shard.rank for shard in shards),
        shards=shards,
        values_per_query=planner.values_per_query(table_name),
        constraint=_format_constraint(constraint) if constraint is not None else None,
    )


def _rank_estimate(planner: TorchrecPlanner, layout_by_table: Mapping[str, ShardingOption], *, rank: int) -> RankEstimate:
    """Return the memory and time of a rank. layout_by_table: the layout of each table."""
    shards_by_table = {
        table_name: [shard for shard in layout.shards if shard.rank == rank] for table_name, layout in layout_by_table.items()
    }
    shards = [shard for table_shards in shards_by_table.values() for shard in table_shards]
    return RankEstimate(
        hbm_bytes=sum(shard.storage.hbm for shard in shards),
        ddr_bytes=sum(shard.storage.ddr for shard in shards),
        ssd_bytes=sum(shard.storage.ssd for shard in shards),
        step_ms=sum(shard.perf.total for shard in shards),
        forward_compute_ms=sum(shard.perf.fwd_compute for shard in shards),
        forward_comms_ms=sum(shard.perf.fwd_comms for shard in shards),
        backward_compute_ms=sum(shard.perf.bwd_compute for shard in shards),
        backward_comms_ms=sum(shard.perf.bwd_comms for shard in shards),
        prefetch_ms=sum(shard.perf.prefetch_compute for shard in shards),
        tables={
            table_name: _table_memory(planner, table_name, layout=layout_by_table[table_name], shards=table_shards)
            for table_name, table_shards in shards_by_table.items()
            if table_shards
        },
    )


def _table_memory(planner: TorchrecPlanner, table_name: str, *, layout: ShardingOption, shards: list[Shard]) -> TableMemory:
    """Split the estimated memory of a table's shards on one rank into weights, optimizer state, cache and buffers."""
    table, kernel = planner.model.tables[table_name], layout.compute_kernel
    state_bytes_per_weight_byte = (
        1 / table.dim if table.optimizer_kind == "rowwise_adagrad" else STATE_BYTES_PER_WEIGHT_BYTE[table.optimizer_kind]
    )
    cache_load_factor = layout.cache_load_factor or CACHE_LOAD_FACTOR
    total_weight_bytes = total_optimizer_bytes = total_cache_bytes = total_buffer_bytes = 0
    for shard in shards:
        num_rows, num_columns = shard.size
        weight_bytes, cache_bytes = num_rows * num_columns * FP32_BYTES, 0
        optimizer_bytes = math.ceil(weight_bytes * state_bytes_per_weight_byte)
        if kernel == "fused_uvm_caching":
            # The cache holds rows with their optimizer state. Its index needs 4 bytes per row and 16 bytes per cached row.
            index_bytes = num_rows * (4 + 16 * cache_load_factor)
            cache_bytes = math.ceil(cache_load_factor * weight_bytes * (1 + state_bytes_per_weight_byte) + index_bytes)
        elif kernel == "key_value":
            cache_bytes = min(
                KEY_VALUE_GPU_CACHE_MIB << 20, math.ceil(table.num_rows * CACHE_LOAD_FACTOR * table.dim * FP32_BYTES)
            )
        fast_memory_bytes: int = shard.storage.hbm if planner.device == "cuda" else shard.storage.ddr
        resident_bytes = 0 if kernel in OFFLOADING_KERNELS else weight_bytes + optimizer_bytes
        total_weight_bytes += weight_bytes
        total_optimizer_bytes += optimizer_bytes
        total_cache_bytes += cache_bytes
        total_buffer_bytes += max(0, fast_memory_bytes - resident_bytes - cache_bytes)
    return TableMemory(
        weights=total_weight_bytes, optimizer=total_optimizer_bytes, cache=total_cache_bytes, buffers=total_buffer_bytes
    )


def _format_constraint(constraint: TableConstraint) -> str | None:
    """Format a constraint without its unset settings; return None if every setting is unset."""
    value_by_setting = constraint.model_dump(mode="json", exclude_none=True)
    formatted_settings = [
        f"{setting}: {value if not isinstance(value, list) else ', '.join(value)}"
        for setting, value in value_by_setting.items()
    ]
    return "; ".join(formatted_settings) or None
