"""Schema check of the feature tables: files, columns and types, from the parquet footers alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from recsys_core.errors import MAX_SHOWN_CHARACTERS, InputError
from recsys_core.ingest.features.config import FeatureConfig, FeaturesConfig, FeatureTableConfig, ItemTableConfig, OwnerKind
from recsys_core.manifests import IdType
from recsys_core.parquet.columns import (
    id_type,
    is_list,
    is_text,
    require_column,
    require_equal_types,
    require_same_type_in_files,
    require_unambiguous_case,
    value_type,
)
from recsys_core.parquet.sources import Source, open_sources

ID_TABLES = ("item", "user")
"""Embedding tables with one row per id of the log. The interactions stage checks the pretrained vectors of these tables."""


@dataclass(frozen=True)
class FeatureTable:
    """The files and features of one owner kind (user, item or context), with checked schemas."""

    owner_kind: OwnerKind
    setting: str
    """Config key of the table, for messages."""
    sources: tuple[Source, ...]
    features: tuple[FeatureConfig, ...]
    value_type_by_feature: dict[str, IdType]
    """Type in which the values of a feature are stored, by the name of the feature; numeric features are left out."""
    id_column: str | None = None
    """None for the context, whose rows are the events."""
    id_type: IdType | None = None
    title_column: str | None = None
    """Column with the titles of items."""
    filter_sql_type_by_column: Mapping[str, str] = field(default_factory=dict)
    """SQL type in which each filter column of items is stored, by column."""

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns to read, without repeats."""
        columns = [column for column in (self.id_column, self.title_column) if column is not None]
        columns += self.filter_sql_type_by_column
        columns += [column for feature in self.features for column in feature.columns]
        return tuple(dict.fromkeys(columns))


def open_feature_tables(
    config: FeaturesConfig,
    *,
    user_id_type: IdType,
    item_id_type: IdType,
    context_sources: Sequence[Source],
    allowed_data_root: Path | None = None,
) -> tuple[FeatureTable, ...]:
    """Open the feature tables of the config. Raise InputError for an unusable file or column.

    Args:
        context_sources: files with the columns of the context features.
        allowed_data_root: folder that has to contain every file of a table.
    """
    tables = []
    id_type_by_owner_kind: dict[OwnerKind, IdType] = {"user": user_id_type, "item": item_id_type}
    for owner_kind, log_id_type in id_type_by_owner_kind.items():
        table_config = config.users if owner_kind == "user" else config.items
        if table_config is None:
            continue
        setting = f"features.{owner_kind}s"
        sources = open_sources(table_config.paths, setting=f"{setting}.paths", allowed_data_root=allowed_data_root)
        table_id_type = id_type(sources, table_config.id_column, setting=f"{setting}.id_column")
        require_equal_types(
            table_id_type,
            subject=f"{sources[0].name}: column {table_config.id_column!r}",
            other_type=log_id_type,
            other_subject=f"the {owner_kind} id of the log",
        )
        table = FeatureTable(
            owner_kind,
            setting,
            sources,
            table_config.features,
            _value_types(sources, table_config.features, setting=setting),
            table_config.id_column,
            table_id_type,
            _title_column(table_config, sources, setting=setting),
            _filter_sql_types(table_config, sources, setting=setting),
        )
        _check_column_names(table)
        tables.append(table)
    if config.context:
        setting = "features.context"
        value_types = _value_types(context_sources, config.context, setting=setting)
        tables.append(FeatureTable("context", setting, tuple(context_sources), config.context, value_types))
        _check_column_names(tables[-1])
    return tuple(tables)


def _title_column(config: FeatureTableConfig, sources: Sequence[Source], *, setting: str) -> str | None:
    """Return the column with the titles; raise InputError if a file does not have it as text."""
    if not isinstance(config, ItemTableConfig) or config.title_column is None:
        return None
    for source in sources:
        data_type = require_column(source, config.title_column, setting=f"{setting}.title_column")
        if not is_text(value_type(data_type)):
            raise _type_error(source, config.title_column, data_type, f"{setting}.title_column", "titles are strings; cast it")
    return config.title_column


def _filter_sql_types(config: FeatureTableConfig, sources: Sequence[Source], *, setting: str) -> dict[str, str]:
    """Return the SQL type of each filter column; raise InputError if it is missing or unsuitable in a file."""
    sql_type_by_column = {}
    for column in config.filter_columns if isinstance(config, ItemTableConfig) else ():
        column_setting = f"{setting}.filter_columns"
        require_same_type_in_files(sources, column, setting=column_setting)
        for source in sources:
            data_type = value_type(require_column(source, column, setting=column_setting))
            sql_type = next((sql_type for is_type, sql_type in _FILTER_SQL_TYPES if is_type(data_type)), None)
            if sql_type is None or pa.types.is_uint64(data_type):
                fix = "filters need integers up to int64, floats, strings, booleans, dates or timestamps; cast it"
                raise _type_error(source, column, data_type, column_setting, fix)
            sql_type_by_column[column] = sql_type
    return sql_type_by_column


