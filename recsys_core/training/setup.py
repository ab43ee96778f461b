"""The setup of a training: the model and all settings that a plan, a training and an export share."""

from dataclasses import dataclass, field
from pathlib import Path

from recsys_core.launching.config import Launcher, LocalLauncher
from recsys_core.manifests import Dataset, PlanManifest
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.sharding.config import ShardingConfig
from recsys_core.sharding.lookup_stats import LookupStats, measure_lookups
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.sharding.planner import make_plan, plan_sharding
from recsys_core.training.config import TrainingConfig


@dataclass(frozen=True)
class TrainingSetup:
    """The model of one dataset, and the settings of its training.

    Attributes:
        sharding: settings of the sharding plan. A retry with fewer ranks makes a new plan from them.
        launcher: where the ranks run.
    """

    model: ModelSpec
    training: TrainingConfig
    loss: LossConfig = field(default_factory=LossConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    launcher: Launcher = field(default_factory=LocalLauncher)

    def plan(self, dataset: Dataset | None = None, *, folder: Path) -> PlanManifest:
        """Plan the sharding as the stage `plan_sharding`. Without `dataset`, the lookups are assumed instead of measured."""
        return plan_sharding(
            self.sharding,
            model=self.model,
            batch_size=self.training.batch_size,
            lookup_stats=self._lookup_stats(dataset),
            folder=folder,
        )

    def make_plan(self, dataset: Dataset | None = None) -> PlanFile:
        """Return the same plan without writing it."""
        return make_plan(
            self.sharding,
            model=self.model,
            batch_size=self.training.batch_size,
            lookup_stats=self._lookup_stats(dataset),
        )

    def _lookup_stats(self, dataset: Dataset | None) -> LookupStats | None:
        if dataset is None:
            return None
        return measure_lookups(self.model, batch_size=self.training.batch_size, loss=self.loss, dataset=dataset)
