"""Feature tables before and while they are read: columns and types from the footers, then every value checked by DuckDB."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from recsys_core.data.features.config import FeatureConfig, FeaturesConfig, Side
from recsys_core.errors import SHOWN_CHARACTERS, InputError, shown
from recsys_core.manifests import IdType
from recsys_core.parquet.columns import id_type, is_list, is_text, require_column
from recsys_core.parquet.duckdb_session import SQL_TYPE, quoted, scan_all
from recsys_core.parquet.guards import require_sidecars
from recsys_core.parquet.sources import Source, open_sources
from recsys_core.units import FLOAT32_MAX, INT64_MAX


@dataclass(frozen=True)
class FeatureTable:
    """Files of one side with their features, checked. `id_column` is None for the context, whose rows are the events."""

    side: Side
    setting: str
    sources: tuple[Source, ...]
    features: tuple[FeatureConfig, ...]
    value_type: dict[str, IdType]
    """How the values of each feature but the numeric ones are kept, by its name."""
    id_column: str | None = None
    id_type: IdType | None = None
    sidecars: bool = False
    """Whether each file has its sha256 next to it."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read, each once."""
        ids = () if self.id_column is None else (self.id_column,)
        return tuple(dict.fromkeys([*ids, *(name for feature in self.features for name in feature.columns)]))


def check_features(
    config: FeaturesConfig,
    *,
    user_id_type: IdType,
    item_id_type: IdType,
    log: Sequence[Source],
    data_root: Path | None = None,
) -> tuple[FeatureTable, ...]:
    """Checks files, columns and types without reading a row; raises InputError.

    log: the files that hold the columns of the context. data_root: where every file of a table has to lie.
    """
    tables = []
    sides: tuple[tuple[Side, IdType], ...] = (("user", user_id_type), ("item", item_id_type))
    for side, of_log in sides:
        declared = config.users if side == "user" else config.items
        if declared is None:
            continue
        setting = f"features.{side}s"
        sources = open_sources(declared.paths, setting=f"{setting}.paths", data_root=data_root)
        if declared.checksums == "sidecar":
            require_sidecars(sources)
        ids = id_type(sources, declared.id_column, setting=f"{setting}.id_column")
        if ids != of_log:
            raise InputError(
                f"{sources[0].name}: column {declared.id_column!r} is {ids}, but the {side}s of the log are {of_log}; "
                "write both as one type"
            )
        types = _value_types(sources, declared.features, setting=setting)
        table = FeatureTable(
            side, setting, sources, declared.features, types, declared.id_column, ids, declared.checksums == "sidecar"
        )
        tables.append(_unambiguous(table))
    if config.context:
        types = _value_types(log, config.context, setting="features.context")
        tables.append(_unambiguous(FeatureTable("context", "features.context", tuple(log), config.context, types)))
    return tuple(tables)


def _unambiguous(table: FeatureTable) -> FeatureTable:
    """DuckDB's names know no case: of Genre and genre it would read the first, whichever is meant."""
    for source in table.sources:
        for column in table.columns:
            if table.side != "context" and column in source.partition:
                raise InputError(
                    f"{source.name}: column {column!r} is a key of the folder names, but {table.setting} reads what is in the "
                    "file; write it as a column too"
                )
            same = [name for name in source.schema.names if name.lower() == column.lower()]
            if len(same) > 1:
                raise InputError(f"{source.name}: columns {same} differ by case alone; rename all but {column!r}")
    return table


def _value_types(sources: Sequence[Source], features: Sequence[FeatureConfig], *, setting: str) -> dict[str, IdType]:
    types: dict[str, IdType] = {}
    for feature in features:
        where = f"{setting}, feature {feature.name!r}"
        kinds = [_value_type(source, feature, where=where) for source in sources]
        for source, kind in zip(sources, kinds, strict=True):
            if kind != kinds[0]:
                raise InputError(
                    f"{source.name}: column {feature.source_column!r} holds {kind}, but {kinds[0]} in {sources[0].name}; "
                    "write one type"
                )
        if kinds[0] is not None:
            types[feature.name] = kinds[0]
    return types


def _value_type(source: Source, feature: FeatureConfig, *, where: str) -> IdType | None:
    """int64 or string; None for a number that is put into buckets."""
    column = feature.source_column
    kind = require_column(source, column, setting=where)
    if feature.kind == "numeric":
        if not _is_number(kind):
            raise _wrong(source, column, kind, where, "numeric needs a number; cast it, or set kind to categorical")
        return None
    value = kind
    if feature.is_list:
        if not is_list(kind):
            raise _wrong(source, column, kind, where, f"{feature.kind} needs a list; write one, or set kind to categorical")
        value = kind.value_type
    value = value.value_type if pa.types.is_dictionary(value) else value
    if feature.weight_column is not None:
        weights = require_column(source, feature.weight_column, setting=where)
        if not is_list(weights) or not _is_number(weights.value_type):
            raise _wrong(source, feature.weight_column, weights, where, "weights are a list of numbers; cast it")
    if pa.types.is_integer(value):
        return "int64"
    if is_text(value):
        return "string"
    if pa.types.is_boolean(value):
        return "string"
    raise _wrong(source, column, kind, where, f"{feature.kind} needs integers, strings or booleans; cast it")


