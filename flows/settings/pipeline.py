"""The config of a pipeline: the configs of its stages, and the rules between them."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import Field, model_validator

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
from recsys_core.models.config import ORDER_FREE_POOLINGS, PackageConfig, TwoTowerConfig
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.tables.table_config import (
    OFFSET_TABLE,
    TableConfig,
    check_table_names,
    check_tables,
)
from recsys_core.refresh.config import RefreshConfig
from recsys_core.retrieval.auto import Auto
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

    name: PipelineName = Field("nightly", description="name of the pipeline, shown in the Prefect UI; without `/ % & > <`")
    workspace: Folder = Field(
        Path("workspace"),
        description="folder on this machine for runs, the embedded MLflow database and Prefect's files; no URI",
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
        description="where the training and export run: on this host (`local`), or on other hosts through TorchX (`torchx`)",
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
        default_factory=DeliveryConfig, description="what a new champion delivers to other systems than MLflow"
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
    def _last_items_need_an_order(self) -> Self:
        history = self.model.history
        if not self.interactions.is_ordered and (history.last_item_feature or history.needs_order):
            problem = "last_item_feature is true" if history.last_item_feature else f"pooling is {history.pooling}"
            raise ValueError(
                f"model.history.{problem}, but interactions has neither timestamp_column nor order_column, so no item is the "
                "last; set one of the columns, or set model.history.last_item_feature to false and pooling to one of "
                f"{', '.join(ORDER_FREE_POOLINGS)}"
            )
        return self

    @model_validator(mode="after")
    def _weights_need_validation(self) -> Self:
        model = self.model
        weights_by_setting = {
            "spectral_block": () if model.spectral_block is None else model.spectral_block.weights,
            "popularity": model.popularity.weights if model.popularity.kind == "validated" else (),
        }
        for setting, weights in weights_by_setting.items():
            if len(weights) > 1 and self.training.validation is None:
                raise ValueError(
                    f"model.{setting}.weights has {len(weights)} values, but training.validation is null, so nothing chooses "
                    "one of them; give one weight, or set training.validation"
                )
        return self

    @model_validator(mode="after")
    def _include_target_needs_no_order(self) -> Self:
        if self.interactions.is_ordered and self.model.history.include_target:
            raise ValueError(
                "model.history.include_target is for logs without order, but interactions has an order; set it to false"
            )
        return self

    @model_validator(mode="after")
    def _query_tower_has_a_feature(self) -> Self:
        features = self.features
        has_query_features = features is not None and (features.users is not None or features.context)
        if not self.model.learn_user_embedding and self.model.history.length == 0 and not has_query_features:
            raise ValueError(
                "the query tower has no feature: set model.learn_user_embedding to true or model.history.length above 0, or "
                "declare features of users or of the context"
            )
        return self

    @model_validator(mode="after")
    def _user_embeddings_need_stored_users(self) -> Self:
        if self.package.users == "none" and self.model.learn_user_embedding:
            raise ValueError(
                "package.users is none, but the model reads an embedding of each user, which a request cannot bring; set "
                "model.learn_user_embedding to false, or package.users to stored"
            )
        return self

    @model_validator(mode="after")
    def _refit_keeps_the_order_of_events(self) -> Self:
        if self.training.refit and self.interactions.split.kind == "files":
            raise ValueError(
                "training.refit needs test events that are later than the training events of the same user, which "
                "interactions.split.kind: files does not ensure; set refit to false, or another kind"
            )
        return self

    @model_validator(mode="after")
    def _recommendations_have_users(self) -> Self:
        recommendations = self.delivery.recommendations
        if self.package.users == "none" and recommendations.folder is not None and not recommendations.user_paths:
            raise ValueError(
                "package.users is none, so the model has no users to write to delivery.recommendations.folder; set "
                "delivery.recommendations.user_paths to files with the histories, or package.users to stored"
            )
        return self

    @model_validator(mode="after")
    def _indexes_fit_vector_width(self) -> Self:
        if (problem := self.index.problem(self.model.output_dim)) is not None:
            raise ValueError(f"index: {problem}")
        return self

    @model_validator(mode="after")
    def _exports_support_the_history(self) -> Self:
        history = self.model.history
        if self.package.exports and not history.has_padded_form:
            raise ValueError(
                f"package.exports is {', '.join(self.package.exports)}, but model.history.pooling {history.pooling} cannot be "
                "exported; leave package.exports out, or set another pooling"
            )
        return self

    @model_validator(mode="after")
    def _cosine_loss_needs_cosine_similarity(self) -> Self:
        if self.loss.kind == "cosine_contrastive" and self.model.similarity != "cosine":
            raise ValueError(
                f"loss.kind is cosine_contrastive, whose margin is a cosine, but model.similarity is {self.model.similarity}; "
                "set model.similarity to cosine"
            )
        return self

    @model_validator(mode="after")
    def _temperature_can_be_chosen(self) -> Self:
        if self.model.temperature != "auto":
            return self
        for is_unsupported, problem, advice in (
            (self.training.validation is None, "training.validation is null", "set it"),
            (
                self.loss.kind == "cosine_contrastive",
                "loss.kind is cosine_contrastive, which has no temperature",
                "set another kind",
            ),
        ):
            if is_unsupported:
                raise ValueError(
                    f"model.temperature is auto, which compares temperatures by the validation metric, but {problem}; "
                    f"{advice}, or set model.temperature to a number"
                )
        return self

    @model_validator(mode="after")
    def _explicit_negatives_are_ingested(self) -> Self:
        if self.loss.explicit_negatives and not self.interactions.explicit_negatives:
            raise ValueError(
                f"loss.explicit_negatives is {self.loss.explicit_negatives}, but interactions.explicit_negatives is false, so "
                "no negative is known; set it to true, with label_column and label_threshold, or set loss.explicit_negatives "
                "to 0"
            )
        return self

    @model_validator(mode="after")
    def _torchx_needs_device_and_process_count(self) -> Self:
        cluster = self.sharding.cluster
        if self.launcher.kind == "torchx" and (cluster.device == "auto" or cluster.processes_per_node is None):
            raise ValueError(
                f"launcher.kind is torchx, but sharding.cluster.device is {cluster.device} and processes_per_node is "
                f"{cluster.processes_per_node or 'empty'}; this host cannot detect the devices of other hosts: set device to "
                "cpu or cuda, and processes_per_node to the number of ranks on one host"
            )
        return self

    @model_validator(mode="after")
    def _tables_support_their_settings(self) -> Self:
        tables_with_vectors = {entry.table for entry in self.embeddings}
        if "user" in tables_with_vectors and not self.model.learn_user_embedding:
            raise ValueError(
                "embeddings has vectors of users, but the model has no user table; set model.learn_user_embedding to true"
            )
        check_tables(
            self.tables,
            tables=self.table_names,
            tables_with_vectors=tables_with_vectors,
            has_distillation=self.loss.distillation is not None,
        )
        check_table_names("sharding.tables", self.sharding.tables, tables=self.table_names)
        return self

    @model_validator(mode="after")
    def _vectors_from_the_log_are_the_only_ones_of_items(self) -> Self:
        log_vectors = self.inputs.log_vectors
        if log_vectors is None:
            return self
        if sum(entry.table == "item" for entry in self.embeddings) > 1:
            raise ValueError(
                "embeddings has several entries for the table item, and one of them has the source log, but an item row starts "
                "from one vector; keep one of the entries"
            )
        table_dim = self.tables["item"].dim if "item" in self.tables else None
        if table_dim not in (None, log_vectors.dim):
            raise ValueError(
                f"tables.item.dim is {table_dim}, but embeddings.dim is {log_vectors.dim}; leave tables.item.dim out, or set "
                "both to the same value"
            )
        return self

    @model_validator(mode="after")
    def _slices_are_features_with_values(self) -> Self:
        features = {} if self.features is None else self.features.by_key
        for feature_slice in self.evaluation.slices:
            feature = features.get(feature_slice.feature)
            if feature is None:
                raise ValueError(
                    f"evaluation.slices: {feature_slice.feature} is not a declared feature; declare it under features, or set "
                    f"one of {', '.join(sorted(features)) or 'the features that you declare'}"
                )
            if feature.standardise:
                raise ValueError(
                    f"evaluation.slices: {feature_slice.feature} is standardised, so it has no values to slice by; declare "
                    "another feature of the same column with buckets"
                )
        return self

    @model_validator(mode="after")
    def _segments_are_values_of_a_feature(self) -> Self:
        key, features = self.package.popularity_by, {} if self.features is None else self.features.by_key
        segment_keys = [
            key
            for key, feature in sorted(features.items())
            if not key.startswith("item.") and feature.kind == "categorical" and feature.hash_rows is None
        ]
        if key is not None and key not in segment_keys:
            raise ValueError(
                f"package.popularity_by: {key} is no categorical feature of users or context with a vocabulary; set one of "
                f"{', '.join(segment_keys) or 'those that you declare under features'}"
            )
        return self

    @model_validator(mode="after")
    def _item_vectors_are_stored(self) -> Self:
        served_kind = self.index.served
        if self.package.item_vectors == "none" and (isinstance(served_kind, Auto) or not served_kind.has_vectors):
            raise ValueError(
                f"package.item_vectors is none, but an index of kind {served_kind.kind} may not contain readable vectors; set "
                "it to fp16 or fp32, or set index.served to flat, hnsw, ivf_flat or ivf_sq8"
            )
        return self

    @model_validator(mode="after")
    def _guarded_features_are_slices(self) -> Self:
        sliced_features = sorted(feature_slice.feature for feature_slice in self.evaluation.slices)
        for feature in self.registry.guardrails.features:
            if feature not in sliced_features:
                raise ValueError(
                    f"registry.guardrails.features: {feature} is not a feature of evaluation.slices (its features: "
                    f"{', '.join(sliced_features) or 'none'}); add {{feature: {feature}}} to evaluation.slices"
                )
        return self

    @property
    def guarded_slices(self) -> tuple[FeatureSlice, ...]:
        """The entries of evaluation.slices whose features are in registry.guardrails.features."""
        guarded_features = self.registry.guardrails.features
        return tuple(feature_slice for feature_slice in self.evaluation.slices if feature_slice.feature in guarded_features)

    @property
    def table_names(self) -> set[str]:
        """Names of all embedding tables of the model."""
        names = {"item"} | ({"user"} if self.model.learn_user_embedding else set())
        if "item" in self.tables and self.tables["item"].transfer == "residual":
            names.add(OFFSET_TABLE)
        if self.features is not None:
            names |= self.features.by_key.keys()
        return names

    @property
    def inputs(self) -> InputConfig:
        """The settings of the three ingest stages."""
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


def _with_absolute_paths(settings: SettingsT, base_folder: Path, *, has_tables: bool = False) -> SettingsT:
    """Resolve the folders and the settings `paths`, `test_paths` and so on, also in the groups inside `settings`.

    has_tables: whether a path without a / is the name of a table.
    """
    has_tables = has_tables or (isinstance(settings, InteractionsConfig) and settings.format != "parquet")
    changes: dict[str, Any] = {}
    for name, value in settings:
        if isinstance(value, Path):
            changes[name] = _absolute_path(base_folder, value)
        elif isinstance(value, Settings):
            changes[name] = _with_absolute_paths(value, base_folder, has_tables=has_tables)
        elif name.endswith("paths") and value is not None:
            changes[name] = tuple(
                path if is_uri(path) or (has_tables and is_table_name(path)) else str(_absolute_path(base_folder, path))
                for path in value
            )
        elif isinstance(value, tuple) and value and isinstance(value[0], Settings):
            changes[name] = tuple(_with_absolute_paths(element, base_folder) for element in value)
    return settings.model_copy(update=changes)


def _absolute_path(base_folder: Path, path: str | Path) -> Path:
    # Symbolic links are not resolved: a link to the newest export must be followed at each run.
    return Path(os.path.normpath(Path.cwd() / base_folder / Path(path).expanduser()))