_FILTER_SQL_TYPES: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pa.types.is_integer, "BIGINT"),
    (pa.types.is_floating, "DOUBLE"),
    (is_text, "VARCHAR"),
    (pa.types.is_boolean, "BOOLEAN"),
    (lambda data_type: pa.types.is_timestamp(data_type) and data_type.tz is not None, "TIMESTAMPTZ"),
    (lambda data_type: pa.types.is_timestamp(data_type) or pa.types.is_date(data_type), "TIMESTAMP"),
)
"""Pairs of a type test, and the SQL type for filter columns that pass the test. The first such pair is used."""


def check_feature_vectors(tables: Sequence[FeatureTable], *, id_type_by_table: Mapping[str, IdType]) -> None:
    """Check the pretrained vectors of feature values, which need a feature with a vocabulary.

    Args:
        id_type_by_table: type of the ids of the vectors, by the name of the embedding table.

    Raises:
        InputError: the embedding table is unknown, its feature is numeric or hashed, or the ids of the vectors have another
            type than the values of the feature.
    """
    table_and_feature_by_key = {
        f"{table.owner_kind}.{feature.name}": (table, feature) for table in tables for feature in table.features
    }
    for table_name, vector_id_type in id_type_by_table.items():
        if table_name in ID_TABLES:
            continue
        if table_name not in table_and_feature_by_key:
            raise InputError(
                f"embeddings: vectors are given for table {table_name!r}, but the tables are "
                f"{', '.join([*ID_TABLES, *table_and_feature_by_key])}; set table to one of these, or declare the feature"
            )
        table, feature = table_and_feature_by_key[table_name]
        if feature.kind == "numeric" or feature.hash_rows is not None:
            encoding, fix = ("numeric", "kind to categorical") if feature.kind == "numeric" else ("hashed", "hash_rows to null")
            raise InputError(
                f"embeddings: vectors are given for table {table_name!r}, but feature {feature.name!r} of {table.setting} is "
                f"{encoding}: a row of its table does not belong to a single value; set {fix}, or remove the vectors"
            )
        require_equal_types(
            table.value_type_by_feature[feature.name],
            subject=f"{table.sources[0].name}: column {feature.source_column!r}",
            other_type=vector_id_type,
            other_subject=f"the id of the {table_name} vectors",
        )


def _check_column_names(table: FeatureTable) -> None:
    for source in table.sources:
        for column in table.columns:
            if table.owner_kind != "context" and column in source.partition_values:
                raise InputError(
                    f"{source.name}: column {column!r} of {table.setting} is also a key in a folder name; write it as a "
                    "column, and remove the key from the folder names"
                )
        require_unambiguous_case(source, table.columns)


def _value_types(sources: Sequence[Source], features: Sequence[FeatureConfig], *, setting: str) -> dict[str, IdType]:
    """Return the type in which the values of each feature are stored, by name; numeric features are left out."""
    type_by_feature: dict[str, IdType] = {}
    first_source = sources[0]
    for feature in features:
        column = feature.source_column
        stored_types = [_stored_type(source, feature, setting=f"{setting}, feature {feature.name!r}") for source in sources]
        for source, stored_type in zip(sources, stored_types, strict=True):
            require_equal_types(
                stored_type,
                subject=f"{source.name}: column {column!r}",
                other_type=stored_types[0],
                other_subject=f"column {column!r} of {first_source.name}",
            )
        if stored_types[0] is not None:
            type_by_feature[feature.name] = stored_types[0]
    return type_by_feature


def _stored_type(source: Source, feature: FeatureConfig, *, setting: str) -> IdType | None:
    """Return the type in which the values of a feature are stored; None for a numeric feature."""
    column = feature.source_column
    data_type = require_column(source, column, setting=setting)
    if feature.kind == "numeric":
        if not _is_number(data_type):
            raise _type_error(
                source, column, data_type, setting, f"numeric needs a number; cast it{_categorical_fix(data_type)}"
            )
        return None
    element_type = data_type
    if feature.is_list:
        if not is_list(data_type):
            fix = f"{feature.kind} needs a list; write one{_categorical_fix(data_type)}"
            raise _type_error(source, column, data_type, setting, fix)
        element_type = data_type.value_type
    if feature.weight_column is not None:
        weight_type = require_column(source, feature.weight_column, setting=setting)
        if not is_list(weight_type) or not _is_number(weight_type.value_type):
            raise _type_error(source, feature.weight_column, weight_type, setting, "weights are a list of numbers; cast it")
    stored_type = _type_of_categories(element_type)
    if stored_type is None:
        raise _type_error(source, column, data_type, setting, f"{feature.kind} needs integers, strings or booleans; cast it")
    return stored_type


def _type_of_categories(data_type: pa.DataType) -> IdType | None:
    """Return the type in which categorical values of this type are stored; None for an unsuitable type."""
    data_type = value_type(data_type)
    if pa.types.is_integer(data_type):
        return "int64"
    return "string" if is_text(data_type) or pa.types.is_boolean(data_type) else None


def _categorical_fix(data_type: pa.DataType) -> str:
    return ", or set kind to categorical" if _type_of_categories(data_type) is not None else ""


def _type_error(source: Source, column: str, data_type: pa.DataType, setting: str, fix: str) -> InputError:
    return InputError(f"{source.name}: column {column!r} is {str(data_type)[:MAX_SHOWN_CHARACTERS]} ({setting}); {fix}")


def _is_number(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(data_type) or pa.types.is_floating(data_type) or pa.types.is_decimal(data_type))
