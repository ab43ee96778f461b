"""TorchRec's planner on meta tensors: no process group, no GPU and no memory for the tables."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
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
from torchrec.distributed.types import ModuleSharder
from torchrec.optim.optimizers import SGD, Adagrad, Adam, PartialRowWiseAdam
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys_core.models.spec import ModelSpec, module_name
from recsys_core.models.tables.embedding_tables import EmbeddingTables, parameter_name
from recsys_core.models.task import TABLES_PATH
from recsys_core.patches.lookups import ONE_TABLE_PER_KERNEL, BagSharder, RowSharder
from recsys_core.sharding.config import ClusterConfig, ComputeKernel, QuantizedCommsConfig, ShardingConfig, ShardingType
from recsys_core.sharding.constraints import parameter_constraints
from recsys_core.sharding.lookup_stats import LookupStats
from recsys_core.units import GIB

RESERVED_SHARE = 0.15
"""Share of each rank's memory that is reserved for activations, dense layers and input batches."""
OPTIMIZER_CLASSES = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": Adagrad,
    "sgd": SGD,
    "none": SGD,  # has no state
    "adam": Adam,
    "partial_rowwise_adam": PartialRowWiseAdam,
}
"""Optimizer kind -> class from which TorchRec derives the size of the optimizer state."""
ShardingTypesByTable = Mapping[str, tuple[ShardingType, ...]]
KernelsByTable = Mapping[str, tuple[ComputeKernel, ...]]


@dataclass(frozen=True)
class TorchrecPlanner:
    """TorchRec's planner for one model on one cluster.

    Attributes:
        config: the cluster must have memory sizes, see `with_default_memory`.
        batch_size: queries per rank and step.
        device, processes_per_node: the values of `resolve_cluster`.
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
        assert self.config.cluster.hbm_gb is not None  # with_default_memory
        return self.config.cluster.hbm_gb

    @property
    def ddr_gb(self) -> float:
        """Main memory per host in GB."""
        assert self.config.cluster.ddr_gb is not None  # with_default_memory
        return self.config.cluster.ddr_gb

    @property
    def usable_memory(self) -> Storage:
        """Memory of one rank for tables and their buffers, in bytes."""
        cluster = self.config.cluster
        hbm = int(int(self.hbm_gb * GIB) * (1 - RESERVED_SHARE)) if self.device == "cuda" else 0
        return Storage(hbm=hbm, ddr=self._usable_ddr_bytes, ssd=int(cluster.ssd_gb * GIB / self.processes_per_node))

    @property
    def _usable_ddr_bytes(self) -> int:
        return int(self.ddr_gb * GIB * (1 - RESERVED_SHARE) / self.processes_per_node)

    def with_cluster(self, **settings: Any) -> "TorchrecPlanner":
        """Return the planner for a cluster with changed settings of ClusterConfig."""
        cluster = ClusterConfig(**(self.config.cluster.model_dump() | settings))
        processes_per_node = settings.get("processes_per_node", self.processes_per_node)
        config = self.config.model_copy(update={"cluster": cluster})
        return replace(self, config=config, processes_per_node=processes_per_node)

    def best_options(
        self, *, sharding_types_by_table: ShardingTypesByTable | None = None, kernels_by_table: KernelsByTable | None = None
    ) -> dict[str, ShardingOption]:
        """Return the layout of each table in the plan with the shortest estimated step. Raises PlannerError if no plan fits.

        sharding_types_by_table, kernels_by_table: replace the configured or default sharding types and kernels.
        """
        best_plan = _BestPlanRecorder()
        constraints = self._constraints(sharding_types_by_table, kernels_by_table)
        planner = EmbeddingShardingPlanner(
            topology=self._topology,
            batch_size=self.batch_size,
            enumerator=EmbeddingEnumerator(self._topology, batch_size=self.batch_size, constraints=constraints),
            constraints=constraints,
            stats=best_plan,
            debug=False,
            # TorchRec reserves this share of GPU memory only; `_usable_ddr_bytes` reserves the share of main memory.
            storage_reservation=FixedPercentageStorageReservation(percentage=RESERVED_SHARE),
        )
        with _silence_torchrec():
            planner.plan(self._module, sharders(self.config.quantized_comms))
        return self._by_table(best_plan.options)

    def options(
        self, *, sharding_types_by_table: ShardingTypesByTable | None = None, kernels_by_table: KernelsByTable | None = None
    ) -> dict[str, list[ShardingOption]]:
        """Return all layouts of each table with their estimates, including layouts that do not fit."""
        enumerator = EmbeddingEnumerator(
            self._topology, batch_size=self.batch_size, constraints=self._constraints(sharding_types_by_table, kernels_by_table)
        )
        with _silence_torchrec():
            options = enumerator.enumerate(self._module, sharders(self.config.quantized_comms))
        return {
            table_name: [option for option in options if option.name == module_name(table_name)]
            for table_name in sorted(self.model.tables)
        }

    def _constraints(
        self, sharding_types_by_table: ShardingTypesByTable | None, kernels_by_table: KernelsByTable | None
    ) -> dict[str, ParameterConstraints]:
        return parameter_constraints(
            self.config,
            model=self.model,
            device=self.device,
            world_size=self.world_size,
            batch_size=self.batch_size,
            lookup_stats=self.lookup_stats,
            sharding_types_by_table=sharding_types_by_table,
            kernels_by_table=kernels_by_table,
        )

    def _by_table(self, chosen_options: list[ShardingOption]) -> dict[str, ShardingOption]:
        option_by_module = {option.name: option for option in chosen_options}
        return {table_name: option_by_module[module_name(table_name)] for table_name in sorted(self.model.tables)}

    @cached_property
    def _module(self) -> nn.Module:
        embedding_tables = EmbeddingTables(self.model, device=torch.device("meta"))
        parameters = dict(embedding_tables.named_parameters())
        for table_name, table in self.model.tables.items():
            parameter = parameters[parameter_name(self.model, table_name)]
            parameter._optimizer_classes = [OPTIMIZER_CLASSES[table.optimizer_kind]]  # type: ignore[attr-defined]
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
    """A statistics hook of TorchRec's planner that stores the chosen options with their estimates."""

    def __init__(self) -> None:
        self.options: list[ShardingOption] = []

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.options = kwargs["best_plan"]


@contextmanager
def _silence_torchrec() -> Iterator[None]:
    """Silence TorchRec, which logs a warning for every layout that does not fit."""
    logger = logging.getLogger("torchrec")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def sharders(quantized_comms: QuantizedCommsConfig) -> list[ModuleSharder[nn.Module]]:
    """Return the sharders of pooled and unpooled tables, with quantized communication if it is configured."""
    codecs = None
    if quantized_comms != QuantizedCommsConfig():
        codecs = get_qcomm_codecs_registry(
            QCommsConfig(
                forward_precision=CommType(quantized_comms.forward), backward_precision=CommType(quantized_comms.backward)
            )
        )
    return [
        BagSharder(qcomm_codecs_registry=codecs),
        RowSharder(fused_params=dict(ONE_TABLE_PER_KERNEL), qcomm_codecs_registry=codecs),
    ]
