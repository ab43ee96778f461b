"""SQL of the view `raw` in DuckDB: the rows of the new files, with `position` and `before_1970`; see checks.py."""

from collections.abc import Mapping

import pyarrow as pa

from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.engine import LogFiles
from recsys_core.ingest.log.split_config import FileSplit
from recsys_core.ingest.log.sql.checks import column_by_alias, hive_columns, hive_keys_sql, order_position_sql
from recsys_core.parquet.duckdb_session import quoted, scan_all_sql

TO_MICROSECONDS_SQL = {"s": "* 1000000", "ms": "* 1000", "us": "", "ns": "// 1000"}
"""SQL that converts an integer time to microseconds, by the unit of the time."""
PAIR_HASH_ARGUMENTS_SQL, ITEM_HASH_ARGUMENTS_SQL = '"user"::VARCHAR, item::VARCHAR', "item::VARCHAR"
"""Arguments of the SQL function hash. Ids are hashed as strings, because the hash of a number depends on its width."""


def raw_log_sql(config: InteractionsConfig, files: LogFiles) -> str:
    """Return SQL for the log with fixed column names, so that later queries need not quote the column names of the config."""
    sources, type_by_column = files.sources, files.type_by_column
    hive_keys = hive_columns(config, sources)
    select_list = [
        f'{"keys" if column in hive_keys else "file"}.{quoted(column)} AS "{alias}"'
        for alias, column in column_by_alias(config).items()
    ]
    files_sql = f"{scan_all_sql(files.paths)} AS file"
    if hive_keys:
        files_sql += f" JOIN ({hive_keys_sql(sources, sorted(hive_keys))}) AS keys ON file.file_index = keys.file_index"
    raw_columns_sql = (
        f"SELECT {', '.join(select_list)}, file.file_index AS source, file.file_row_number AS row FROM {files_sql}"
    )
    before_1970_sql = (
        f", {_before_1970_sql(type_by_column[config.timestamp_column])} AS before_1970" if config.timestamp_column else ""
    )
    return f"SELECT *, {_position_sql(config, type_by_column)} AS position{before_1970_sql} FROM ({raw_columns_sql})"


def _position_sql(config: InteractionsConfig, type_by_column: Mapping[str, pa.DataType]) -> str:
    """Return SQL for the sort key of a user's events: the time in microseconds, or the order column.

    In a log with neither of them, the sort key is a hash of the user and the item.
    """
    if config.order_column is not None:
        return order_position_sql(type_by_column[config.order_column])
    if config.timestamp_column is None:
        return f"(hash({PAIR_HASH_ARGUMENTS_SQL}) >> 1)::BIGINT"
    data_type = type_by_column[config.timestamp_column]
    if pa.types.is_integer(data_type):
        return f"TRY(CAST(time AS BIGINT) {TO_MICROSECONDS_SQL[config.timestamp_unit]})"
    has_time_zone = pa.types.is_timestamp(data_type) and data_type.tz is not None
    # The cast is needed because epoch_us does not accept nanoseconds with a time zone.
    return f"TRY(epoch_us(time::{'TIMESTAMPTZ' if has_time_zone else 'TIMESTAMP'}))"


def _before_1970_sql(data_type: pa.DataType) -> str:
    """Return SQL that is true for a time before 1970.

    The SQL also covers times that do not fit into 64 bits of microseconds, whose `position` is null.
    """
    if pa.types.is_integer(data_type):
        return "time < 0"
    has_time_zone = pa.types.is_timestamp(data_type) and data_type.tz is not None
    return "time::TIMESTAMPTZ < TIMESTAMPTZ '1970-01-01 00:00:00+00'" if has_time_zone else "time < DATE '1970-01-01'"


def draw_sql(split: FileSplit) -> str:
    """Return SQL for a number below 1,000,000 that decides whether a training event is held out for validation.

    All events of a pair of user and item, or of an item (see validation_unit), have the same number.
    """
    hash_arguments_sql = PAIR_HASH_ARGUMENTS_SQL if split.validation_unit == "pair" else ITEM_HASH_ARGUMENTS_SQL
    return f"(hash({hash_arguments_sql}, 'validation') % 1000000)::INTEGER"
