"""SQL for the new files of the log: view `raw` has their rows, and `write_events` writes the good rows to a *part*.

A part is one parquet file.

The view has the columns user, item, position, label, weight and context_<n>, the index of the row's file (`source`) and the
index of the row in this file (`row`).
"""

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import duckdb
import pyarrow as pa

from recsys_core.ingest.log.config import FileSplit, InteractionsConfig
from recsys_core.ingest.log.duckdb_engine.vocabulary import id_condition_sql, row_sql_type
from recsys_core.ingest.log.engine import LogFiles
from recsys_core.manifests import IdType
from recsys_core.parquet.duckdb_session import SQL_TYPE, fetch_count, quoted, scan_all_sql, scan_sql
from recsys_core.parquet.sources import Source

TO_MICROSECONDS_SQL = {"s": "* 1000000", "ms": "* 1000", "us": "", "ns": "// 1000"}
"""SQL that converts an integer time to microseconds, by the unit of the time."""
PAIR_HASH_ARGUMENTS_SQL, ITEM_HASH_ARGUMENTS_SQL = '"user"::VARCHAR, item::VARCHAR', "item::VARCHAR"
"""Arguments of the SQL function hash. Ids are hashed as strings, because the hash of a number depends on its width."""


def raw_log_sql(config: InteractionsConfig, files: LogFiles) -> str:
    """Return SQL for the log with fixed column names, so that no later query has to quote the user's names."""
    sources, type_by_column = files.sources, files.type_by_column
    column_by_alias = {"user": config.user_column, "item": config.item_column, "time": config.timestamp_column}
    column_by_alias |= {"sequence": config.order_column, "label": config.label_column, "weight": config.weight_column}
    column_by_alias |= {f"context_{index}": column for index, column in enumerate(config.context_columns)}
    hive_columns = {name for source in sources for name in source.partition_values if name not in source.schema.names} & set(
        config.columns
    )
    select_list = [
        f'{"keys" if column in hive_columns else "file"}.{quoted(column)} AS "{alias}"'
        for alias, column in column_by_alias.items()
        if column
    ]
    files_sql = f"{scan_all_sql(files.paths)} AS file"
    if hive_columns:
        files_sql += f" JOIN ({_hive_keys_sql(sources, sorted(hive_columns))}) AS keys ON file.file_index = keys.file_index"
    raw_columns_sql = (
        f"SELECT {', '.join(select_list)}, file.file_index AS source, file.file_row_number AS row FROM {files_sql}"
    )
    before_1970_sql = (
        f", {_before_1970_sql(type_by_column[config.timestamp_column])} AS before_1970" if config.timestamp_column else ""
    )
    return f"SELECT *, {_position_sql(config, type_by_column)} AS position{before_1970_sql} FROM ({raw_columns_sql})"


def _hive_keys_sql(sources: Sequence[Source], keys: Sequence[str]) -> str:
    """Return SQL for a table with the hive keys `keys` of each file, as dates, integers or strings."""
    rows_sql = [
        f"({index}, {', '.join(_constant_sql(source.partition_value(key)) for key in keys)})"
        for index, source in enumerate(sources)
    ]
    return f"SELECT * FROM (VALUES {', '.join(rows_sql)}) AS t(file_index, {', '.join(quoted(key) for key in keys)})"


def _constant_sql(value: int | date | str) -> str:
    if isinstance(value, int):
        return f"{value}::BIGINT"
    return f"DATE '{value.isoformat()}'" if isinstance(value, date) else quoted(value, quote="'")


