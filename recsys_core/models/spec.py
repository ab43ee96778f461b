"""ModelSpec, from which towers, planner and serving are built: the model config together with the sizes of the data.

Shapes: B queries.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from recsys_core.config import Frozen
from recsys_core.dataset.feature_store import POOLED, POOLED_WEIGHTED, UNPOOLED, FeatureForm, feature_form
from recsys_core.errors import InputError
from recsys_core.manifests import Dataset, IngestedFeature
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.score_config import FixedPopularity
from recsys_core.models.tables.table_config import (
    HISTORY_OFFSET_TABLE,
    ITEM_TABLES,
    OFFSET_TABLE,
    TEACHER_TABLE,
    TableConfig,
    TableOptimizer,
    check_tables,
    check_width,
    random_norm,
)

Side = Literal["query", "item"]
"""The tower that reads a table: `query` for the query tower, `item` for the candidate tower."""


class TableSpec(Frozen):
    """One embedding table and the feature that is looked up in it.

    Attributes:
        dim: width of a row. A row has the vectors of all members of the model, one after the other.
    """

    num_rows: int
    dim: int
    feature: str
    side: Side
    weighted: bool = False
    settings: TableConfig
    optimizer: TableOptimizer = Field(default_factory=TableOptimizer)
    pretrained: bool = False

    @property
    def is_frozen(self) -> bool:
        """Whether the table is never trained. A frozen table has no optimizer, and its gradient is not computed."""
        return self.settings.transfer in ("frozen", "residual")

    @property
    def optimizer_kind(self) -> str:
        """Kind of the table's optimizer; "none" for a frozen table."""
        return "none" if self.is_frozen else self.optimizer.kind

    @property
    def is_unpooled(self) -> bool:
        """Whether a lookup returns single rows. The lookups of other tables return pooled vectors."""
        return self.side == "item" or (self.feature == "user" and self.settings.lookup != "pooled")

    @property
    def batch_key(self) -> str:
        """Key of the table's feature in `Batch.sparse`."""
        if self.is_unpooled:
            return UNPOOLED
        return POOLED_WEIGHTED if self.weighted else POOLED

    @property
    def collection(self) -> str:
        """Name of the TorchRec collection that holds the table.

        Unpooled tables of different widths are in different collections: an EmbeddingCollection has only one width.
        """
        width = f"_{self.dim}" if self.is_unpooled else ""
        return f"{self.batch_key}{width}{'_frozen' if self.is_frozen else ''}"


