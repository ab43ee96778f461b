"""What the planner may choose for each table, and which wishes cannot be met: said before anything is launched."""

from collections.abc import Mapping

import torch
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams, KeyValueParams

from recsys_core.errors import InputError
from recsys_core.models.optimizer_config import GPU_ONLY, TableOptimizer
from recsys_core.models.spec import ModelSpec, TableSpec, module_name
from recsys_core.sharding.config import ClusterConfig, ComputeKernel, ShardingConfig, ShardingKind, TableConstraint
from recsys_core.sharding.lookup_stats import LookupStats
from recsys_core.sharding.sharders import UNPOOLED_SHARDING_TYPES

CACHE_LOAD_FACTOR = 0.2
"""Share of the rows that fused_uvm_caching keeps in GPU memory where the user says nothing: TorchRec's own."""
SSD_CACHE_MB = 1024
"""GPU memory per table and rank that key_value takes for its cache at most."""
WHOLE_COLUMNS = 128
"""TorchRec cuts columns into pieces of this width: a narrower table stays whole under column_wise."""
BESIDE_GPU: tuple[ComputeKernel, ...] = ("fused_uvm", "fused_uvm_caching", "key_value")
INT8_WIDTH = 32
INT8_KINDS: tuple[ShardingKind, ...] = ("table_wise", "column_wise", "table_column_wise", "data_parallel")
"""Of pooled tables."""
SSD_OPTIMIZERS = ("rowwise_adagrad", "partial_rowwise_adam", "adam")
WITHIN_HOST: tuple[ShardingKind, ...] = ("table_row_wise", "table_column_wise", "grid_shard")


def optimizer_kind(table: TableSpec, *, default: TableOptimizer) -> str:
    """The optimizer of `table`; none for a frozen one."""
    return "none" if table.frozen else (table.settings.optimizer or default).kind


def check_constraints(config: ShardingConfig, *, model: ModelSpec, device: str, default: TableOptimizer) -> None:
    """InputError for a wish that names no table, or that the table, its optimizer or the device cannot have.

    default: the optimizer of tables that have none of their own.
    """
    for name in config.tables:
        if name not in model.tables:
            raise InputError(f"sharding.tables.{name}: no such table; the model has {sorted(model.tables)}")
    _check_quantized_comms(config, model)
    for name, table in model.tables.items():
        wish = config.tables.get(name, TableConstraint())
        optimizer = optimizer_kind(table, default=default)
        _check_kinds(name, table, wish)
        _check_kernels(name, wish, cluster=config.cluster, device=device, optimizer=optimizer)
        _check_optimizer(name, wish, device=device, optimizer=optimizer)


def _check_quantized_comms(config: ShardingConfig, model: ModelSpec) -> None:
    """What TorchRec cannot send in int8: rows of other widths, and sums that ranks add up on the way."""
    if config.quantized_comms.forward != "int8":
        return
    for name, table in model.tables.items():
        if table.dim % INT8_WIDTH:
            raise InputError(
                f"sharding.quantized_comms: int8 takes widths that are multiples of {INT8_WIDTH}, but table {name} has "
                f"{table.dim}; choose fp16 or bf16, or change tables.{name}.dim"
            )
        kinds = config.tables.get(name, TableConstraint()).sharding_types
        if not table.unpooled and not set(kinds or WITHIN_HOST) <= set(INT8_KINDS):
            raise InputError(
                f"sharding.quantized_comms: int8 cannot carry the sums that row-wise kinds add up between ranks, but "
                f"sharding.tables.{name}.sharding_types is {list(kinds) if kinds else 'left to the planner'}; choose among "
                f"{list(INT8_KINDS)}, or fp16 or bf16"
            )


def _check_kinds(name: str, table: TableSpec, wish: TableConstraint) -> None:
    impossible = sorted(set(wish.sharding_types or ()) - set(UNPOOLED_SHARDING_TYPES))
    if table.unpooled and impossible:
        way = ", or set tables.user.lookup to pooled" if name == "user" else ""
        raise InputError(
            f"sharding.tables.{name}: {impossible[0]} adds up pooled rows, but the table is looked up row by row; "
            f"choose among {list(UNPOOLED_SHARDING_TYPES)}{way}"
        )


