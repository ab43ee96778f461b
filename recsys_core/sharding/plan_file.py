"""The sharding plan as a file (plan.json), as a page (plan.html) and as a plan of TorchRec."""

import hashlib
import json
from pathlib import Path
from typing import Literal

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.planner.utils import placement
from torchrec.distributed.types import CacheParams, EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from recsys_core.config import Frozen
from recsys_core.errors import InputError
from recsys_core.models.spec import ModelSpec, module_name
from recsys_core.plots import render_page
from recsys_core.sharding.config import ClusterConfig, ComputeKernel, QuantizedCommsConfig, ShardingType
from recsys_core.sharding.constraints import OFFLOADING_KERNELS, ssd_parameters
from recsys_core.units import MIB, format_bytes, format_milliseconds

_PAGE_TEMPLATE_PATH = Path(__file__).with_name("plan.html")
TIME_FIELDS = (
    ("forward_compute_ms", "forward compute"),
    ("forward_comms_ms", "forward comms"),
    ("backward_compute_ms", "backward compute"),
    ("backward_comms_ms", "backward comms"),
    ("prefetch_ms", "prefetch"),
)
"""Fields of RankEstimate that are times, with their names on the page."""
RankMeasure = Literal["hbm_bytes", "ddr_bytes", "step_ms"]


class ShardPlan(Frozen):
    """The part of a table on one rank. offset: first row and first column. size: number of rows and number of columns."""

    rank: int
    offset: tuple[int, int]
    size: tuple[int, int]


class TablePlan(Frozen):
    """The layout of one table.

    Attributes:
        values_per_query: the lookups that the estimates assume, see LookupStats.
        constraint: text of the configured constraint; None if there is no constraint.
    """

    rows: int
    dim: int
    optimizer: str
    sharding_type: ShardingType
    compute_kernel: ComputeKernel
    cache_load_factor: float | None = None
    ssd_path: str | None = None
    ranks: tuple[int, ...]
    shards: tuple[ShardPlan, ...]
    values_per_query: float
    constraint: str | None = None


class TableMemory(Frozen):
    """Bytes of a table on one rank.

    Offloading kernels store the weights and the optimizer state in main memory or on the SSD.
    """

    weights: int
    optimizer: int
    cache: int
    buffers: int


class RankEstimate(Frozen):
    """Estimates for one rank: memory, and the milliseconds that its lookups take per step."""

    hbm_bytes: int
    ddr_bytes: int
    ssd_bytes: int
    step_ms: float
    forward_compute_ms: float
    forward_comms_ms: float
    backward_compute_ms: float
    backward_comms_ms: float
    prefetch_ms: float
    tables: dict[str, TableMemory]


