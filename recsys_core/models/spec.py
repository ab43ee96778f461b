"""A model config together with what the data gave it: all that is needed to build the towers, to plan and to serve them."""

import math
from collections.abc import Mapping
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from recsys_core.config import Frozen
from recsys_core.data.batch_keys import QUERY, QUERY_WEIGHTED, ROWS
from recsys_core.data.features.store import FeatureForm, feature_form
from recsys_core.errors import InputError
from recsys_core.manifests import Dataset, FeatureFacts
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.table_config import OFFSET, TEACHER, TableConfig, random_norm

Side = Literal["query", "item"]
NEEDS_VECTORS = ("frozen", "gradual", "residual")
ONE_ROW_EACH = ("item", "user")
"""Tables of which an item or a query has one row, so that a row alone can be frozen."""


class TableSpec(Frozen):
    """One embedding table, and the feature that is looked up in it."""

    rows: int
    dim: int
    feature: str
    side: Side
    weighted: bool = False
    settings: TableConfig
    pretrained: bool = False

    @property
    def frozen(self) -> bool:
        """Whether no step changes a row: the table then has no optimizer, and no gradient is computed."""
        return self.settings.transfer in ("frozen", "residual")

    @property
    def row_by_row(self) -> bool:
        """Whether rows come as they are, in one exchange with those of all such tables, or pooled."""
        return self.side == "item" or (self.feature == "user" and self.settings.lookup != "pooled")

    @property
    def sparse(self) -> str:
        """Where its feature is in `Batch.sparse`."""
        return ROWS if self.row_by_row else QUERY_WEIGHTED if self.weighted else QUERY

    @property
    def collection(self) -> str:
        """The TorchRec module that holds it, see `sparse`.

        Rows of another width are in another one: TorchRec refuses an EmbeddingCollection of several widths.
        """
        width = f"_{self.dim}" if self.row_by_row else ""
        return f"{self.sparse}{width}{'_frozen' if self.frozen else ''}"


