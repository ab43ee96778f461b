"""Sharding constraints: validation of the configured constraints, and the layouts offered to TorchRec's planner."""

from collections.abc import Mapping

import torch
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams, KeyValueParams

from recsys_core.errors import InputError
from recsys_core.models.spec import ModelSpec, TableSpec, module_name
from recsys_core.models.tables.table_config import GPU_ONLY_OPTIMIZERS, check_table_names
from recsys_core.sharding.config import ClusterConfig, ComputeKernel, ShardingConfig, ShardingType, TableConstraint
from recsys_core.sharding.lookup_stats import LookupStats

CACHE_LOAD_FACTOR = 0.2
"""TorchRec's default share of the rows that fused_uvm_caching caches in GPU memory."""
SSD_CACHE_MB = 1024
"""Maximum size, in MiB per table and rank, of the GPU cache of the kernel key_value."""
MIN_COLUMN_SHARD_DIM = 128
"""Width of TorchRec's column shards; column_wise does not split a narrower table."""
OFFLOADING_KERNELS: tuple[ComputeKernel, ...] = ("fused_uvm", "fused_uvm_caching", "key_value")
INT8_DIM_MULTIPLE = 32
INT8_POOLED_TYPES: tuple[ShardingType, ...] = ("table_wise", "column_wise", "table_column_wise", "data_parallel")
"""Sharding types that can send the rows of pooled tables in int8, because each row comes from one rank."""
SSD_OPTIMIZERS = ("rowwise_adagrad", "partial_rowwise_adam", "adam")
UNPOOLED_SHARDING_TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel")
"""Sharding types that TorchRec supports for unpooled lookups (EmbeddingCollection). All other types pool the rows."""
WITHIN_HOST_TYPES: tuple[ShardingType, ...] = ("table_row_wise", "table_column_wise", "grid_shard")


def check_constraints(config: ShardingConfig, *, model: ModelSpec, device: str) -> None:
    """Raise InputError for an unknown table, or a constraint that the table, its optimizer or the device does not support."""
    check_table_names("sharding.tables", config.tables, tables=model.tables)
    _check_quantized_comms(config, model)
    for table_name, table in model.tables.items():
        constraint = config.tables.get(table_name, TableConstraint())
        _check_sharding_types(table_name, table, constraint)
        _check_kernels(table_name, constraint, cluster=config.cluster, device=device, optimizer_kind=table.optimizer_kind)
        _check_optimizer(table_name, constraint, device=device, optimizer_kind=table.optimizer_kind)


def _check_quantized_comms(config: ShardingConfig, model: ModelSpec) -> None:
    """Raise InputError if embeddings are sent in int8, but the width or sharding type of a table does not support it."""
    if config.quantized_comms.forward != "int8":
        return
    for table_name, table in model.tables.items():
        if table.dim % INT8_DIM_MULTIPLE:
            raise InputError(
                f"sharding.quantized_comms: int8 supports widths that are multiples of {INT8_DIM_MULTIPLE}, but table "
                f"{table_name} has {table.dim}; choose fp16 or bf16, or change tables.{table_name}.dim"
            )
        sharding_types = config.tables.get(table_name, TableConstraint()).sharding_types
        if not table.is_unpooled and not set(sharding_types or WITHIN_HOST_TYPES) <= set(INT8_POOLED_TYPES):
            raise InputError(
                f"sharding.quantized_comms: int8 cannot represent the partial sums that ranks exchange with "
                f"row-wise types, but sharding.tables.{table_name}.sharding_types is "
                f"{list(sharding_types) if sharding_types else 'left to the planner'}; "
                f"choose from {list(INT8_POOLED_TYPES)}, or set fp16 or bf16"
            )


def _check_sharding_types(table_name: str, table: TableSpec, constraint: TableConstraint) -> None:
    unsupported_types = sorted(set(constraint.sharding_types or ()) - set(UNPOOLED_SHARDING_TYPES))
    if table.is_unpooled and unsupported_types:
        advice = ", or set tables.user.lookup to pooled" if table_name == "user" else ""
        raise InputError(
            f"sharding.tables.{table_name}: {unsupported_types[0]} supports pooled lookups only, but the lookup of this table "
            f"is unpooled; choose from {list(UNPOOLED_SHARDING_TYPES)}{advice}"
        )


