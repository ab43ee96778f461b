"""Configuration of the features of users, items and events."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from recsys_core.config import MAX_COUNT, ColumnName, Paths, Settings

FeatureKind = Literal["categorical", "list", "weighted_list", "numeric"]
OwnerKind = Literal["user", "item", "context"]
Boundary = Annotated[float, Field(ge=-1e300, le=1e300)]
MAX_HASH_ROWS = 2**31 - 2
"""Largest number of hashed values: row numbers are stored as int32, and row 0 is reserved."""


class FeatureConfig(Settings):
    """One feature: its column, and the encoding of its values as rows of an embedding table.

    Row 0 is for values that have no row of their own.
    """

    name: str = Field(
        min_length=1,
        max_length=100,
        pattern=r"^[A-Za-z0-9_]+$",
        description="Name of the feature. It may contain letters, digits and `_`",
    )
    kind: FeatureKind = Field(
        "categorical",
        description="Kind of the values. `categorical` is one value, `list` is a list of values, `weighted_list` is a list of "
        "values with weights, and `numeric` is a number",
    )
    column: ColumnName | None = Field(None, description="Column with the values. Default: the name of the feature")
    weight_column: ColumnName | None = Field(
        None, description="Column with the lists of weights of a `weighted_list`. Weights are finite and 0 or more"
    )
    min_count: int = Field(
        1,
        ge=1,
        le=MAX_COUNT,
        description="Values that occur less often than this have no row of their own. They all use row 0 of the embedding "
        "table",
    )
    max_rows: int | None = Field(
        None,
        ge=1,
        le=MAX_HASH_ROWS,
        description="Maximum number of values with a row of their own, for values that are new every day, such as campaigns or "
        "devices. If there are more values, the most frequent values have rows. A value that is no longer frequent "
        "enough loses its row to a more frequent value, and the embedding of the row is initialised again. "
        "Default: no limit",
    )
    hash_rows: int | None = Field(
        None,
        ge=1,
        le=MAX_HASH_ROWS,
        description="Number of rows of the embedding table onto which a hash maps the values. Default: a vocabulary, no hash",
    )
    max_values: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Maximum number of values of a `list` or `weighted_list`. Only the first values of a longer list are "
        "kept. Default: all values",
    )
    buckets: int | None = Field(
        None,
        ge=2,
        le=1_000_000,
        description="Number of buckets of a `numeric` feature. The buckets contain equally many training values",
    )
    boundaries: tuple[Boundary, ...] | None = Field(
        None,
        min_length=1,
        description="Ascending boundaries of the buckets of a `numeric` feature. A value that equals a boundary is in the "
        "bucket above it",
    )
    standardise: bool = Field(
        False,
        description="Use the value of a `numeric` feature as a number, without buckets. The mean of the training values is "
        "subtracted from the value, and the difference is divided by the standard deviation of the training values "
        "and clipped to the range from -10 to 10",
    )

    @property
    def source_column(self) -> str:
        """Column with the values."""
        return self.column or self.name

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns to read."""
        return (self.source_column,) if self.weight_column is None else (self.source_column, self.weight_column)

    @property
    def is_list(self) -> bool:
        """Whether a user, item or event has a list of values."""
        return self.kind in ("list", "weighted_list")

    @model_validator(mode="after")
    def _settings_fit_kind(self) -> Self:
        self._reject_for_other_kinds("weight_column", kinds=("weighted_list",))
        self._reject_for_other_kinds("max_values", kinds=("list", "weighted_list"))
        self._reject_for_other_kinds("max_rows", kinds=("categorical", "list", "weighted_list"))
        self._reject_for_other_kinds("hash_rows", kinds=("categorical", "list", "weighted_list"))
        self._reject_for_other_kinds("buckets", kinds=("numeric",))
        self._reject_for_other_kinds("boundaries", kinds=("numeric",))
        self._reject_for_other_kinds("standardise", kinds=("numeric",))
        if self.kind == "weighted_list" and self.weight_column is None:
            raise ValueError(
                f"feature {self.name!r} is a weighted_list, but has no weight_column; set weight_column, or set kind to list"
            )
        if self.kind == "weighted_list" and self.weight_column == self.source_column:
            raise ValueError(
                f"feature {self.name!r}: {self.source_column!r} is both the column of the values and weight_column; "
                "set another weight_column"
            )
        if self.min_count > 1 and (self.kind == "numeric" or self.hash_rows is not None):
            encoding, fix = ("numeric", "set kind to categorical") if self.kind == "numeric" else ("hashed", "remove hash_rows")
            raise ValueError(
                f"feature {self.name!r}: min_count is {self.min_count}, but needs a vocabulary, which a {encoding} feature "
                f"does not have; remove min_count, or {fix}"
            )
        return self

    @model_validator(mode="after")
    def _hash_has_no_vocabulary(self) -> Self:
        if self.max_rows is not None and self.hash_rows is not None:
            raise ValueError(
                f"feature {self.name!r}: max_rows is {self.max_rows} and hash_rows is {self.hash_rows}, but a hash gives every "
                "value a row and evicts none; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _numeric_has_one_encoding(self) -> Self:
        if self.kind == "numeric" and [self.buckets is None, self.boundaries is None, not self.standardise].count(False) != 1:
            raise ValueError(
                f"feature {self.name!r} is numeric: set exactly one of buckets (a number), boundaries (a list) and "
                "standardise (true)"
            )
        for boundary, next_boundary in pairwise(self.boundaries or ()):
            if not boundary < next_boundary:
                raise ValueError(
                    f"feature {self.name!r}: boundaries have to increase, but {next_boundary:g} comes after {boundary:g}; "
                    "sort them"
                )
        return self

    def _reject_for_other_kinds(self, setting: str, *, kinds: tuple[FeatureKind, ...]) -> None:
        """Raise ValueError if `setting` is set, but the kind of this feature is not in `kinds`."""
        value = getattr(self, setting)
        if value is not None and value is not False and self.kind not in kinds:
            raise ValueError(
                f"feature {self.name!r}: {setting} is {value!r}, but is only for kind {' or '.join(kinds)}, not "
                f"{self.kind}; remove {setting}, or set kind"
            )


def _reject_duplicate_names(features: tuple[FeatureConfig, ...]) -> None:
    names = [feature.name for feature in features]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{names.count(name)} features are named {name!r}; rename all but one")


class FeatureTableConfig(Settings):
    """A parquet table with one row per user or item, and its features."""

    paths: Paths = Field(min_length=1, description="Parquet file or glob, or a list of them")
    id_column: ColumnName = Field(description="Column with the ids, which have the same type as the ids in the log")
    features: tuple[FeatureConfig, ...] = Field(min_length=1, max_length=1_000, description="Features to read from the table")

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        _reject_duplicate_names(self.features)
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns to read, without repeats."""
        return tuple(dict.fromkeys([self.id_column, *(column for feature in self.features for column in feature.columns)]))


RESERVED_ITEM_COLUMNS = ("row", "item_id", "title", "vector")
"""Names of columns that nightjar itself writes to the files with the titles, filter columns and vectors of the items."""


class ItemTableConfig(FeatureTableConfig):
    """A parquet table with one row per item: features, titles, and the columns by which a request can filter items."""

    features: tuple[FeatureConfig, ...] = Field((), max_length=1_000, description="Features to read from the table")
    title_column: ColumnName | None = Field(
        None,
        description="Column with the titles of the items, which `nightjar query` and the page of a decision show. Default: no "
        "titles",
    )
    filter_columns: tuple[ColumnName, ...] = Field(
        (),
        max_length=100,
        description="Columns by which a request can filter the recommended items, such as a price or a category. The columns "
        "can contain integers, floats, strings, booleans, dates or timestamps. Default: no filters",
    )

    @model_validator(mode="after")
    def _has_a_column(self) -> Self:
        if not self.features and self.title_column is None and not self.filter_columns:
            raise ValueError(
                "items has neither features nor title_column nor filter_columns; declare a feature, or set one of these columns"
            )
        for column in self.filter_columns:
            if column in RESERVED_ITEM_COLUMNS or self.filter_columns.count(column) > 1:
                problem = "is a reserved name" if column in RESERVED_ITEM_COLUMNS else "occurs twice"
                raise ValueError(f"filter_columns: {column!r} {problem}; rename the column, or remove it")
        return self


class FeaturesConfig(Settings):
    """Features of users, items and events."""

    users: FeatureTableConfig | None = Field(None, description="Features of users, from a feature table")
    items: ItemTableConfig | None = Field(None, description="Features and titles of items, from a feature table")
    context: tuple[FeatureConfig, ...] = Field(
        (), max_length=1_000, description="Features of events, from columns of the interaction log"
    )

    @model_validator(mode="after")
    def _has_features(self) -> Self:
        _reject_duplicate_names(self.context)
        if self.users is None and self.items is None and not self.context:
            raise ValueError("no feature is declared; declare one under users, items or context, or remove features")
        return self

    @property
    def by_key(self) -> dict[str, FeatureConfig]:
        """The features by key, which is <owner_kind>.<name>."""
        features_by_owner_kind = {
            "user": () if self.users is None else self.users.features,
            "item": () if self.items is None else self.items.features,
            "context": self.context,
        }
        return {
            f"{owner_kind}.{feature.name}": feature
            for owner_kind, features in features_by_owner_kind.items()
            for feature in features
        }

    @property
    def context_columns(self) -> tuple[str, ...]:
        """All columns of the interaction log to read, without repeats."""
        return tuple(dict.fromkeys(column for feature in self.context for column in feature.columns))