def _check_kernels(name: str, wish: TableConstraint, *, cluster: ClusterConfig, device: str, optimizer: str) -> None:
    kernels, setting = wish.compute_kernels or (), f"sharding.tables.{name}.compute_kernels"
    beside = [kernel for kernel in kernels if kernel in BESIDE_GPU]
    if device == "cpu" and beside:
        raise InputError(
            f"{setting}: {beside[0]} keeps rows outside of a GPU's memory, but the device is cpu, where all rows are in main "
            "memory; choose fused, or set sharding.cluster.device to cuda"
        )
    if device == "cpu" and wish.cache_load_factor is not None:
        raise InputError(
            f"sharding.tables.{name}.cache_load_factor is {wish.cache_load_factor:g}, but the device is cpu, which has none; "
            "leave it out, or set sharding.cluster.device to cuda"
        )
    if "key_value" in kernels and (cluster.ssd_path is None or cluster.ssd_gb == 0):
        raise InputError(
            f"{setting}: key_value keeps rows on an SSD, but sharding.cluster.ssd_path is {cluster.ssd_path} and ssd_gb "
            f"{cluster.ssd_gb:g}; set both, or leave key_value out"
        )
    if "key_value" in kernels and optimizer not in SSD_OPTIMIZERS:
        raise InputError(
            f"{setting}: key_value has the optimizers {list(SSD_OPTIMIZERS)}, but the table's is {optimizer}; choose one of "
            "them, or another kernel"
        )
    replicated = "data_parallel" in (wish.sharding_types or ())
    if "dense" in kernels and not replicated:
        raise InputError(
            f"{setting}: dense is the kernel of data_parallel alone, but sharding_types are "
            f"{list(wish.sharding_types) if wish.sharding_types else 'left to the planner'}; add data_parallel, or choose fused"
        )
    if replicated and kernels and "dense" not in kernels:
        raise InputError(
            f"{setting}: data_parallel has the kernel dense alone, but compute_kernels are {list(kernels)}; add dense, or "
            "leave data_parallel out"
        )
    if kernels == ("dense",) and wish.sharding_types != ("data_parallel",):
        raise InputError(
            f"{setting}: dense is the kernel of data_parallel alone, but sharding_types are {list(wish.sharding_types or ())}; "
            "add fused, or leave the other types out"
        )


def _check_optimizer(name: str, wish: TableConstraint, *, device: str, optimizer: str) -> None:
    kinds = wish.sharding_types
    if optimizer == "partial_rowwise_adam" and kinds is not None and "data_parallel" in kinds:
        raise InputError(
            f"sharding.tables.{name}: data_parallel, but optimizer partial_rowwise_adam exists as a fused kernel alone; "
            "choose adam, or another sharding type"
        )
    replicated = optimizer == "adam" and kinds == ("data_parallel",)
    if device == "cpu" and optimizer in GPU_ONLY and not replicated:
        way = f", or replicate it: sharding.tables.{name}.sharding_types: [data_parallel]" if optimizer == "adam" else ""
        raise InputError(
            f"tables.{name}: optimizer {optimizer} has no fused kernel on a CPU; set rowwise_adagrad, adagrad or sgd{way}"
        )


def offered_kinds(table: TableSpec, wish: TableConstraint, *, num_nodes: int, world_size: int) -> tuple[ShardingKind, ...]:
    """Sharding types the planner chooses from: the user's, else all that differ from each other here.

    data_parallel keeps a replica and dense gradients per rank, so it is chosen only where the user asks for it.
    """
    return wish.sharding_types or tuple(
        kind
        for kind in ("table_wise", "row_wise", "column_wise", *WITHIN_HOST)
        if why_not_offered(kind, table, num_nodes=num_nodes, world_size=world_size) is None
    )


