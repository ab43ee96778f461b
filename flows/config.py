"""The whole config of a nightly run: the stages' own configs composed, and what must hold between them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from recsys_core.config import Folder, Name, Paths, Settings
from recsys_core.data.embeddings.config import EmbeddingsConfig, EmbeddingsConfigs
from recsys_core.data.features.config import FeaturesConfig, FeatureTableConfig
from recsys_core.data.interactions.config import GivenSplit, InteractionsConfig
from recsys_core.data_report.config import DataReportConfig
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.launching.config import Launcher, LocalLauncher
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.table_checks import check_distillation, check_table_names, check_vectors_exist
from recsys_core.models.table_config import OFFSET, TableConfig
from recsys_core.parquet.locations import is_uri
from recsys_core.retrieval.config import IndexConfig
from recsys_core.serving.config import PackageConfig
from recsys_core.sharding.config import ShardingConfig
from recsys_core.training.config import TrainingConfig
from tasks.registry.config import RegistryConfig
from tasks.tuning.config import TuningConfig


class PipelineConfig(Settings):
    """One file describes a night. Relative paths are relative to the folder of that file."""

    name: Name = Field("nightly", description="name of the pipeline, shown in the Prefect UI")
    workspace: Folder = Field(
        Path("workspace"), description="folder for runs, the embedded MLflow database and Prefect's files"
    )
    data_root: Folder | None = Field(
        None, description="folder that every input file has to lie below, links resolved; empty: files may lie anywhere"
    )
    interactions: InteractionsConfig = Field(description="the interaction log and its split")
    data_report: DataReportConfig = Field(
        default_factory=DataReportConfig, description="limits on the night's data: beyond one the run stops before training"
    )
    embeddings: EmbeddingsConfigs = Field(
        (), description="pretrained vectors, one group of settings or a list of them; empty: train from scratch"
    )
    features: FeaturesConfig | None = Field(
        None, description="features of users, items and events beyond their ids; empty: none"
    )
    model: TwoTowerConfig = Field(default_factory=TwoTowerConfig, description="the two towers")
    tables: dict[str, TableConfig] = Field(
        default_factory=dict,
        max_length=10_000,
        description="settings by embedding table: item, user, or a feature such as item.brand: width, transfer of pretrained "
        "vectors, optimizer",
    )
    loss: LossConfig = Field(default_factory=LossConfig, description="what is minimised")
    sharding: ShardingConfig = Field(
        default_factory=ShardingConfig, description="the cluster, and constraints for TorchRec's planner"
    )
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="loop, optimizers, checkpoints, restarts")
    launcher: Launcher = Field(
        default_factory=LocalLauncher, description="where training and export run: this host, or many through TorchX"
    )
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="metrics over the full catalogue")
    index: IndexConfig = Field(default_factory=IndexConfig, description="FAISS indexes")
    package: PackageConfig = Field(default_factory=PackageConfig, description="the servable retriever")
    registry: RegistryConfig = Field(default_factory=RegistryConfig, description="MLflow, and when a version becomes champion")
    tuning: TuningConfig | None = Field(
        None, description="which settings `nightjar tune` varies, and between what; empty: none"
    )

    @model_validator(mode="after")
    def _stages_agree(self) -> Self:
        history = self.model.history
        if not self.interactions.ordered and (history.last_item or history.pooling == "recency"):
            setting = "last_item is true" if history.last_item else "pooling is recency"
            raise ValueError(
                f"model.history.{setting}, but interactions has neither timestamp_column nor order_column, so no item is the "
                "last; set one of the columns, or model.history.last_item to false and pooling to mean, sum or attention"
            )
        if self.interactions.ordered and history.include_target:
            raise ValueError(
                "model.history.include_target is for logs without order, but interactions has an order; set it to false"
            )
        asked = self.features is not None and (self.features.users is not None or self.features.context)
        if not self.model.user_id and history.length == 0 and not asked:
            raise ValueError(
                "the query tower has no feature: set model.user_id to true or model.history.length above 0, or declare "
                "features of users or of the context"
            )
        if "ivf_pq" in self.index.built_kinds and self.model.output_dim % self.index.pq_m:
            raise ValueError(
                f"index.pq_m is {self.index.pq_m}, but the towers end in {self.model.output_dim} numbers, "
                "which it does not divide; set index.pq_m to a divisor, or the last layers to a multiple"
            )
        if self.loss.kind == "cosine_contrastive" and self.model.similarity != "cosine":
            raise ValueError(
                f"loss.kind is cosine_contrastive, whose margin is a cosine, but model.similarity is {self.model.similarity}; "
                "set it to cosine"
            )
        cluster = self.sharding.cluster
        if self.launcher.kind == "torchx" and (cluster.device == "auto" or cluster.processes_per_node is None):
            raise ValueError(
                f"launcher.kind is torchx, but sharding.cluster.device is {cluster.device} and processes_per_node is "
                f"{cluster.processes_per_node or 'empty'}, which would be taken from this host; set device to cpu or cuda, and "
                "processes_per_node to the ranks of one host"
            )
        self._check_tables()
        return self

    def _check_tables(self) -> None:
        """Raise InputError if a setting names an unknown table, or needs pretrained vectors that are not declared."""
        check_table_names("tables", self.tables, tables=self.table_names)
        check_table_names("sharding.tables", self.sharding.tables, tables=self.table_names)
        tables_with_vectors = {entry.table for entry in self.embeddings}
        if "user" in tables_with_vectors and not self.model.user_id:
            raise ValueError("embeddings has vectors of users, but the model has no user table; set model.user_id to true")
        for name, settings in self.tables.items():
            check_vectors_exist(name, settings, tables_with_vectors=tables_with_vectors)
        if self.loss.distillation is not None:
            check_distillation(tables_with_vectors)

    @property
    def table_names(self) -> set[str]:
        """All embedding tables."""
        names = {"item"} | ({"user"} if self.model.user_id else set())
        if "item" in self.tables and self.tables["item"].transfer == "residual":
            names.add(OFFSET)
        if self.features is not None:
            for side, table in (("user", self.features.users), ("item", self.features.items)):
                names |= {f"{side}.{feature.name}" for feature in (table.features if table is not None else ())}
            names |= {f"context.{feature.name}" for feature in self.features.context}
        return names

    @property
    def log(self) -> InteractionsConfig:
        """`interactions` with the columns that context features need kept per event."""
        if self.features is None:
            return self.interactions
        columns = dict.fromkeys([*self.interactions.context_columns, *self.features.context_columns])
        return self.interactions.model_copy(update={"context_columns": tuple(columns)})

    def anchored(self, folder: Path) -> Self:
        """The same config with every relative path taken from `folder`.."""

        def anchor(paths: Paths) -> Paths:
            return tuple(path if is_uri(path) else str(_absolute(folder, path)) for path in paths)

        split = self.interactions.split
        if isinstance(split, GivenSplit):
            validation = None if split.validation is None else anchor(split.validation)
            split = split.model_copy(update={"test": anchor(split.test), "validation": validation})
        interactions = self.interactions.model_copy(update={"paths": anchor(self.interactions.paths), "split": split})
        embeddings = tuple(_anchored_entry(entry, anchor) for entry in self.embeddings)

        def table(side: FeatureTableConfig | None) -> FeatureTableConfig | None:
            return side and side.model_copy(update={"paths": anchor(side.paths)})

        features = self.features and self.features.model_copy(
            update={"users": table(self.features.users), "items": table(self.features.items)}
        )
        update: dict[str, object] = {"interactions": interactions, "embeddings": embeddings, "features": features}
        update["workspace"] = _absolute(folder, self.workspace)
        if self.data_root is not None:
            update["data_root"] = _absolute(folder, self.data_root)
        return self.model_copy(update=update)


def _anchored_entry(entry: EmbeddingsConfig, anchor: Callable[[Paths], Paths]) -> EmbeddingsConfig:
    id_map = entry.id_map and entry.id_map.model_copy(update={"paths": anchor(entry.id_map.paths)})
    return entry.model_copy(update={"paths": anchor(entry.paths), "id_map": id_map})


def _absolute(folder: Path, path: str | Path) -> Path:
    # Made absolute without resolving symbolic links: a link to the newest export must stay one.
    return Path(os.path.normpath(Path.cwd() / folder / Path(path).expanduser()))
