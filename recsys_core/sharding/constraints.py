"""Sharding constraints: validation of the configured constraints, and the layouts offered to TorchRec's planner."""

from torchrec.distributed.types import KeyValueParams

from recsys_core.errors import InputError
from recsys_core.models.spec import ModelSpec, TableSpec
from recsys_core.models.tables.table_config import GPU_ONLY_OPTIMIZERS, check_table_names
from recsys_core.sharding.config import ClusterConfig, ComputeKernel, ShardingConfig, ShardingType, TableConstraint

CACHE_LOAD_FACTOR = 0.2
"""Default share of the rows that fused_uvm_caching caches in GPU memory, the same as in TorchRec."""
KEY_VALUE_GPU_CACHE_MIB = 1024
"""Maximum size, in MiB per table and rank, of the GPU cache of the kernel key_value."""
MIN_COLUMN_SHARD_DIM = 128
"""Width of TorchRec's column shards; column_wise does not split a narrower table."""
OFFLOADING_KERNELS: tuple[ComputeKernel, ...] = ("fused_uvm", "fused_uvm_caching", "key_value")
"""Kernels that store rows outside of GPU memory."""
INT8_DIM_MULTIPLE = 32
INT8_POOLED_TYPES: tuple[ShardingType, ...] = ("table_wise", "column_wise", "table_column_wise", "data_parallel")
"""Sharding types that can send the rows of pooled tables in int8, because each row comes from one rank."""
SSD_OPTIMIZERS = ("rowwise_adagrad", "partial_rowwise_adam", "adam")
"""Optimizers that the kernel key_value supports."""
UNPOOLED_SHARDING_TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel")
"""Sharding types that TorchRec supports for unpooled lookups (EmbeddingCollection). All other types pool the rows."""
WITHIN_HOST_TYPES: tuple[ShardingType, ...] = ("table_row_wise", "table_column_wise", "grid_shard")
"""Sharding types that split a table, or each column shard of a table, over the ranks of one host."""
Rule = tuple[bool, str]
"""Whether the table violates the rule, and the message of the error."""


def check_constraints(config: ShardingConfig, *, model: ModelSpec, device: str) -> None:
    """Raise InputError for an unknown table, or a constraint that the table, its optimizer or the device does not support."""
    check_table_names("sharding.tables", config.tables, tables=model.tables)
    sends_int8 = config.quantized_comms.forward == "int8"
    for table_name, table in model.tables.items():
        constraint = config.tables.get(table_name, TableConstraint())
        rules = _int8_rules(table_name, table, constraint) if sends_int8 else []
        rules += _sharding_type_rules(table_name, table, constraint, device=device)
        rules += _kernel_rules(table_name, table, constraint, cluster=config.cluster, device=device)
        for is_violated, message in rules:
            if is_violated:
                raise InputError(message)


def _int8_rules(table_name: str, table: TableSpec, constraint: TableConstraint) -> list[Rule]:
    """Return the rules for embeddings that ranks send in int8."""
    may_be_row_wise = constraint.sharding_types is None or not set(constraint.sharding_types) <= set(INT8_POOLED_TYPES)
    return [
        (
            table.dim % INT8_DIM_MULTIPLE > 0,
            f"sharding.quantized_comms: int8 supports widths that are multiples of {INT8_DIM_MULTIPLE}, but table {table_name} "
            f"has {table.dim}; choose fp16 or bf16, or change tables.{table_name}.dim",
        ),
        (
            not table.is_unpooled and may_be_row_wise,
            "sharding.quantized_comms: int8 cannot represent the partial sums that ranks exchange with row-wise types, but "
            f"sharding.tables.{table_name}.sharding_types is {_format_types(constraint)}; choose from "
            f"{list(INT8_POOLED_TYPES)}, or set fp16 or bf16",
        ),
    ]