def _position_sql(config: InteractionsConfig, type_by_column: Mapping[str, pa.DataType]) -> str:
    """Return SQL for the sort key of a user's events: the time in microseconds, or the order column.

    In a log with neither, the sort key is a hash of the user and the item.
    """
    if config.order_column is not None:
        return "TRY(sequence::BIGINT)" if pa.types.is_integer(type_by_column[config.order_column]) else "sequence::DOUBLE"
    if config.timestamp_column is None:
        return f"(hash({PAIR_HASH_ARGUMENTS_SQL}) >> 1)::BIGINT"
    data_type = type_by_column[config.timestamp_column]
    if pa.types.is_integer(data_type):
        return f"TRY(CAST(time AS BIGINT) {TO_MICROSECONDS_SQL[config.timestamp_unit]})"
    has_time_zone = pa.types.is_timestamp(data_type) and data_type.tz is not None
    # The cast is needed because epoch_us does not accept nanoseconds with a time zone.
    return f"TRY(epoch_us(time::{'TIMESTAMPTZ' if has_time_zone else 'TIMESTAMP'}))"


def _before_1970_sql(data_type: pa.DataType) -> str:
    """Return SQL that is true for a time before 1970. It also works for a time whose `position` is null.

    The position is null if the time does not fit into 64 bits of microseconds.
    """
    if pa.types.is_integer(data_type):
        return "time < 0"
    has_time_zone = pa.types.is_timestamp(data_type) and data_type.tz is not None
    return "time::TIMESTAMPTZ < TIMESTAMPTZ '1970-01-01 00:00:00+00'" if has_time_zone else "time < DATE '1970-01-01'"


def write_events(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    *,
    part_path: Path,
    kept_row_sql: str,
    positive_row_sql: str | None,
    id_type_by_side: Mapping[str, IdType],
) -> int:
    """Write the rows of `raw` that `kept_row_sql` selects to the file `part_path`, with codes in place of ids.

    positive_row_sql: SQL that is true for the events; None: all written rows are events, and there is no column `is_negative`.

    Return how many of them have a position and, if there is a weight column, a weight.
    """
    # TRY_CAST: DuckDB may cast a bad row before the filter removes it.
    id_sql_by_side = {side: f'TRY_CAST(raw."{side}" AS {SQL_TYPE[id_type]})' for side, id_type in id_type_by_side.items()}
    extra_columns_sql = ["TRY_CAST(weight AS FLOAT) AS weight"] if config.weight_column else []
    extra_columns_sql += [f"context_{index}" for index in range(len(config.context_columns))]
    extra_columns_sql += [] if positive_row_sql is None else [f"NOT ({positive_row_sql}) AS is_negative"]
    validation_hash_sql = _validation_hash_sql(config)
    extra_columns_sql += [] if validation_hash_sql is None else [f"{validation_hash_sql} AS draw"]
    code_columns_sql = [f'{side[0]}.code::{row_sql_type(connection, side)} AS "{side}"' for side in id_type_by_side]
    columns_sql = ", ".join(["source::INTEGER AS source", *code_columns_sql, "position", *extra_columns_sql])
    joins_sql = [
        f"JOIN {side}_ids {side[0]} ON {id_condition_sql(connection, side, id_sql=id_sql)}"
        for side, id_sql in id_sql_by_side.items()
    ]
    connection.execute(
        f"COPY (SELECT {columns_sql} FROM raw {' '.join(joins_sql)} WHERE {kept_row_sql}) "
        f"TO {quoted(str(part_path), quote=chr(39))} (FORMAT parquet, COMPRESSION lz4_raw)"
    ).fetchall()
    is_complete_sql = "position IS NOT NULL" + (" AND weight IS NOT NULL" if config.weight_column else "")
    return fetch_count(connection, f"SELECT count(*) FILTER ({is_complete_sql}) FROM {scan_sql(part_path)}")


def _validation_hash_sql(config: InteractionsConfig) -> str | None:
    """Return SQL for a number below 1,000,000 that decides whether a training event is held out for validation.

    All events of a pair of user and item, or of an item (see validation_unit), have the same number.
    Return None if no event is held out by a hash.
    """
    if not isinstance(config.split, FileSplit) or config.split.validation_share == 0:
        return None
    hash_arguments_sql = PAIR_HASH_ARGUMENTS_SQL if config.split.validation_unit == "pair" else ITEM_HASH_ARGUMENTS_SQL
    return f"(hash({hash_arguments_sql}, 'validation') % 1000000)::INTEGER"