class PlanFile(Frozen):
    """Content of plan.json. usable_hbm_bytes, usable_ddr_bytes: memory per rank for tables and their buffers."""

    format_version: Literal[3] = 3

    device: Literal["cpu", "cuda"]
    num_nodes: int
    processes_per_node: int
    batch_size: int
    fingerprint: str
    cluster: ClusterConfig
    quantized_comms: QuantizedCommsConfig
    usable_hbm_bytes: int
    usable_ddr_bytes: int
    tables: dict[str, TablePlan]
    ranks: tuple[RankEstimate, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts."""
        return self.num_nodes * self.processes_per_node

    @property
    def step_ms(self) -> float:
        """Milliseconds that the lookups of the slowest rank take per step."""
        return max(estimate.step_ms for estimate in self.ranks)

    @property
    def lookup_memory_field(self) -> RankMeasure:
        """Field of RankEstimate with the memory that lookups read: GPU memory, or main memory on a CPU."""
        return "hbm_bytes" if self.device == "cuda" else "ddr_bytes"

    def imbalance(self, measure: RankMeasure) -> float:
        """Return the maximum of `measure` over the ranks divided by its mean; 1 for equal values."""
        rank_measures = [float(getattr(estimate, measure)) for estimate in self.ranks]
        return max(rank_measures) * len(rank_measures) / sum(rank_measures) if sum(rank_measures) else 1.0

    @classmethod
    def read(cls, path: Path) -> "PlanFile":
        """Read a plan.json."""
        return cls.model_validate_json(path.read_bytes())

    def check_matches(self, *, spec: ModelSpec, world_size: int) -> None:
        """Raise InputError if the plan is for another model or number of ranks, or was changed by hand."""
        if world_size != self.world_size:
            raise InputError(
                f"plan.json: the plan was made for {self.world_size} ranks, but {world_size} ranks were started; "
                f"plan again, or start {self.world_size} ranks"
            )
        planned_size_by_table = {table_name: (table.rows, table.dim) for table_name, table in self.tables.items()}
        model_size_by_table = {table_name: (table.num_rows, table.dim) for table_name, table in spec.tables.items()}
        if planned_size_by_table != model_size_by_table:
            raise InputError(
                f"plan.json: the plan was made for tables {planned_size_by_table}, but the model has {model_size_by_table}; "
                "plan again"
            )
        for table_name, table in spec.tables.items():
            if table.optimizer_kind != self.tables[table_name].optimizer:
                raise InputError(
                    f"plan.json: table {table_name} was planned with optimizer {self.tables[table_name].optimizer}, but it "
                    f"has {table.optimizer_kind}, which needs a different amount of memory; plan again"
                )
        fingerprint = layout_fingerprint(self.tables, device=self.device, world_size=self.world_size)
        if fingerprint != self.fingerprint:
            raise InputError(
                f"plan.json: its layout has the fingerprint {fingerprint[:12]}, but the file contains {self.fingerprint[:12]}; "
                "the file was changed by hand; set sharding.tables and plan again"
            )

    def to_torchrec(self, tables_path: str, *, spec: ModelSpec) -> ShardingPlan:
        """Convert to TorchRec's plan. tables_path: module path of the embedding tables in the model."""
        sharding_by_module: dict[str, dict[str, ParameterSharding]] = {}
        for table_name, table in self.tables.items():
            module_path = f"{tables_path}.{spec.tables[table_name].collection}"
            sharding_by_module.setdefault(module_path, {})[module_name(table_name)] = self._parameter_sharding(table)
        return ShardingPlan(
            plan={module_path: EmbeddingModuleShardingPlan(shardings) for module_path, shardings in sharding_by_module.items()}
        )

    def _parameter_sharding(self, table: TablePlan) -> ParameterSharding:
        sharding_spec = None
        if table.sharding_type != "data_parallel":
            sharding_spec = EnumerableShardingSpec(
                [
                    ShardMetadata(
                        shard_offsets=list(shard.offset),
                        shard_sizes=list(shard.size),
                        placement=placement(self.device, shard.rank, self.processes_per_node),
                    )
                    for shard in table.shards
                ]
            )
        return ParameterSharding(
            sharding_type=table.sharding_type,
            compute_kernel=table.compute_kernel,
            ranks=list(table.ranks),
            sharding_spec=sharding_spec,
            cache_params=CacheParams(load_factor=table.cache_load_factor) if table.cache_load_factor else None,
            key_value_params=ssd_parameters(table.ssd_path) if table.ssd_path else None,
        )

    def to_markdown(self) -> str:
        """Return two Markdown tables: the layout of each table, and the estimates of the ranks."""
        lines = ["| table | rows x dim | sharding | kernel | ranks |", "|---|---|---|---|---|"]
        lines += [
            f"| {table_name} | {table.rows:,} x {table.dim} | {table.sharding_type} | {table.compute_kernel} | "
            f"{format_ranges(table.ranks)} |"
            for table_name, table in self.tables.items()
        ]
        lines += ["", "| ranks | HBM | DDR | est. step |", "|---|---|---|---|"]
        lines += [
            f"| {format_ranges(ranks)} | {estimate.hbm_bytes / MIB:,.1f} MiB | {estimate.ddr_bytes / MIB:,.1f} MiB | "
            f"{estimate.step_ms:.2f} ms |"
            for ranks, estimate in self.rank_groups()
        ]
        return "\n".join(lines)

    def rank_groups(self) -> list[tuple[tuple[int, ...], RankEstimate]]:
        """Group the ranks with equal estimates. Return (ranks, their estimate) for each group."""
        ranks_by_estimate: dict[str, list[int]] = {}
        for rank, estimate in enumerate(self.ranks):
            ranks_by_estimate.setdefault(estimate.model_dump_json(), []).append(rank)
        return [(tuple(ranks), self.ranks[ranks[0]]) for ranks in ranks_by_estimate.values()]


def layout_fingerprint(plan_by_table: dict[str, TablePlan], *, device: str, world_size: int) -> str:
    """Return the sha256 of the layout that training executes: tables, optimizers, sharding types, kernels and shards."""
    explanatory_fields = {"values_per_query", "constraint"}
    layout_by_table = {
        table_name: table.model_dump(mode="json", exclude=explanatory_fields)
        for table_name, table in sorted(plan_by_table.items())
    }
    return hashlib.sha256(json.dumps([layout_by_table, device, world_size], sort_keys=True).encode()).hexdigest()


def format_ranges(ranks: tuple[int, ...]) -> str:
    """Format ranks, with three or more consecutive ranks as a range.

    >>> format_ranges((0, 1, 2, 5)), format_ranges((3,)), format_ranges((0, 1))
    ('0-2, 5', '3', '0, 1')
    """
    rank_ranges: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if rank_ranges and rank == rank_ranges[-1][-1] + 1:
            rank_ranges[-1].append(rank)
        else:
            rank_ranges.append([rank])
    return ", ".join(
        f"{rank_range[0]}-{rank_range[-1]}" if len(rank_range) > 2 else ", ".join(map(str, rank_range))
        for rank_range in rank_ranges
    )


def to_html(plan: PlanFile) -> str:
    """Render plan.html, which explains the plan on one page."""
    memory_field = plan.lookup_memory_field
    return render_page(
        _PAGE_TEMPLATE_PATH,
        filters={"bytes": format_bytes, "ranges": format_ranges, "ms": format_milliseconds},
        plan=plan,
        groups=plan.rank_groups(),
        times=TIME_FIELDS,
        memory_name="HBM" if memory_field == "hbm_bytes" else "main memory",
        usable_bytes=plan.usable_hbm_bytes if memory_field == "hbm_bytes" else plan.usable_ddr_bytes,
        fullest_rank_bytes=max(getattr(estimate, memory_field) for estimate in plan.ranks),
        slowest_rank_ms=plan.step_ms,
        memory_imbalance=plan.imbalance(memory_field),
        time_imbalance=plan.imbalance("step_ms"),
        parts=_memory_parts,
    )


def _memory_parts(plan: PlanFile, estimate: RankEstimate, table_name: str) -> list[tuple[str, int, bool]]:
    """Return (name, bytes, whether the part is in the memory that lookups read) for each part of a table's memory on a rank."""
    memory = estimate.tables[table_name]
    is_offloaded = plan.tables[table_name].compute_kernel in OFFLOADING_KERNELS
    memory_parts = [
        ("weights", memory.weights, not is_offloaded),
        ("optimizer", memory.optimizer, not is_offloaded),
        ("cache", memory.cache, True),
        ("buffers", memory.buffers, True),
    ]
    return [(name, num_bytes, is_in_lookup_memory) for name, num_bytes, is_in_lookup_memory in memory_parts if num_bytes]