def _sharding_type_rules(table_name: str, table: TableSpec, constraint: TableConstraint, *, device: str) -> list[Rule]:
    """Return the rules for the sharding types and the optimizer of a table."""
    sharding_types, optimizer_kind = constraint.sharding_types or (), table.optimizer_kind
    unsupported_types = sorted(set(sharding_types) - set(UNPOOLED_SHARDING_TYPES))
    pooled_advice = ", or set tables.user.lookup to pooled" if table_name == "user" else ""
    replication_advice = f", or replicate it: sharding.tables.{table_name}.sharding_types: [data_parallel]"
    is_replicated_adam = optimizer_kind == "adam" and sharding_types == ("data_parallel",)
    return [
        (
            table.is_unpooled and bool(unsupported_types),
            f"sharding.tables.{table_name}: {', '.join(unsupported_types)} supports pooled lookups only, but the lookup of "
            f"this table is unpooled; choose from {list(UNPOOLED_SHARDING_TYPES)}{pooled_advice}",
        ),
        (
            optimizer_kind == "partial_rowwise_adam" and "data_parallel" in sharding_types,
            f"sharding.tables.{table_name}: data_parallel does not support optimizer partial_rowwise_adam, which has a fused "
            "kernel only; choose adam, or another sharding type",
        ),
        (
            device == "cpu" and optimizer_kind in GPU_ONLY_OPTIMIZERS and not is_replicated_adam,
            f"tables.{table_name}: optimizer {optimizer_kind} has no fused kernel on a CPU; set rowwise_adagrad, adagrad or "
            f"sgd{replication_advice if optimizer_kind == 'adam' else ''}",
        ),
    ]


def _kernel_rules(
    table_name: str, table: TableSpec, constraint: TableConstraint, *, cluster: ClusterConfig, device: str
) -> list[Rule]:
    """Return the rules for the compute kernels of a table."""
    kernels, sharding_types = constraint.compute_kernels or (), constraint.sharding_types or ()
    setting_name, may_be_replicated = f"sharding.tables.{table_name}.compute_kernels", "data_parallel" in sharding_types
    offloading_kernels = [kernel for kernel in kernels if kernel in OFFLOADING_KERNELS]
    return [
        (
            device == "cpu" and bool(offloading_kernels),
            f"{setting_name}: {', '.join(offloading_kernels)} stores rows outside of a GPU's memory, but the device is cpu, "
            "where all rows are in main memory; choose fused, or set sharding.cluster.device to cuda",
        ),
        (
            device == "cpu" and constraint.cache_load_factor is not None,
            f"sharding.tables.{table_name}.cache_load_factor is {constraint.cache_load_factor}, but the device is cpu, which "
            "has no cache; remove the setting, or set sharding.cluster.device to cuda",
        ),
        (
            "key_value" in kernels and (cluster.ssd_path is None or cluster.ssd_gb == 0),
            f"{setting_name}: key_value stores rows on an SSD, but sharding.cluster.ssd_path is {cluster.ssd_path} and ssd_gb "
            f"{cluster.ssd_gb:g}; set both, or remove key_value",
        ),
        (
            "key_value" in kernels and table.optimizer_kind not in SSD_OPTIMIZERS,
            f"{setting_name}: key_value supports the optimizers {list(SSD_OPTIMIZERS)}, but the table has "
            f"{table.optimizer_kind}; choose one of them, or another kernel",
        ),
        (
            may_be_replicated and bool(kernels) and "dense" not in kernels,
            f"{setting_name}: data_parallel supports only the kernel dense, but compute_kernels are {list(kernels)}; add "
            "dense, or remove data_parallel",
        ),
        (
            "dense" in kernels and (not may_be_replicated or (kernels == ("dense",) and sharding_types != ("data_parallel",))),
            f"{setting_name}: dense is the kernel of data_parallel only, but sharding_types are {_format_types(constraint)}; "
            "choose fused for the other types, or set sharding_types to [data_parallel]",
        ),
    ]


def _format_types(constraint: TableConstraint) -> str:
    return str(list(constraint.sharding_types)) if constraint.sharding_types else "left to the planner"


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
    """Return whether the table supports a sharding type, and the type gives a layout that no simpler type gives.

    Several layouts need several ranks, several hosts, or a table wider than MIN_COLUMN_SHARD_DIM.
    """
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


def ssd_parameters(ssd_path: str) -> KeyValueParams:
    """Return the parameters of key_value, a kernel that stores rows in RocksDB below `ssd_path` and caches rows on the GPU."""
    return KeyValueParams(ssd_storage_directory=ssd_path, max_l1_cache_size=KEY_VALUE_GPU_CACHE_MIB)
