"""What the user says about features of users, items and events beyond their ids."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from recsys_core.config import MANY, Checksums, Column, Paths, Settings

FeatureKind = Literal["categorical", "list", "weighted_list", "numeric"]
Side = Literal["user", "item", "context"]
Boundary = Annotated[float, Field(ge=-1e300, le=1e300)]
MOST_ROWS = 2**31 - 2
"""Rows are stored as int32, and row 0 is taken."""


class FeatureConfig(Settings):
    """One feature: a column, and how its values become rows of an embedding table. Row 0 is for what has no row of its own."""

    name: str = Field(
        min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_]+$", description="name of the feature; letters, digits and _"
    )
    kind: FeatureKind = Field(
        "categorical", description="one value, a list of values, a list with a weight per value, or a number"
    )
    column: Column | None = Field(None, description="column that holds it; empty: the one called like the feature")
    weight_column: Column | None = Field(
        None, description="weighted_list: column with the list of weights (finite, not negative)"
    )
    min_count: int = Field(1, ge=1, le=MANY, description="values that occur less often get no row of their own")
    hash_rows: int | None = Field(
        None, ge=1, le=MOST_ROWS, description="rows that values are hashed into, instead of a vocabulary"
    )
    max_values: int | None = Field(
        None, ge=1, le=1_000_000, description="list and weighted_list: the first N values of a list are kept"
    )
    buckets: int | None = Field(
        None, ge=2, le=1_000_000, description="numeric: this many buckets, equally full on the training data"
    )
    boundaries: tuple[Boundary, ...] | None = Field(
        None, min_length=1, description="numeric: where buckets end, ascending; a value on a boundary is in the bucket above"
    )

    standardise: bool = Field(
        False,
        description="numeric: the number itself, less the mean, over the standard deviation of the training data, within +-10",
    )

    @property
    def source_column(self) -> str:
        """The column that is read."""
        return self.column or self.name

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (self.source_column,) if self.weight_column is None else (self.source_column, self.weight_column)

    @property
    def is_list(self) -> bool:
        """Whether a row of the table has any number of values."""
        return self.kind in ("list", "weighted_list")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        self._only_with("weight_column", kinds=("weighted_list",))
        self._only_with("max_values", kinds=("list", "weighted_list"))
        self._only_with("hash_rows", kinds=("categorical", "list", "weighted_list"))
        self._only_with("buckets", kinds=("numeric",))
        self._only_with("boundaries", kinds=("numeric",))
        self._only_with("standardise", kinds=("numeric",))
        if self.kind == "weighted_list" and self.weight_column is None:
            raise ValueError(f"feature {self.name!r} is a weighted_list, but has no weight_column; set it, or kind to list")
        if self.kind == "weighted_list" and self.weight_column == self.source_column:
            raise ValueError(f"feature {self.name!r}: {self.source_column!r} is the column of the values and of the weights")
        if self.kind == "numeric" and [self.buckets is None, self.boundaries is None, not self.standardise].count(False) != 1:
            raise ValueError(
                f"feature {self.name!r} is numeric: set exactly one of buckets (a number), boundaries (a list) and "
                "standardise (true)"
            )
        if self.min_count > 1 and (self.kind == "numeric" or self.hash_rows is not None):
            raise ValueError(
                f"feature {self.name!r}: min_count is {self.min_count}, but only a vocabulary counts; leave it out, or "
                + ("set kind to categorical" if self.kind == "numeric" else "leave hash_rows out")
            )
        bounds = self.boundaries or ()
        for low, high in pairwise(bounds):
            if not low < high:
                raise ValueError(f"feature {self.name!r}: boundaries have to increase, but {high:g} comes after {low:g}")
        return self

    def _only_with(self, setting: str, *, kinds: tuple[FeatureKind, ...]) -> None:
        value = getattr(self, setting)
        if value is not None and value is not False and self.kind not in kinds:
            raise ValueError(
                f"feature {self.name!r}: {setting} is {value!r}, but goes only with kind {' or '.join(kinds)}, not "
                f"{self.kind}; leave {setting} out, or set kind"
            )


def _refuse_doubles(features: tuple[FeatureConfig, ...]) -> None:
    names = [feature.name for feature in features]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ValueError(f"{names.count(double)} features are named {double!r}; rename all but one")


class FeatureTableConfig(Settings):
    """A parquet table with one row per user or item."""

    paths: Paths = Field(min_length=1, description="parquet file or glob, or a list of them")
    id_column: Column = Field(description="column with the id, of the type that the log's ids have")
    checksums: Checksums = "pages"
    features: tuple[FeatureConfig, ...] = Field(min_length=1, max_length=1_000, description="what to read from it")

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        _refuse_doubles(self.features)
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read, each once."""
        return tuple(dict.fromkeys([self.id_column, *(name for feature in self.features for name in feature.columns)]))


class FeaturesConfig(Settings):
    """Features of users, of items, and of the events themselves."""

    users: FeatureTableConfig | None = Field(None, description="features of users, from a table of their own")
    items: FeatureTableConfig | None = Field(None, description="features of items, from a table of their own")
    context: tuple[FeatureConfig, ...] = Field(
        (), max_length=1_000, description="features of an event, from columns of the interaction log"
    )

    @model_validator(mode="after")
    def _has_features(self) -> Self:
        _refuse_doubles(self.context)
        if self.users is None and self.items is None and not self.context:
            raise ValueError("no feature is declared; declare one under users, items or context, or leave features out")
        return self

    @property
    def context_columns(self) -> tuple[str, ...]:
        """Columns of the interaction log that are read, each once."""
        return tuple(dict.fromkeys(name for feature in self.context for name in feature.columns))
