"""plan.json: a sharding plan that a person can read and diff, and that training executes exactly."""

from pathlib import Path
from typing import Literal

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.planner.utils import placement
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from recsys_core.config import Frozen
from recsys_core.errors import InputError
from recsys_core.models.spec import ModelSpec, module_name
from recsys_core.sharding.config import ShardingKind


class ShardPlan(Frozen):
    """A rectangle of a table on one rank; offset and size are (row, column)."""

    rank: int
    offset: tuple[int, int]
    size: tuple[int, int]


class TablePlan(Frozen):
    """How one table is laid out."""

    rows: int
    dim: int
    sharding_type: ShardingKind
    compute_kernel: str
    ranks: tuple[int, ...]
    shards: tuple[ShardPlan, ...]


class RankEstimate(Frozen):
    """What the planner expects of one rank."""

    hbm_bytes: int
    ddr_bytes: int
    step_ms: float


class PlanFile(Frozen):
    """Content of plan.json."""

    device: Literal["cpu", "cuda"]
    nodes: int
    processes_per_node: int
    batch_size: int
    tables: dict[str, TablePlan]
    ranks: tuple[RankEstimate, ...]

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.processes_per_node

    @classmethod
    def read(cls, path: Path) -> "PlanFile":
        """Parses a plan.json."""
        return cls.model_validate_json(path.read_bytes())

    def require(self, *, spec: ModelSpec, world_size: int) -> None:
        """InputError unless the plan was made for this model and this many ranks."""
        if world_size != self.world_size:
            raise InputError(
                f"plan.json: made for {self.world_size} ranks, but {world_size} were started; "
                f"plan again, or start {self.world_size}"
            )
        planned = {name: (table.rows, table.dim) for name, table in self.tables.items()}
        wanted = {name: (table.rows, table.dim) for name, table in spec.tables.items()}
        if planned != wanted:
            raise InputError(f"plan.json: made for tables {planned}, but the model has {wanted}; plan again")

    def to_torchrec(self, path: str, *, spec: ModelSpec) -> ShardingPlan:
        """TorchRec's own plan for the collections of `spec`, found below the module path `path`."""
        modules: dict[str, dict[str, ParameterSharding]] = {}
        for name, table in self.tables.items():
            collection = f"{path}.{spec.tables[name].collection}"
            modules.setdefault(collection, {})[module_name(name)] = self._parameter(table)
        return ShardingPlan(plan={path: EmbeddingModuleShardingPlan(tables) for path, tables in modules.items()})

    def _parameter(self, table: TablePlan) -> ParameterSharding:
        spec = None
        if table.sharding_type != "data_parallel":
            spec = EnumerableShardingSpec(
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
            sharding_spec=spec,
        )

    def to_markdown(self) -> str:
        """Two tables: where each table lies, and what each rank is expected to hold and take."""
        lines = ["| table | rows x dim | sharding | kernel | ranks |", "|---|---|---|---|---|"]
        lines += [
            f"| {name} | {t.rows:,} x {t.dim} | {t.sharding_type} | {t.compute_kernel} | {', '.join(map(str, t.ranks))} |"
            for name, t in self.tables.items()
        ]
        lines += ["", "| rank | HBM | DDR | est. step |", "|---|---|---|---|"]
        lines += [
            f"| {rank} | {r.hbm_bytes / 2**20:,.1f} MiB | {r.ddr_bytes / 2**20:,.1f} MiB | {r.step_ms:.2f} ms |"
            for rank, r in enumerate(self.ranks)
        ]
        return "\n".join(lines)