def _check_kernels(
    table_name: str, constraint: TableConstraint, *, cluster: ClusterConfig, device: str, optimizer_kind: str
) -> None:
    kernels, setting_name = constraint.compute_kernels or (), f"sharding.tables.{table_name}.compute_kernels"
    offloading_kernels = [kernel for kernel in kernels if kernel in OFFLOADING_KERNELS]
    if device == "cpu" and offloading_kernels:
        raise InputError(
            f"{setting_name}: {offloading_kernels[0]} stores rows outside of a GPU's memory, but the device is cpu, where all "
            "rows are in main memory; choose fused, or set sharding.cluster.device to cuda"
        )
    if device == "cpu" and constraint.cache_load_factor is not None:
        raise InputError(
            f"sharding.tables.{table_name}.cache_load_factor is {constraint.cache_load_factor:g}, but the device is cpu, which "
            "has no cache; remove it, or set sharding.cluster.device to cuda"
        )
    if "key_value" in kernels and (cluster.ssd_path is None or cluster.ssd_gb == 0):
        raise InputError(
            f"{setting_name}: key_value stores rows on an SSD, but sharding.cluster.ssd_path is {cluster.ssd_path} and ssd_gb "
            f"{cluster.ssd_gb:g}; set both, or remove key_value"
        )
    if "key_value" in kernels and optimizer_kind not in SSD_OPTIMIZERS:
        raise InputError(
            f"{setting_name}: key_value supports the optimizers {list(SSD_OPTIMIZERS)}, but the table has {optimizer_kind}; "
            "choose one of them, or another kernel"
        )
    allows_data_parallel = "data_parallel" in (constraint.sharding_types or ())
    if "dense" in kernels and not allows_data_parallel:
        raise InputError(
            f"{setting_name}: dense is the kernel of data_parallel only, but sharding_types are "
            f"{list(constraint.sharding_types) if constraint.sharding_types else 'left to the planner'}; "
            "add data_parallel, or choose fused"
        )
    if allows_data_parallel and kernels and "dense" not in kernels:
        raise InputError(
            f"{setting_name}: data_parallel supports only the kernel dense, but compute_kernels are {list(kernels)}; add "
            "dense, or remove data_parallel"
        )
    if kernels == ("dense",) and constraint.sharding_types != ("data_parallel",):
        raise InputError(
            f"{setting_name}: dense is the kernel of data_parallel only, but sharding_types are "
            f"{list(constraint.sharding_types or ())}; add fused, or remove the other types"
        )


def _check_optimizer(table_name: str, constraint: TableConstraint, *, device: str, optimizer_kind: str) -> None:
    sharding_types = constraint.sharding_types
    if optimizer_kind == "partial_rowwise_adam" and sharding_types is not None and "data_parallel" in sharding_types:
        raise InputError(
            f"sharding.tables.{table_name}: data_parallel does not support optimizer partial_rowwise_adam, which has a fused "
            "kernel only; choose adam, or another sharding type"
        )
    is_replicated_adam = optimizer_kind == "adam" and sharding_types == ("data_parallel",)
    if device == "cpu" and optimizer_kind in GPU_ONLY_OPTIMIZERS and not is_replicated_adam:
        advice = (
            f", or replicate it: sharding.tables.{table_name}.sharding_types: [data_parallel]"
            if optimizer_kind == "adam"
            else ""
        )
        raise InputError(
            f"tables.{table_name}: optimizer {optimizer_kind} has no fused kernel on a CPU; set rowwise_adagrad, adagrad or "
            f"sgd{advice}"
        )


def offered_sharding_types(
    table: TableSpec, constraint: TableConstraint, *, num_nodes: int, world_size: int
) -> tuple[ShardingType, ...]:
    """Return the configured sharding types of a table, or the default types if none are configured.

    data_parallel is never a default type: every rank would store a copy and exchange gradients as large as the table.
    """
    return constraint.sharding_types or tuple(
        sharding_type
        for sharding_type in ("table_wise", "row_wise", "column_wise", *WITHIN_HOST_TYPES)
        if _is_default_type(sharding_type, table, num_nodes=num_nodes, world_size=world_size)
    )


def _is_default_type(sharding_type: ShardingType, table: TableSpec, *, num_nodes: int, world_size: int) -> bool:
    """Return whether the table supports a sharding type, and the type differs from the simpler types on this cluster."""
    if table.is_unpooled and sharding_type not in UNPOOLED_SHARDING_TYPES:
        return False
    if sharding_type == "table_wise":
        return True
    splits_columns = sharding_type in ("column_wise", "table_column_wise", "grid_shard")
    return (
        world_size > 1
        and (num_nodes > 1 or sharding_type not in WITHIN_HOST_TYPES)
        and (table.dim > MIN_COLUMN_SHARD_DIM or not splits_columns)
    )


