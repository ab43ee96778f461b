"""SQL of the view `raw` in Spark: the rows of the new files, with `position` and `before_1970`; see sql/checks.py.

Files whose columns have the same types form a group. Spark reads each group with one schema.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import duckdb
import pyarrow as pa
from pyspark.sql import types as t

from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.duckdb_engine.raw_log import raw_log_sql
from recsys_core.ingest.log.engine import LogFiles
from recsys_core.ingest.log.spark_engine.dialect import column_types, hash_sql, spark_type
from recsys_core.ingest.log.spark_engine.session import SparkLogSession
from recsys_core.ingest.log.spark_engine.tables import table_frame
from recsys_core.ingest.log.sql.checks import column_by_alias, hive_columns, hive_keys_sql, order_position_sql
from recsys_core.parquet.duckdb_session import quoted
from recsys_core.units import DAY_US

_US_PER_TICK = {"s": 1_000_000, "ms": 1_000, "us": 1}


@dataclass(frozen=True)
class _FileGroup:
    """Input files whose columns have the same types."""

    indices: Sequence[int]
    """Indices of the files in LogFiles."""
    schema: t.StructType
    """The columns of the config that are not hive keys."""
    time_type: pa.DataType | None
    """Arrow type of the timestamp column; None if there are no timestamps."""
    order_type: pa.DataType | None
    """Arrow type of the order column, for the files of all groups; None if there is no order column."""


def create_raw(session: SparkLogSession, config: InteractionsConfig, files: LogFiles) -> pa.Schema:
    """Create the view `raw`. Return the types of the context columns in the event store.

    Raise InputError for a column that Spark cannot read.
    """
    hive_keys = sorted(hive_columns(config, files.sources))
    groups, groups_sql = _file_groups(config, files, hive_keys=hive_keys), []
    context_schema = _context_schema(config, files, groups)
    for group_index, group in enumerate(groups):
        files_view_name = f"files_{group_index}"
        if files.sources[0].table is not None:
            frame_by_index = {index: table_frame(session.spark, files.sources[index]) for index in group.indices}
            session.create_tables_view(files_view_name, frame_by_index, columns=group.schema.names)
        else:
            path_by_index = {index: files.paths[index] for index in group.indices}
            session.create_files_view(files_view_name, path_by_index, schema=group.schema)
        keys_sql = ""
        if hive_keys:
            sources = [files.sources[index] for index in group.indices]
            session.create_view(f"keys_{group_index}", hive_keys_sql(sources, hive_keys, indices=group.indices))
            keys_sql = f" JOIN keys_{group_index} AS keys ON file.file_index = keys.file_index"
        files_sql = f"{files_view_name} AS file{keys_sql}"
        groups_sql.append(_group_sql(config, group, files_sql=files_sql, hive_keys=hive_keys, context_schema=context_schema))
    session.create_spark_view("raw", " UNION ALL ".join(groups_sql))
    return context_schema


def _context_schema(config: InteractionsConfig, files: LogFiles, groups: Sequence[_FileGroup]) -> pa.Schema:
    """Return the types of the context columns in the event store: with both engines, the types that DuckDB returns."""
    if not config.context_columns:
        return pa.schema([])
    first_indices = [group.indices[0] for group in groups]
    sources, paths = [files.sources[index] for index in first_indices], [files.paths[index] for index in first_indices]
    context_columns_sql = ", ".join(f"context_{index}" for index in range(len(config.context_columns)))
    query = f"SELECT {context_columns_sql} FROM ({raw_log_sql(config, replace(files, sources=sources, paths=paths))}) LIMIT 0"
    with duckdb.connect() as connection:
        return connection.sql(query).to_arrow_table().schema


def _file_groups(config: InteractionsConfig, files: LogFiles, *, hive_keys: Sequence[str]) -> list[_FileGroup]:
    """Return the groups of files whose columns have the same types."""
    columns = [column for column in config.columns if column not in hive_keys]
    indices_by_types: dict[tuple[pa.DataType | None, tuple[t.DataType, ...]], list[int]] = {}
    for index, source in enumerate(files.sources):
        spark_types = column_types(source, columns)
        time_column = config.timestamp_column
        time_type = None if time_column is None or time_column in hive_keys else source.schema.field(time_column).type
        indices_by_types.setdefault((time_type, spark_types), []).append(index)
    return [
        _FileGroup(
            indices,
            t.StructType(list(map(t.StructField, columns, spark_types))),
            time_type or (files.type_by_column[config.timestamp_column] if config.timestamp_column else None),
            files.type_by_column[config.order_column] if config.order_column else None,
        )
        for (time_type, spark_types), indices in indices_by_types.items()
    ]


def _group_sql(
    config: InteractionsConfig, group: _FileGroup, *, files_sql: str, hive_keys: Sequence[str], context_schema: pa.Schema
) -> str:
    """Return SQL for the rows of one group, with the columns of `raw`."""
    name_by_alias = column_by_alias(config)
    select_list = [
        f"{'keys' if column in hive_keys else 'file'}.{quoted(column, quote='`')} AS `{alias}`"
        for alias, column in name_by_alias.items()
    ]
    type_by_column = {field.name: field.dataType for field in group.schema}
    replacements_sql = [
        f"CAST({alias} AS INT) AS {alias}"  # Spark cannot compare a boolean with a number
        for alias in ("sequence", "label", "weight")
        if isinstance(type_by_column.get(name_by_alias.get(alias, "")), t.BooleanType)
    ]
    replacements_sql += [
        f"{_context_sql(field, type_by_column.get(name_by_alias[field.name]))} AS {field.name}" for field in context_schema
    ]
    replaced_aliases = {"time", *(sql.rpartition(" ")[2] for sql in replacements_sql)}
    unchanged_columns_sql = [f"`{alias}`" for alias in name_by_alias if alias not in replaced_aliases]
    computed_columns_sql = [f"{_position_sql(config, group, type_by_column)} AS position"]
    if config.timestamp_column is not None:
        # UNION ALL needs equal types, but the times of two groups may have different types. The checks read only whether a
        # time is null, so the column `time` is true or null.
        is_integer = pa.types.is_integer(group.time_type)  # for an integer above 2^63, _ticks_sql would be null
        ticks_sql = "time" if is_integer else _ticks_sql(group, type_by_column.get(config.timestamp_column))
        computed_columns_sql += ["CASE WHEN time IS NOT NULL THEN true END AS time", f"{ticks_sql} < 0 AS before_1970"]
    return (
        f"SELECT {', '.join([*unchanged_columns_sql, *replacements_sql, 'source', '`row`', *computed_columns_sql])} "
        f"FROM (SELECT {', '.join(select_list)}, file.file_index AS source, file.file_row_number AS `row` FROM {files_sql})"
    )


def _context_sql(field: pa.Field, column_type: t.DataType | None) -> str:
    """Return SQL that casts a context column of one group to its type in the event store.

    Spark has no type for times in nanoseconds. It reads and writes them as integers.
    """
    is_time = pa.types.is_timestamp(field.type)
    if is_time and field.type.unit == "ns" and isinstance(column_type, t.TimestampType | t.TimestampNTZType):
        return f"(unix_micros(CAST({field.name} AS TIMESTAMP)) * 1000)"
    if is_time and field.type.unit != "ns" and isinstance(column_type, t.LongType):
        return f"timestamp_micros({_ns_to_us_sql(field.name)})"
    stored_type = spark_type(field.type)
    assert stored_type is not None, field
    return f"CAST({field.name} AS {stored_type.simpleString()})"


def _ns_to_us_sql(ns_sql: str) -> str:
    """Return SQL that converts nanoseconds to microseconds and rounds down, whereas DIV rounds towards 0."""
    return f"({ns_sql} DIV 1000 - CAST({ns_sql} % 1000 < 0 AS INT))"


def _position_sql(config: InteractionsConfig, group: _FileGroup, type_by_column: dict[str, t.DataType]) -> str:
    """Return SQL for the sort key of a user's events; see raw_log.py of the DuckDB engine."""
    if config.order_column is not None:
        assert group.order_type is not None
        return order_position_sql(group.order_type)
    if config.timestamp_column is None:
        return f"shiftrightunsigned({hash_sql('CAST(`user` AS STRING)', 'CAST(item AS STRING)')}, 1)"
    time_type, column_type = group.time_type, type_by_column.get(config.timestamp_column)
    ticks_sql = _ticks_sql(group, column_type)
    if pa.types.is_integer(time_type):
        if config.timestamp_unit == "ns":
            return f"({ticks_sql} DIV 1000)"
        return f"try_multiply(TRY_CAST(time AS BIGINT), {_US_PER_TICK[config.timestamp_unit]}L)"
    if pa.types.is_date(time_type):
        return f"try_multiply({ticks_sql}, {DAY_US}L)"
    if isinstance(column_type, t.LongType):  # nanoseconds
        return _ns_to_us_sql(ticks_sql)
    return ticks_sql


def _ticks_sql(group: _FileGroup, column_type: t.DataType | None) -> str:
    """Return SQL for the time since 1970 as an integer, in the unit of its type."""
    if pa.types.is_date(group.time_type):
        return "CAST(unix_date(time) AS BIGINT)"
    if isinstance(column_type, t.TimestampType | t.TimestampNTZType):
        return "unix_micros(CAST(time AS TIMESTAMP))"
    return "TRY_CAST(time AS BIGINT)"
