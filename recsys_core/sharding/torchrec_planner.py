"""TorchRec's planner on meta tensors, which needs no process group, no GPU and no memory for the tables."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    ParameterConstraints,
    ShardingOption,
    Stats,
    Storage,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import CacheParams, ModuleSharder
from torchrec.optim.optimizers import SGD, Adagrad, Adam, PartialRowWiseAdam
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys_core.models.spec import ModelSpec, module_name
from recsys_core.models.tables.embedding_tables import EmbeddingTables, parameter_name
from recsys_core.models.task import TABLES_PATH
from recsys_core.patches.lookups import ONE_TABLE_PER_KERNEL, BagSharder, UnpooledSharder
from recsys_core.sharding.config import ClusterConfig, QuantizedCommsConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.constraints import CACHE_LOAD_FACTOR, offered_kernels, offered_sharding_types, ssd_parameters
from recsys_core.sharding.lookup_stats import LookupStats
from recsys_core.units import GIB

RESERVED_SHARE = 0.15
"""Share of each rank's memory that is reserved for activations, dense layers and input batches."""
OPTIMIZER_CLASS_BY_KIND = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": Adagrad,
    "sgd": SGD,
    "none": SGD,  # has no state
    "adam": Adam,
    "partial_rowwise_adam": PartialRowWiseAdam,
}
"""Class from which TorchRec derives the optimizer state, by the kind of the optimizer. A frozen table has the kind none."""