def _wrong(source: Source, column: str, kind: pa.DataType, where: str, way_out: str) -> InputError:
    return InputError(f"{source.name}: column {column!r} is {str(kind)[:SHOWN_CHARACTERS]} ({where}); {way_out}")


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


@dataclass(frozen=True)
class _Fault:
    """What a row must not be: an SQL condition over the columns of the file."""

    column: str
    condition: str
    complaint: str
    way_out: str


def refuse_bad_rows(connection: duckdb.DuckDBPyConnection, table: FeatureTable, *, paths: Sequence[Path]) -> None:
    """Reads the columns once; InputError for the first kind of bad row there is, with its first row and how many there are.

    paths: a local file for each source of the table.
    """
    faults = list(_faults(table))
    if faults:
        counts = connection.sql(
            f"SELECT {', '.join(f'count(*) FILTER ({fault.condition})' for fault in faults)} FROM {scan_all(paths)}"
        ).fetchall()[0]
        for fault, count in zip(faults, counts, strict=True):
            if count:
                place = _first(connection, table, fault.column, fault.condition, paths=paths)
                raise InputError(f"{place}: {fault.complaint}, {_rows(count)}; {fault.way_out}")
    if table.id_column is not None:
        _refuse_doubles(connection, table, table.id_column, paths=paths)


def _faults(table: FeatureTable) -> Iterator[_Fault]:
    if table.id_column is not None:
        column = quoted(table.id_column)
        yield _Fault(table.id_column, f"{column} IS NULL", "the id is null", "drop the row")
        if table.id_type == "int64":
            yield _Fault(table.id_column, f"{column} > {INT64_MAX}", "the id is over int64", "write it as a string")
    for feature in table.features:
        name, column = feature.source_column, quoted(feature.source_column)
        if table.value_type.get(feature.name) == "int64":
            large = (
                f"len(list_filter({column}, lambda x: x > {INT64_MAX})) > 0" if feature.is_list else f"{column} > {INT64_MAX}"
            )
            yield _Fault(name, large, "the value is over int64", "write it as a string")
        if feature.weight_column is not None:
            weight = quoted(feature.weight_column)
            yield _Fault(
                feature.weight_column,
                f"coalesce(len({column}), 0) <> coalesce(len({weight}), 0)",
                f"the list of weights is not as long as the list in {name!r}",
                "give every value one weight",
            )
            # DuckDB holds NaN for the largest number.
            yield _Fault(
                feature.weight_column,
                f"len(list_filter({weight}, lambda x: x IS NULL OR x < 0 OR x > {FLOAT32_MAX})) > 0",
                "a weight is null, negative or not finite as float32",
                "mend or drop the row",
            )


def _refuse_doubles(connection: duckdb.DuckDBPyConnection, table: FeatureTable, column: str, *, paths: Sequence[Path]) -> None:
    name = quoted(column)
    doubles = f"SELECT {name} AS id FROM {scan_all(paths)} GROUP BY {name} HAVING count(*) > 1"
    count, first = connection.sql(f"SELECT count(*), min(id) FROM ({doubles})").fetchall()[0]
    if count:
        mark = str(first) if table.id_type == "int64" else quoted(first, mark="'")
        first_place = _first(connection, table, column, f"{name} = {mark}", paths=paths)
        raise InputError(f"{first_place}: the id stands in more rows than one, as do {count:,} ids in all; keep one row per id")


def _first(
    connection: duckdb.DuckDBPyConnection, table: FeatureTable, column: str, condition: str, *, paths: Sequence[Path]
) -> str:
    """File, column, row and value of the first row that `condition` holds for."""
    for source, path in zip(table.sources, paths, strict=True):
        # The window comes before the condition, so that it numbers the rows of the file.
        found = connection.sql(
            f'SELECT "nightjar row", CAST({quoted(column)} AS VARCHAR) FROM '
            f'(SELECT row_number() OVER () - 1 AS "nightjar row", * FROM '
            f'{scan_all([path])}) WHERE {condition} ORDER BY "nightjar row" LIMIT 1'
        ).fetchall()
        if found:
            row, value = found[0]
            return f"{source.name}: column {column!r}, row {row}, {shown(value)}"
    raise AssertionError(f"no row of {table.setting} is what was counted: {condition}")


def _rows(count: int) -> str:
    return "in this row alone" if count == 1 else f"as in {count:,} rows in all"


def value_sql(feature: FeatureConfig, value_type: IdType | None) -> str:
    """The feature's column as its values are kept."""
    kind = "DOUBLE" if value_type is None else SQL_TYPE[value_type]
    return f"CAST({quoted(feature.source_column)} AS {kind}{'[]' if feature.is_list else ''})"
