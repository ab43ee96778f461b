"""The setup of a training: its model, the settings shared by plan_sharding, train and export, and the disk space it needs."""

from dataclasses import dataclass, field
from pathlib import Path

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.launching.config import Launcher, LocalLauncher
from recsys_core.manifests import Dataset, PlanManifest
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec, TableSpec
from recsys_core.models.tables.table_config import TableOptimizerKind
from recsys_core.sharding.config import ShardingConfig
from recsys_core.sharding.lookup_stats import LookupStats, measure_lookups
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.sharding.planner import make_plan, plan_sharding, resolve_cluster
from recsys_core.training.config import TrainingConfig

FLOAT_BYTES = 4
_NUM_STATE_VALUES_BY_OPTIMIZER: dict[TableOptimizerKind, tuple[int, int]] = {
    "rowwise_adagrad": (1, 0),
    "adagrad": (0, 1),
    "sgd": (0, 0),
    "adam": (0, 2),
    "partial_rowwise_adam": (1, 1),
}
"""Number of float32 values that an optimizer stores: (number per row, number per weight)."""


@dataclass(frozen=True)
class TrainingSetup:
    """The model of one dataset, and the settings of its training.

    Attributes:
        sharding: settings of the sharding plan. An attempt with fewer ranks makes a new plan from them.
        launcher: where the ranks run.
    """

    model: ModelSpec
    training: TrainingConfig
    loss: LossConfig = field(default_factory=LossConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    launcher: Launcher = field(default_factory=LocalLauncher)

    def plan(self, dataset: Dataset, *, folder: Path) -> PlanManifest:
        """Run the stage `plan_sharding` in `folder`."""
        model, batch_size, lookup_stats = self.model, self.training.batch_size, self._lookup_stats(dataset)
        return plan_sharding(self.sharding, model=model, batch_size=batch_size, lookup_stats=lookup_stats, folder=folder)

    def make_plan(self, dataset: Dataset) -> PlanFile:
        """Return the plan that `plan` would write, but write no files."""
        model, batch_size, lookup_stats = self.model, self.training.batch_size, self._lookup_stats(dataset)
        return make_plan(self.sharding, model=model, batch_size=batch_size, lookup_stats=lookup_stats)

    def checkpoint_bytes(self, *, work_folder: Path, steps_per_epoch: int) -> int:
        """Return the disk space that the checkpoints of a training still need, without the layers of the towers.

        This is the size of the largest number of checkpoints that exist at the same time, minus the bytes in `work_folder`.
        """
        config = self.training
        num_copies = 2 if config.averaged_epochs > 1 else 1  # the weights and their average
        checkpoint_bytes = sum(num_copies * _weight_bytes(table) + _state_bytes(table) for table in self.model.tables.values())
        max_num_checkpoints = config.max_num_checkpoints(num_steps=config.epochs * steps_per_epoch)
        existing_bytes = sum(path.stat().st_size for path in work_folder.rglob("*") if path.is_file())
        return max(0, max_num_checkpoints * checkpoint_bytes - existing_bytes)

    def _lookup_stats(self, dataset: Dataset) -> LookupStats:
        features = None if dataset.features is None else FeatureStore.open(dataset.features)
        _, processes_per_node = resolve_cluster(self.sharding.cluster)
        return measure_lookups(
            self.model,
            batch_size=self.training.batch_size,
            world_size=self.sharding.cluster.num_nodes * processes_per_node,
            loss=self.loss,
            store=EventStore.open(dataset.interactions),
            features=features,
        )


def export_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the exported tables, accumulators and item vectors.

    The largest array counts twice: while it is built, it is on disk twice. Query vectors and rankings are not counted, because
    their number depends on the split.
    """
    block = spec.config.spectral_block
    vector_dims = spec.config.history_dim, spec.config.output_dim, 0 if block is None else block.dim
    array_sizes_bytes = [spec.num_items * dim * FLOAT_BYTES for dim in vector_dims]
    array_sizes_bytes += [_weight_bytes(table) for table in spec.tables.values()]
    accumulator_sizes_bytes = [
        _state_bytes(table) for table in spec.tables.values() if table.optimizer.kind in ("rowwise_adagrad", "adagrad")
    ]
    return sum(array_sizes_bytes) + sum(accumulator_sizes_bytes) + max(array_sizes_bytes)


def _weight_bytes(table: TableSpec) -> int:
    return table.num_rows * table.dim * FLOAT_BYTES


def _state_bytes(table: TableSpec) -> int:
    if table.is_frozen:
        return 0
    num_values_per_row, num_values_per_weight = _NUM_STATE_VALUES_BY_OPTIMIZER[table.optimizer.kind]
    return table.num_rows * (num_values_per_row + num_values_per_weight * table.dim) * FLOAT_BYTES