class ModelSpec(Frozen):
    """Towers, tables and features. `forms`: <side>.<name> of each feature beyond ids -> how many values, and weights or not."""

    config: TwoTowerConfig
    users: int
    items: int
    tables: dict[str, TableSpec]
    forms: dict[str, FeatureForm] = Field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: TwoTowerConfig,
        *,
        dataset: Dataset,
        tables: Mapping[str, TableConfig] | None = None,
        loss: LossConfig | None = None,
    ) -> Self:
        """The spec for these data; InputError when vectors do not fit their table, or a setting names no table."""
        facts = dataset.features.features if dataset.features is not None else {}
        dims = {name: table.dim for name, table in dataset.embeddings.tables.items()} if dataset.embeddings is not None else {}
        return cls.sized(
            config,
            users=dataset.interactions.users,
            items=dataset.interactions.items,
            facts=facts,
            vector_dims=dims,
            tables=tables or {},
            distils=loss is not None and loss.distillation is not None,
        )

    @classmethod
    def sized(
        cls,
        config: TwoTowerConfig,
        *,
        users: int,
        items: int,
        facts: Mapping[str, FeatureFacts] | None = None,
        vector_dims: Mapping[str, int] | None = None,
        tables: Mapping[str, TableConfig] | None = None,
        distils: bool = False,
    ) -> Self:
        """The same from plain numbers. vector_dims: width of the pretrained vectors of each table that has some."""
        settings, facts, dims = dict(tables or {}), facts or {}, vector_dims or {}
        forms = {key: feature_form(fact) for key, fact in facts.items()}

        def table(name: str, rows: int, *, feature: str, side: Side, weighted: bool = False) -> TableSpec:
            wish = settings.pop(name, TableConfig())
            made = TableSpec(
                rows=rows,
                dim=wish.dim or config.embedding_dim,
                feature=feature,
                side=side,
                weighted=weighted,
                settings=wish,
                pretrained=name in dims,
            )
            check_table(name, made, vectors=dims.get(name))
            return made

        made = {"item": table("item", items, feature="item", side="item")}
        if made["item"].settings.transfer == "residual":
            wish = settings.pop(OFFSET, TableConfig())
            if wish.dim not in (None, config.embedding_dim):
                raise InputError(
                    f"tables.{OFFSET}.dim is {wish.dim}, but offsets are added up in model.embedding_dim, which is "
                    f"{config.embedding_dim}; leave it out"
                )
            wish = wish.model_copy(update={"missing": "zero", "dim": config.embedding_dim})
            made[OFFSET] = TableSpec(rows=items, dim=config.embedding_dim, feature="item", side="item", settings=wish)
            check_table(OFFSET, made[OFFSET], vectors=None)
        if distils:
            if "item" not in dims:
                raise InputError("loss.distillation keeps the item vectors' similarities, but embeddings has no item vectors")
            frozen = TableConfig(transfer="frozen", dim=dims["item"], rescale=False, missing="zero")
            made[TEACHER] = TableSpec(
                rows=items, dim=dims["item"], feature="item", side="item", settings=frozen, pretrained=True
            )
        if config.user_id:
            made["user"] = table("user", users, feature="user", side="query")
        for key, fact in facts.items():
            side: Side = "item" if key.startswith("item.") else "query"
            weighted = side == "query" and forms[key] in ("weighted_list", "number")
            made[key] = table(key, fact.rows, feature=key, side=side, weighted=weighted)
        for name in settings:
            raise InputError(f"tables.{name}: the model has no such table; it has {sorted(made)}")
        return cls(config=config, users=users, items=items, tables=made, forms=forms)

    def on_side(self, side: Side) -> dict[str, TableSpec]:
        """The tables that the queries, or the items, are looked up in."""
        return {name: table for name, table in self.tables.items() if table.side == side}

    def features(self, side: Side) -> list[str]:
        """Declared features that a tower reads, in order."""
        return [key for key in self.forms if self.tables[key].side == side]

    def knows(self, *, history_length_B: NDArray[np.int64], user_row_B: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether anything is known of each query's user, bool [B]; the others are served, and measured, by popularity.

        history_length_B: items that the user had before. user_row_B: row of the user, -1 for a user without one. Known is a
        user with a history that the model reads, or with a row in a table that is looked up by user.
        """
        by_user = self.config.user_id or any(key.startswith("user.") for key in self.forms)
        has_history_B = (history_length_B > 0) & (self.config.history.length > 0)
        known_B: NDArray[np.bool_] = has_history_B | ((user_row_B >= 0) & by_user)
        return known_B

    @property
    def row_norm(self) -> float:
        """Length that a random item row is expected to have; a vector that is shorter counts as short, see `direction`."""
        return random_norm(self.tables["item"].settings.init_std, self.config.embedding_dim)

    @property
    def history_std(self) -> float:
        """Standard deviation of the numbers that stand for a random item in a history."""
        if self.config.history.item_representation == "candidate_tower" and self.config.similarity == "cosine":
            return 1 / math.sqrt(self.config.history_dim)
        return self.tables["item"].settings.init_std

    @property
    def user_in(self) -> str | None:
        """Where users are in `Batch.sparse`; None where they have no table of their own."""
        return self.tables["user"].sparse if self.config.user_id else None

    def output_name(self, table: str) -> str:
        """How the table's collection names its lookup: TorchRec appends the table where a feature reads several."""
        spec = self.tables[table]
        sharing = [t for t in self.tables.values() if t.collection == spec.collection and t.feature == spec.feature]
        return spec.feature if len(sharing) == 1 else f"{spec.feature}@{module_name(table)}"


def module_name(table: str) -> str:
    """Name of a table as a submodule, which must not hold a dot."""
    return table.replace(".", "__")


def check_table(name: str, table: TableSpec, *, vectors: int | None) -> None:
    """InputError unless the table's settings can be met. vectors: width of its pretrained vectors, None without any."""
    wish = table.settings
    if vectors is None and wish.transfer in NEEDS_VECTORS:
        raise InputError(
            f"tables.{name}.transfer is {wish.transfer}, but embeddings has no vectors of table {name!r}; add them, or set "
            "transfer to full"
        )
    if vectors is not None:
        require_width(vectors, table.dim, table=name)
    if wish.optimizer is not None and wish.optimizer.weight_decay and name not in (*ONE_ROW_EACH, OFFSET):
        raise InputError(f"tables.{name}.optimizer.weight_decay is for the tables {[*ONE_ROW_EACH, OFFSET]}; leave it out")
    if wish.transfer == "gradual" and name not in ONE_ROW_EACH:
        raise InputError(f"tables.{name}.transfer is gradual, which is for the tables {list(ONE_ROW_EACH)}; set full or frozen")
    if wish.lookup is not None and name != "user":
        how = "unpooled" if table.row_by_row else "pooled"
        raise InputError(f"tables.{name}.lookup is for the table user; this one is always looked up {how}; leave it out")
    if wish.transfer == "residual" and name != "item":
        raise InputError(f"tables.{name}.transfer is residual, which is for the table item; set full or frozen")


def require_width(vectors: int, dim: int, *, table: str) -> None:
    """Raise InputError unless pretrained vectors of width `vectors` fit a table of width `dim`."""
    if vectors != dim:
        shorter = f", or embeddings.pca_dim to {dim}" if vectors > dim else ""
        raise InputError(
            f"embeddings: the vectors of table {table!r} have {vectors} numbers, but the table has {dim}; set "
            f"tables.{table}.dim to {vectors} (a learned layer then projects it to model.embedding_dim){shorter}"
        )