def offered_kernels(constraint: TableConstraint, *, device: str) -> tuple[ComputeKernel, ...]:
    """Return the configured kernels of a table, or the default kernels if none are configured.

    The planner estimates longer times for offloading kernels, so it chooses them only if GPU memory is too small.
    """
    if constraint.compute_kernels is not None:
        return constraint.compute_kernels
    return ("fused", "dense") if device == "cpu" else ("fused", "fused_uvm_caching", "fused_uvm", "dense")


def num_values_per_query(
    table_name: str, *, model: ModelSpec, constraint: TableConstraint, lookup_stats: LookupStats | None
) -> float:
    """Return the number of values that a query looks up in a table: pooling_factor, the measured number, or the maximum."""
    if constraint.pooling_factor is not None:
        return constraint.pooling_factor
    if lookup_stats is not None:
        return lookup_stats.values_per_query[table_name]
    return 1.0 + model.history_length if model.tables[table_name].side == "item" else 1.0


def parameter_constraints(
    config: ShardingConfig,
    *,
    model: ModelSpec,
    device: str,
    world_size: int,
    batch_size: int,
    lookup_stats: LookupStats | None,
    sharding_types_by_table: Mapping[str, tuple[ShardingType, ...]] | None = None,
    kernels_by_table: Mapping[str, tuple[ComputeKernel, ...]] | None = None,
) -> dict[str, ParameterConstraints]:
    """Return TorchRec's constraints by module name.

    sharding_types_by_table, kernels_by_table: replace the configured or default sharding types and kernels.
    """
    constraints_by_module = {}
    for table_name, table in model.tables.items():
        constraint = config.tables.get(table_name, TableConstraint())
        offered_types = offered_sharding_types(table, constraint, num_nodes=config.cluster.num_nodes, world_size=world_size)
        values_per_query = num_values_per_query(table_name, model=model, constraint=constraint, lookup_stats=lookup_stats)
        cache_params, ssd_params = None, None
        if device == "cuda":
            cache_load_factor = constraint.cache_load_factor or CACHE_LOAD_FACTOR
            num_lookups_per_step = min(float(table.num_rows), values_per_query * batch_size * world_size)
            cache_params = CacheParams(
                load_factor=cache_load_factor,
                stats=_cache_stats(
                    table_name, table=table, num_lookups_per_step=num_lookups_per_step, lookup_stats=lookup_stats
                ),
            )
            if config.cluster.ssd_path is not None:
                ssd_params = ssd_parameters(config.cluster.ssd_path)
        constraints_by_module[module_name(table_name)] = ParameterConstraints(
            sharding_types=list((sharding_types_by_table or {}).get(table_name, offered_types)),
            compute_kernels=list((kernels_by_table or {}).get(table_name, offered_kernels(constraint, device=device))),
            pooling_factors=[values_per_query],
            cache_params=cache_params,
            key_value_params=ssd_params,
        )
    return constraints_by_module


def ssd_parameters(ssd_path: str) -> KeyValueParams:
    """Return parameters of the kernel key_value. It stores rows in RocksDB below `ssd_path`, and caches rows in GPU memory."""
    return KeyValueParams(ssd_storage_directory=ssd_path, max_l1_cache_size=SSD_CACHE_MB)


def _cache_stats(
    table_name: str, *, table: TableSpec, num_lookups_per_step: float, lookup_stats: LookupStats | None
) -> EmbeddingOffloadStats | None:
    """Return the statistics from which TorchRec estimates cache misses; None if the row frequencies are unknown.

    The statistics assume that the cache contains the most frequent rows.
    """
    if lookup_stats is None or table_name not in lookup_stats.hot_row_curve:
        return None
    hit_rate_curve = torch.tensor((0.0, *lookup_stats.hot_row_curve[table_name]), dtype=torch.float64)
    return EmbeddingOffloadStats(
        cacheability=float(1 - hit_rate_curve.mean()),
        expected_lookups=round(num_lookups_per_step),
        mrc_hist_counts=hit_rate_curve.diff().clamp(min=0),
        height=table.num_rows,
    )
