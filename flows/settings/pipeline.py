"""The config of a pipeline: the configs of its stages."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import Field, model_validator

from flows.settings.rules import check_rules
from flows.settings.schedule import ScheduleConfig
from recsys_core.config import Folder, PipelineName, Settings, is_uri
from recsys_core.data_report.limits import DataReportConfig
from recsys_core.evaluation.config import EvaluationConfig, FeatureSlice
from recsys_core.http_server.config import ServeConfig
from recsys_core.ingest import InputConfig
from recsys_core.ingest.features.config import FeaturesConfig
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.engine_settings import is_table_name
from recsys_core.ingest.vectors.config import EmbeddingsConfigs
from recsys_core.launching.config import Launcher, LocalLauncher
from recsys_core.models.config import PackageConfig, TwoTowerConfig
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.tables.table_config import HISTORY_OFFSET_TABLE, OFFSET_TABLE, TableConfig
from recsys_core.refresh.config import RefreshConfig
from recsys_core.retrieval.config import IndexConfig
from recsys_core.sharding.config import ShardingConfig
from recsys_core.training.config import TrainingConfig
from tasks.delivery.config import DeliveryConfig
from tasks.registry.config import RegistryConfig
from tasks.retention.config import RetentionConfig
from tasks.tuning.config import TuningConfig

if TYPE_CHECKING:
    from recsys_core.manifests import Dataset
    from recsys_core.training.setup import TrainingSetup

SettingsT = TypeVar("SettingsT", bound=Settings)


class PipelineConfig(Settings):
    """Config of a pipeline: input, model, training, evaluation, serving and promotion."""

    name: PipelineName = Field(
        "nightly", description="name of the pipeline in the Prefect UI. It must not contain `/`, `%`, `&`, `>` or `<`"
    )
    workspace: Folder = Field(
        Path("workspace"),
        description="folder on this machine for runs, the embedded MLflow database and Prefect's files. It must not be a URI",
    )
    allowed_data_root: Folder | None = Field(
        None,
        description="folder that must contain every input file after links are resolved. Default: any folder",
    )
    interactions: InteractionsConfig = Field(
        description="the interaction log, and how it is split into training, validation and test events"
    )
    data_report: DataReportConfig = Field(
        default_factory=DataReportConfig,
        description="limits on the data. A run stops before the training if the data violates one of them. A measured value "
        "without a limit is only reported",
    )
    embeddings: EmbeddingsConfigs = Field(
        (),
        description="vectors of embedding tables, as one group of settings or a list of groups: pretrained vectors from files, "
        "or item vectors that are computed from the log. Default: no vectors",
    )
    features: FeaturesConfig | None = Field(
        None, description="features of users, items and events in addition to their ids. Default: no features"
    )
    model: TwoTowerConfig = Field(default_factory=TwoTowerConfig, description="the two-tower model")
    tables: dict[str, TableConfig] = Field(
        default_factory=dict,
        max_length=10_000,
        description="settings of embedding tables: width, use of pretrained vectors, and optimizer. The name of a table is "
        "`item`, `user`, or the name of a feature such as `item.brand`",
    )
    loss: LossConfig = Field(default_factory=LossConfig, description="the loss function and its negatives")
    sharding: ShardingConfig = Field(
        default_factory=ShardingConfig, description="the cluster, and constraints for TorchRec's sharding planner"
    )
    training: TrainingConfig = Field(
        default_factory=TrainingConfig, description="training loop, optimizers, checkpoints and restarts"
    )
    launcher: Launcher = Field(
        default_factory=LocalLauncher,
        description="where the stages `train` and `export` run: on this host (`local`), or on other hosts through TorchX "
        "(`torchx`)",
    )
    evaluation: EvaluationConfig = Field(
        default_factory=EvaluationConfig, description="settings of the evaluation, which ranks all items of the catalogue"
    )
    index: IndexConfig = Field(default_factory=IndexConfig, description="the FAISS indexes of the item vectors")
    package: PackageConfig = Field(default_factory=PackageConfig, description="the files of the served model")
    registry: RegistryConfig = Field(
        default_factory=RegistryConfig,
        description="registration in MLflow, and the rule by which a new version becomes champion",
    )
    refresh: RefreshConfig = Field(
        default_factory=RefreshConfig, description="limits of `nightjar refresh`, which updates the items of the champion"
    )
    delivery: DeliveryConfig = Field(
        default_factory=DeliveryConfig,
        description="what nightjar sends to systems other than MLflow when a version becomes champion",
    )
    serve: ServeConfig = Field(default_factory=ServeConfig, description="the HTTP server of `nightjar serve`")
    schedule: ScheduleConfig = Field(
        default_factory=ScheduleConfig, description="when `nightjar up` or a Prefect worker starts runs of the pipeline"
    )
    retention: RetentionConfig = Field(
        default_factory=RetentionConfig,
        description="which runs and model versions are kept, and the disk budget of the workspace",
    )
    tuning: TuningConfig | None = Field(
        None, description="the settings that `nightjar tune` varies, and their ranges. Default: no tuning"
    )

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        check_rules(self)
        return self

    @property
    def guarded_slices(self) -> tuple[FeatureSlice, ...]:
        """The entries of evaluation.slices whose features are in registry.guardrails.features."""
        guarded_features = self.registry.guardrails.features
        return tuple(feature_slice for feature_slice in self.evaluation.slices if feature_slice.feature in guarded_features)

    @property
    def table_names(self) -> set[str]:
        """Names of all embedding tables of the model."""
        table_names = {"item"} | ({"user"} if self.model.learn_user_embedding else set())
        if "item" in self.tables and self.tables["item"].transfer == "residual":
            table_names.add(OFFSET_TABLE)
        if self.model.history.learn_offsets:
            table_names.add(HISTORY_OFFSET_TABLE)
        if self.features is not None:
            table_names |= self.features.by_key.keys()
        return table_names

    @property
    def input_config(self) -> InputConfig:
        """The settings of the stages that read the input."""
        return InputConfig(self.interactions_with_context, self.embeddings, self.features, self.allowed_data_root)

    def training_setup(self, dataset: "Dataset") -> "TrainingSetup":
        """Return the setup of a training on `dataset`: the model with its tables, and all settings of the training."""
        from recsys_core.models.spec import ModelSpec
        from recsys_core.training.setup import TrainingSetup

        model = ModelSpec.of(
            self.model, dataset=dataset, tables=self.tables, loss=self.loss, optimizer=self.training.table_optimizer
        )
        return TrainingSetup(model, self.training, self.loss, self.sharding, self.launcher)

    @property
    def interactions_with_context(self) -> InteractionsConfig:
        """`interactions` with the columns of the context features added to `context_columns`."""
        if self.features is None:
            return self.interactions
        context_columns = dict.fromkeys([*self.interactions.context_columns, *self.features.context_columns])
        return self.interactions.model_copy(update={"context_columns": tuple(context_columns)})

    def for_full_retrain(self) -> Self:
        """Return the config with the settings that rebuild the vocabularies, read all files and train from scratch."""
        vocabulary = self.interactions.vocabulary.model_copy(update={"rebuild": "always"})
        interactions = self.interactions.model_copy(update={"vocabulary": vocabulary})
        training = self.training.model_copy(update={"warm_start": None})
        return self.model_copy(update={"interactions": interactions, "training": training})

    def with_absolute_paths(self, base_folder: Path) -> Self:
        """Return the config with relative paths resolved against `base_folder`."""
        return _with_absolute_paths(self, base_folder)


def _with_absolute_paths(settings: SettingsT, base_folder: Path, *, can_be_table_names: bool = False) -> SettingsT:
    """Resolve the relative paths of `settings` and its nested groups: folders, and settings whose names end in `paths`.

    Args:
        can_be_table_names: whether a path without a / is the name of a table in a catalog.
    """
    can_be_table_names = can_be_table_names or (isinstance(settings, InteractionsConfig) and settings.format != "parquet")
    changes: dict[str, Any] = {}
    for name, value in settings:
        if isinstance(value, Path):
            changes[name] = _absolute_path(base_folder, value)
        elif isinstance(value, Settings):
            changes[name] = _with_absolute_paths(value, base_folder, can_be_table_names=can_be_table_names)
        elif name.endswith("paths") and value is not None:
            changes[name] = tuple(
                path if is_uri(path) or (can_be_table_names and is_table_name(path)) else str(_absolute_path(base_folder, path))
                for path in value
            )
        elif isinstance(value, tuple) and value and isinstance(value[0], Settings):
            changes[name] = tuple(_with_absolute_paths(element, base_folder) for element in value)
    return settings.model_copy(update=changes)


def _absolute_path(base_folder: Path, path: str | Path) -> Path:
    # Symbolic links are not resolved: a link to the newest export must be followed at each run.
    return Path(os.path.normpath(Path.cwd() / base_folder / Path(path).expanduser()))