class ModelSpec(Frozen):
    """Towers, tables and features of a model."""

    config: TwoTowerConfig
    num_users: int
    num_items: int
    tables: dict[str, TableSpec]
    forms: dict[str, FeatureForm] = Field(
        default_factory=dict,
        description="form of each declared feature (single, list, weighted_list, number), by user.<name>, item.<name> or "
        "context.<name>; the ids `user` and `item` are not listed",
    )

    @classmethod
    def of(
        cls,
        config: TwoTowerConfig,
        *,
        dataset: Dataset,
        tables: Mapping[str, TableConfig] | None = None,
        loss: LossConfig | None = None,
        optimizer: TableOptimizer | None = None,
    ) -> Self:
        """Return the spec for a dataset.

        Args:
            tables: settings by table.
            loss: the loss. A distillation term adds the table of the teacher.
            optimizer: optimizer of the tables without an `optimizer` setting.

        Raises:
            InputError: pretrained vectors do not fit their table, or a setting names an unknown table.
        """
        features = dataset.features
        return cls.sized(
            config,
            num_users=dataset.interactions.num_users,
            num_items=dataset.interactions.num_items,
            ingested_by_feature=None if features is None else features.features,
            vector_dim_by_table=dataset.vector_dim_by_table,
            tables=tables,
            has_distillation=loss is not None and loss.distillation is not None,
            optimizer=optimizer,
        )

    @classmethod
    def sized(
        cls,
        config: TwoTowerConfig,
        *,
        num_users: int,
        num_items: int,
        ingested_by_feature: Mapping[str, IngestedFeature] | None = None,
        vector_dim_by_table: Mapping[str, int] | None = None,
        tables: Mapping[str, TableConfig] | None = None,
        has_distillation: bool = False,
        optimizer: TableOptimizer | None = None,
    ) -> Self:
        """Return the spec for these sizes, without reading a dataset.

        Args:
            ingested_by_feature: ingested features, by user.<name>, item.<name> or context.<name>.
            vector_dim_by_table: width of the pretrained vectors, by table; tables without vectors are not listed.
            tables: settings by table.
            has_distillation: whether the loss has a distillation term.
            optimizer: optimizer of the tables without an `optimizer` setting.
        """
        ingested_by_feature, settings_by_table = ingested_by_feature or {}, dict(tables or {})
        vector_dim_by_table = dict(vector_dim_by_table or {})
        num_rows_by_table = {"item": num_items}
        if settings_by_table.get("item", TableConfig()).transfer == "residual":
            num_rows_by_table[OFFSET_TABLE] = num_items
        if config.history.learn_offsets:
            num_rows_by_table[HISTORY_OFFSET_TABLE] = num_items
        if has_distillation:
            num_rows_by_table[TEACHER_TABLE] = num_items
        if config.learn_user_embedding:
            num_rows_by_table["user"] = num_users
        num_rows_by_table |= {feature_name: ingested.num_rows for feature_name, ingested in ingested_by_feature.items()}
        check_tables(
            settings_by_table,
            tables=num_rows_by_table.keys() - {TEACHER_TABLE},
            tables_with_vectors=vector_dim_by_table,
            has_distillation=has_distillation,
        )
        for table_name, dim in ((OFFSET_TABLE, config.embedding_dim), (HISTORY_OFFSET_TABLE, config.member_history_dim)):
            if table_name in num_rows_by_table:
                settings = settings_by_table.get(table_name, TableConfig())
                settings_by_table[table_name] = _offset_settings(settings, table=table_name, dim=dim)
        if has_distillation:
            teacher_dim = vector_dim_by_table[TEACHER_TABLE] = vector_dim_by_table["item"]
            # The table holds the pretrained vectors, unscaled. The row of an item without a vector is zero.
            settings_by_table[TEACHER_TABLE] = TableConfig(
                transfer="frozen", dim=teacher_dim, rescale=False, missing_vector_init="zero"
            )
        forms = {feature_name: feature_form(ingested) for feature_name, ingested in ingested_by_feature.items()}
        spec_by_table = {}
        for table_name, num_rows in num_rows_by_table.items():
            settings = settings_by_table.get(table_name, TableConfig())
            if table_name in vector_dim_by_table:
                check_width(vector_dim_by_table[table_name], settings.dim, table=table_name)
            feature = "item" if table_name in (*ITEM_TABLES, TEACHER_TABLE) else table_name
            num_copies = 1 if table_name == TEACHER_TABLE else config.num_members
            side: Side = "item" if feature == "item" or feature.startswith("item.") else "query"
            spec_by_table[table_name] = TableSpec(
                num_rows=num_rows,
                dim=num_copies * (settings.dim or vector_dim_by_table.get(table_name, config.embedding_dim)),
                feature=feature,
                side=side,
                weighted=side == "query" and forms.get(feature) in ("weighted_list", "number"),
                settings=settings,
                optimizer=settings.optimizer or optimizer or TableOptimizer(),
                pretrained=table_name in vector_dim_by_table,
            )
        return cls(config=config, num_users=num_users, num_items=num_items, tables=spec_by_table, forms=forms)

    def with_choices(
        self,
        *,
        temperature: float | None = None,
        block_weight: float | None = None,
        popularity_weight: float | None = None,
    ) -> Self:
        """Return the model with the settings that a run has chosen on its validation events; None: the setting is unchanged."""
        config_update: dict[str, Any] = {}
        if temperature is not None:
            config_update["temperature"] = temperature
        block = self.config.spectral_block
        if block is not None and block_weight is not None:
            config_update["spectral_block"] = block.model_copy(update={"weights": (block_weight,)})
        if popularity_weight is not None:
            config_update["popularity"] = FixedPopularity(weight=popularity_weight)
        return self.model_copy(update={"config": self.config.model_copy(update=config_update)}) if config_update else self

    def on_side(self, side: Side) -> dict[str, TableSpec]:
        """Return the tables of `side`, by name."""
        return {table_name: table for table_name, table in self.tables.items() if table.side == side}

    def features(self, side: Side) -> list[str]:
        """Return the names of the declared features that the tower of `side` reads, in order."""
        return [feature_name for feature_name in self.forms if self.tables[feature_name].side == side]

    def is_known(
        self, *, history_length_B: NDArray[np.int64], user_row_B: NDArray[np.int64], has_context: bool
    ) -> NDArray[np.bool_]:
        """Return whether the user of each query is known, bool [B]. Unknown users get the most popular items.

        A user with a history is known if the model reads histories. A user with a row is known if the model reads user
        embeddings or user features. All users are known if the model reads context features and the queries have a context.

        Args:
            history_length_B: number of items in the user's history.
            user_row_B: row of the user, -1 for a user without a row.
            has_context: whether the queries have a context, as the events of the log have.
        """
        if has_context and any(feature_name.startswith("context.") for feature_name in self.forms):
            return np.ones(len(user_row_B), np.bool_)
        reads_user_row = self.config.learn_user_embedding or any(
            feature_name.startswith("user.") for feature_name in self.forms
        )
        has_history_B = (history_length_B > 0) & (self.served_history_length > 0)
        is_known_B: NDArray[np.bool_] = has_history_B | ((user_row_B >= 0) & reads_user_row)
        return is_known_B

    @property
    def row_norm(self) -> float:
        """Expected norm of a random row of table `item`. `unit_vectors` limits the gradients of vectors below this norm."""
        return random_norm(self.tables["item"].settings.init_std, self.config.embedding_dim)

    @property
    def history_length(self) -> int:
        """Maximum number of items in a history; 0 if the model reads no history."""
        return self.config.history.length

    @property
    def served_history_length(self) -> int:
        """Maximum number of items of a history that serving reads, for the query tower or for the spectral block."""
        block = self.config.spectral_block
        return max(self.history_length, 0 if block is None else block.history_length)

    @property
    def history_std(self) -> float:
        """Standard deviation of the values of an item's vector in a history, at the start of training."""
        if self.config.history.item_representation == "candidate_tower" and self.config.similarity == "cosine":
            return 1 / math.sqrt(self.config.member_history_dim)
        return self.tables["item"].settings.init_std

    @property
    def user_batch_key(self) -> str | None:
        """Key of the users in `Batch.sparse`; None if the model has no user table."""
        return self.tables["user"].batch_key if self.config.learn_user_embedding else None

    def member_dim(self, table: str) -> int:
        """Return how many numbers of a table row one member reads."""
        return self.tables[table].dim // self.config.num_members

    def optimizer_setting(self, table: str) -> str:
        """Return the name of the setting with the optimizer of `table`."""
        has_own_optimizer = self.tables[table].settings.optimizer is not None
        return f"tables.{table}.optimizer" if has_own_optimizer else "training.table_optimizer"

    def output_name(self, table: str) -> str:
        """Return the name of the table's output. TorchRec appends the table's name if several tables have the same feature."""
        table_spec = self.tables[table]
        lookup_keys = [(other_table.collection, other_table.feature) for other_table in self.tables.values()]
        return (
            table_spec.feature
            if lookup_keys.count((table_spec.collection, table_spec.feature)) == 1
            else f"{table_spec.feature}@{module_name(table)}"
        )


def module_name(table: str) -> str:
    """Return the name of a table's submodule. Names of submodules must not contain a dot."""
    return table.replace(".", "__")


def _offset_settings(settings: TableConfig, *, table: str, dim: int) -> TableConfig:
    """Return the settings of a table of offsets, which start from zero. dim: width of these offsets."""
    if settings.dim not in (None, dim):
        raise InputError(
            f"tables.{table}.dim is {settings.dim}, but the offsets are added to vectors with {dim} numbers; "
            f"leave tables.{table}.dim out"
        )
    return settings.model_copy(update={"missing_vector_init": "zero", "dim": dim})