def why_not_offered(kind: ShardingKind, table: TableSpec, *, num_nodes: int, world_size: int) -> str | None:
    """Why the planner leaves a type out unless the user asks for it; None where it does not."""
    if kind == "data_parallel":
        return "only where asked for: every rank would hold a copy and exchange gradients as large as the table"
    if table.unpooled and kind not in UNPOOLED_SHARDING_TYPES:
        return "cannot be: it adds up pooled rows, and the table is looked up row by row"
    if kind != "table_wise" and world_size == 1:
        return "with one rank the same as table_wise"
    if kind in WITHIN_HOST and num_nodes == 1:
        return f"on one host the same as {'column_wise' if kind == 'table_column_wise' else 'row_wise'}"
    if kind in ("column_wise", "table_column_wise") and table.dim <= WHOLE_COLUMNS:
        return f"columns are cut into pieces of {WHOLE_COLUMNS}, and the table has {table.dim}: the same as table_wise"
    if kind == "grid_shard" and table.dim <= WHOLE_COLUMNS:
        return f"columns are cut into pieces of {WHOLE_COLUMNS}, and the table has {table.dim}: the same as table_row_wise"
    return None


def offered_kernels(wish: TableConstraint, *, device: str) -> tuple[ComputeKernel, ...]:
    """Kernels the planner chooses from. TorchRec takes those beside a GPU to be slower: they stand in where HBM is short."""
    if wish.compute_kernels is not None:
        return wish.compute_kernels
    return ("fused", "dense") if device == "cpu" else ("fused", "fused_uvm_caching", "fused_uvm", "dense")


def lookups_of(name: str, *, model: ModelSpec, wish: TableConstraint, lookup_stats: LookupStats | None) -> float:
    """Values per query that `name` is asked for: the user's word, what was measured, or else the most there can be."""
    if wish.pooling_factor is not None:
        return wish.pooling_factor
    if lookup_stats is not None:
        return lookup_stats.values_per_query[name]
    return 1.0 + model.config.history.length if model.tables[name].side == "item" else 1.0


def parameter_constraints(
    config: ShardingConfig,
    *,
    model: ModelSpec,
    device: str,
    world_size: int,
    batch_size: int,
    lookup_stats: LookupStats | None,
    kinds: Mapping[str, tuple[ShardingKind, ...]] | None = None,
    kernels: Mapping[str, tuple[ComputeKernel, ...]] | None = None,
) -> dict[str, ParameterConstraints]:
    """TorchRec's constraints by module name. kinds, kernels: by table, in place of what is offered."""
    made = {}
    for name, table in model.tables.items():
        wish = config.tables.get(name, TableConstraint())
        offered = offered_kinds(table, wish, num_nodes=config.cluster.num_nodes, world_size=world_size)
        values = lookups_of(name, model=model, wish=wish, lookup_stats=lookup_stats)
        cache, ssd = None, None
        if device == "cuda":
            share = wish.cache_load_factor or CACHE_LOAD_FACTOR
            lookups = min(float(table.num_rows), values * batch_size * world_size)
            cache = CacheParams(
                load_factor=share, stats=_cache_stats(name, table=table, lookups=lookups, lookup_stats=lookup_stats)
            )
            if config.cluster.ssd_path is not None:
                ssd = ssd_parameters(config.cluster.ssd_path)
        made[module_name(name)] = ParameterConstraints(
            sharding_types=list((kinds or {}).get(name, offered)),
            compute_kernels=list((kernels or {}).get(name, offered_kernels(wish, device=device))),
            pooling_factors=[values],
            cache_params=cache,
            key_value_params=ssd,
        )
    return made


def ssd_parameters(path: str) -> KeyValueParams:
    """Of key_value: rows in RocksDB below `path`, behind a cache in GPU memory."""
    return KeyValueParams(ssd_storage_directory=path, max_l1_cache_size=SSD_CACHE_MB)


def _cache_stats(
    name: str, *, table: TableSpec, lookups: float, lookup_stats: LookupStats | None
) -> EmbeddingOffloadStats | None:
    """What TorchRec estimates the misses of a cache by: those of one that holds the hottest rows."""
    if lookup_stats is None or name not in lookup_stats.hot_row_curve:
        return None
    shares = torch.tensor((0.0, *lookup_stats.hot_row_curve[name]), dtype=torch.float64)
    return EmbeddingOffloadStats(
        cacheability=float(1 - shares.mean()),
        expected_lookups=round(lookups),
        mrc_hist_counts=shares.diff().clamp(min=0),
        height=table.num_rows,
    )