@dataclass(frozen=True)
class TorchrecPlanner:
    """TorchRec's planner for one model on one cluster.

    Attributes:
        config: the cluster must have memory sizes, see `with_default_memory`.
        batch_size: queries per rank and step.
        device, processes_per_node: device of the ranks and number of ranks per host, see `resolve_cluster`.
        lookup_stats: measured lookups of the training data; None if the data is unknown.
    """

    config: ShardingConfig
    model: ModelSpec
    batch_size: int
    device: Literal["cpu", "cuda"]
    processes_per_node: int
    lookup_stats: LookupStats | None

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts."""
        return self.config.cluster.num_nodes * self.processes_per_node

    @property
    def hbm_gb(self) -> float:
        """Memory per GPU in GB."""
        assert self.config.cluster.hbm_gb is not None  # set by with_default_memory
        return self.config.cluster.hbm_gb

    @property
    def ddr_gb(self) -> float:
        """Main memory per host in GB."""
        assert self.config.cluster.ddr_gb is not None  # set by with_default_memory
        return self.config.cluster.ddr_gb

    @property
    def usable_memory(self) -> Storage:
        """Memory of one rank for tables and their buffers, in bytes."""
        cluster = self.config.cluster
        hbm_bytes = int(int(self.hbm_gb * GIB) * (1 - RESERVED_SHARE)) if self.device == "cuda" else 0
        return Storage(hbm=hbm_bytes, ddr=self._usable_ddr_bytes, ssd=int(cluster.ssd_gb * GIB / self.processes_per_node))

    @property
    def _usable_ddr_bytes(self) -> int:
        return int(self.ddr_gb * GIB * (1 - RESERVED_SHARE) / self.processes_per_node)

    def with_cluster(self, **settings: Any) -> "TorchrecPlanner":
        """Return the planner for a cluster with changed settings of ClusterConfig."""
        cluster = ClusterConfig(**(self.config.cluster.model_dump() | settings))
        processes_per_node = settings.get("processes_per_node", self.processes_per_node)
        config = self.config.model_copy(update={"cluster": cluster})
        return replace(self, config=config, processes_per_node=processes_per_node)

    def with_constraint(self, table_name: str, **settings: object) -> "TorchrecPlanner":
        """Return the planner for changed settings of a table's constraint."""
        constraint = self.config.tables[table_name].model_copy(update=settings)
        constraint_by_table = {**self.config.tables, table_name: constraint}
        return replace(self, config=self.config.model_copy(update={"tables": constraint_by_table}))

    def best_layouts(self) -> dict[str, ShardingOption]:
        """Return the layout of each table in the plan with the shortest estimated step. Raises PlannerError if no plan fits."""
        best_plan_recorder, constraints = _BestPlanRecorder(), self._constraint_by_module
        planner = EmbeddingShardingPlanner(
            topology=self._topology,
            batch_size=self.batch_size,
            enumerator=EmbeddingEnumerator(self._topology, batch_size=self.batch_size, constraints=constraints),
            constraints=constraints,
            stats=best_plan_recorder,
            debug=False,
            # TorchRec reserves this share of GPU memory only; `_usable_ddr_bytes` reserves the share of main memory.
            storage_reservation=FixedPercentageStorageReservation(percentage=RESERVED_SHARE),
        )
        with _silence_torchrec():
            planner.plan(self._meta_module, sharders(self.config.quantized_comms))
        layout_by_module = {layout.name: layout for layout in best_plan_recorder.layouts}
        return {table_name: layout_by_module[module_name(table_name)] for table_name in sorted(self.model.tables)}

    def layouts(self) -> dict[str, list[ShardingOption]]:
        """Return all layouts of each table with their estimates, including layouts that do not fit."""
        enumerator = EmbeddingEnumerator(self._topology, batch_size=self.batch_size, constraints=self._constraint_by_module)
        with _silence_torchrec():
            layouts = enumerator.enumerate(self._meta_module, sharders(self.config.quantized_comms))
        return {
            table_name: [layout for layout in layouts if layout.name == module_name(table_name)]
            for table_name in sorted(self.model.tables)
        }

    def values_per_query(self, table_name: str) -> float:
        """Return how many values a query looks up in a table: `pooling_factor` if it is set, otherwise the measured number.

        Without measured lookups, return the maximum.
        """
        pooling_factor = self.config.tables.get(table_name, TableConstraint()).pooling_factor
        if pooling_factor is not None:
            return pooling_factor
        if self.lookup_stats is not None:
            return self.lookup_stats.values_per_query[table_name]
        return 1.0 + self.model.history_length if self.model.tables[table_name].side == "item" else 1.0

    @property
    def _constraint_by_module(self) -> dict[str, ParameterConstraints]:
        """TorchRec's constraints by module name."""
        constraint_by_module, cluster = {}, self.config.cluster
        for table_name, table in self.model.tables.items():
            constraint = self.config.tables.get(table_name, TableConstraint())
            sharding_types = offered_sharding_types(table, constraint, num_nodes=cluster.num_nodes, world_size=self.world_size)
            is_gpu, load_factor = self.device == "cuda", constraint.cache_load_factor or CACHE_LOAD_FACTOR
            constraint_by_module[module_name(table_name)] = ParameterConstraints(
                sharding_types=list(sharding_types),
                compute_kernels=list(offered_kernels(constraint, device=self.device)),
                pooling_factors=[self.values_per_query(table_name)],
                cache_params=CacheParams(load_factor=load_factor, stats=self._cache_stats(table_name)) if is_gpu else None,
                key_value_params=ssd_parameters(cluster.ssd_path) if is_gpu and cluster.ssd_path is not None else None,
            )
        return constraint_by_module

    def _cache_stats(self, table_name: str) -> EmbeddingOffloadStats | None:
        """Return the statistics from which TorchRec estimates cache misses; None if the row frequencies are unknown.

        The statistics assume that the cache contains the most frequent rows.
        """
        if self.lookup_stats is None or table_name not in self.lookup_stats.hot_row_curve:
            return None
        num_rows = self.model.tables[table_name].num_rows
        num_lookups_per_step = self.values_per_query(table_name) * self.batch_size * self.world_size
        hit_rate_curve = torch.tensor((0.0, *self.lookup_stats.hot_row_curve[table_name]), dtype=torch.float64)
        return EmbeddingOffloadStats(
            cacheability=float(1 - hit_rate_curve.mean()),
            expected_lookups=round(min(float(num_rows), num_lookups_per_step)),
            mrc_hist_counts=hit_rate_curve.diff().clamp(min=0),
            height=num_rows,
        )

    @cached_property
    def _meta_module(self) -> nn.Module:
        embedding_tables = EmbeddingTables(self.model, device=torch.device("meta"))
        parameter_by_name = dict(embedding_tables.named_parameters())
        for table_name, table in self.model.tables.items():
            parameter = parameter_by_name[parameter_name(self.model, table_name)]
            parameter._optimizer_classes = [OPTIMIZER_CLASS_BY_KIND[table.optimizer_kind]]  # type: ignore[attr-defined]
        return nn.ModuleDict({TABLES_PATH: embedding_tables})

    @cached_property
    def _topology(self) -> Topology:
        cluster = self.config.cluster
        bytes_per_ms_per_gb_s = GIB / 1000
        with _silence_torchrec():
            return TopologyFactory.create_topology(
                trainer_config=TrainerConfig(
                    world_size=self.world_size,
                    local_world_size=self.processes_per_node,
                    hbm_cap_bytes=int(self.hbm_gb * GIB),
                    ddr_cap_bytes=self._usable_ddr_bytes,
                    ssd_cap_bytes=self.usable_memory.ssd,
                ),
                hardware_config=HardwareConfig(
                    intra_host_bw=cluster.intra_host_gb_s * bytes_per_ms_per_gb_s,
                    inter_host_bw=cluster.inter_host_gb_s * bytes_per_ms_per_gb_s,
                    hbm_mem_bw=cluster.hbm_bandwidth_gb_s * bytes_per_ms_per_gb_s,
                    ddr_mem_bw=cluster.ddr_bandwidth_gb_s * bytes_per_ms_per_gb_s,
                    hbm_to_ddr_mem_bw=cluster.pcie_gb_s * bytes_per_ms_per_gb_s,
                ),
                # Without this flag TorchRec ignores the configured bandwidths.
                kernel_config=KernelConfig(compute_device=self.device, use_hardware_based_bandwidth=True),
            )


class _BestPlanRecorder(Stats):  # type: ignore[misc]  # TorchRec has no types
    """A statistics hook of TorchRec's planner that stores the chosen layouts with their estimates."""

    def __init__(self) -> None:
        self.layouts: list[ShardingOption] = []

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.layouts = kwargs["best_plan"]


@contextmanager
def _silence_torchrec() -> Iterator[None]:
    """Silence TorchRec, which logs a warning for every layout that does not fit."""
    logger = logging.getLogger("torchrec")
    log_level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(log_level)


def sharders(quantized_comms: QuantizedCommsConfig) -> list[ModuleSharder[nn.Module]]:
    """Return the sharders of pooled and unpooled tables, with quantized communication if it is configured."""
    codec_registry = None
    if quantized_comms != QuantizedCommsConfig():
        codec_registry = get_qcomm_codecs_registry(
            QCommsConfig(
                forward_precision=CommType(quantized_comms.forward), backward_precision=CommType(quantized_comms.backward)
            )
        )
    return [
        BagSharder(qcomm_codecs_registry=codec_registry),
        UnpooledSharder(fused_params=dict(ONE_TABLE_PER_KERNEL), qcomm_codecs_registry=codec_registry),
    ]
