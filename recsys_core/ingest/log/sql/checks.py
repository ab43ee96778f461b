"""The view `raw` of the interaction log in SQL: its columns, the row checks, and the statistics of its files.

The view has the columns of the config under fixed names (see `column_by_alias`), and these columns:

- source: index of the row's file.
- row: index of the row in its file.
- position: sort key of a user's events.
- before_1970: whether the time is before 1970; only with a timestamp column.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime

import numpy as np
import pyarrow as pa

from recsys_core.errors import shown
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.engine import FileStatistics
from recsys_core.ingest.log.log_statistics import FUTURE_ADVICE, FUTURE_REASON, TIMES_ADVICE, latest_valid_time_us
from recsys_core.ingest.log.sql.session import SqlSession
from recsys_core.ingest.row_checks import FIX_ROWS, BadRow, RowCheck, pass_sql
from recsys_core.parquet.columns import is_whole_decimal, value_type
from recsys_core.parquet.duckdb_session import quoted
from recsys_core.parquet.sources import Source
from recsys_core.units import FLOAT32_MAX, INT64_MAX

INFINITY_SQL = "'Infinity'::DOUBLE"


def column_by_alias(config: InteractionsConfig) -> dict[str, str]:
    """Return the column of the log for each column of `raw`. Later queries use the fixed names of `raw`."""
    column_or_none_by_alias = {"user": config.user_column, "item": config.item_column, "time": config.timestamp_column}
    column_or_none_by_alias |= {"sequence": config.order_column, "label": config.label_column, "weight": config.weight_column}
    column_or_none_by_alias |= {f"context_{index}": column for index, column in enumerate(config.context_columns)}
    return {alias: column for alias, column in column_or_none_by_alias.items() if column is not None}


def hive_columns(config: InteractionsConfig, sources: Sequence[Source]) -> set[str]:
    """Return the columns of the config that are hive keys in the paths and not columns of the files."""
    keys_in_paths_only = {key for source in sources for key in source.partition_values if key not in source.schema.names}
    return keys_in_paths_only & set(config.columns)


def hive_keys_sql(sources: Sequence[Source], keys: Sequence[str], *, indices: Sequence[int] | None = None) -> str:
    """Return SQL for a table with the hive keys `keys` of each file, as dates, integers or strings.

    indices: value of the column `file_index` for each file. Default: the files are numbered from 0.
    """
    rows_sql = [
        f"({index}, {', '.join(_constant_sql(source.partition_value(key)) for key in keys)})"
        for index, source in zip(indices or range(len(sources)), sources, strict=True)
    ]
    return f"SELECT * FROM (VALUES {', '.join(rows_sql)}) AS t(file_index, {', '.join(quoted(key) for key in keys)})"


def _constant_sql(value: int | date | str) -> str:
    if isinstance(value, int):
        return f"'{value}'::BIGINT"  # without quotes, -2**63 would be the negative of a number that is too large
    return f"DATE '{value.isoformat()}'" if isinstance(value, date) else quoted(value, quote="'")


def row_checks(config: InteractionsConfig, *, type_by_column: Mapping[str, pa.DataType]) -> list[RowCheck]:
    """Return the row checks of a log with these column types."""
    checks = _id_checks("user", config.user_column, type_by_column[config.user_column])
    checks += _id_checks("item", config.item_column, type_by_column[config.item_column])
    if config.timestamp_column is not None:
        checks += _time_checks(config.timestamp_column, latest_valid_us=latest_valid_time_us(config))
    if config.order_column is not None:
        checks += _order_checks(config.order_column, type_by_column[config.order_column])
    if config.label_column is not None:
        checks += _label_checks(config.label_column, type_by_column[config.label_column], label_range=config.label_range)
    if config.weight_column is not None:
        checks += _weight_checks(config.weight_column, type_by_column[config.weight_column])
    return checks


def scan_files(
    session: SqlSession,
    checks: Sequence[RowCheck],
    *,
    num_files: int,
    roles: Sequence[str],
    positive_row_sql: str | None,
) -> list[FileStatistics]:
    """Return the statistics of each file of `raw`, in one scan.

    Args:
        roles: columns of `raw` (position, label or weight) whose smallest and largest values are returned.
        positive_row_sql: SQL that is true for the rows that reach the label threshold; None if there is no threshold. Only rows
            that pass the checks and reach the threshold become events. The range of `position` covers only these rows.
    """
    # DuckDB evaluates count_if and CASE in less than half the time of aggregates with FILTER.
    is_bad_sql = " OR ".join(f"({check.failure_sql})" for check in checks)
    case_prefix_sql = f"CASE WHEN {is_bad_sql} THEN NULL WHEN "
    event_case_sql, good_case_sql = f"{case_prefix_sql}{positive_row_sql or 'true'} THEN ", f"{case_prefix_sql}true THEN "
    select_list = ["source", "count(*)", f"count_if({is_bad_sql})", f"count({event_case_sql}1 END)"]
    select_list += [f"count_if({check.failure_sql})" for check in checks]
    for role in roles:
        value_sql = f"{event_case_sql if role == 'position' else good_case_sql}{role}::DOUBLE END"
        select_list += [f"{aggregate}({value_sql})" for aggregate in ("min", "max")]
    query = f"SELECT {', '.join(select_list)} FROM raw GROUP BY source"
    statistics = [FileStatistics()] * num_files  # a file without rows does not occur in `raw`
    for file_index, num_rows, num_bad_rows, num_events, *check_counts_and_bounds in session.fetch_rows(query):
        check_counts, bounds = check_counts_and_bounds[: len(checks)], check_counts_and_bounds[len(checks) :]
        num_bad_rows_by_check = {check.name: count for check, count in zip(checks, check_counts, strict=True) if count}
        role_bounds = zip(roles, bounds[::2], bounds[1::2], strict=True)
        bounds_by_role = {role: (min_value, max_value) for role, min_value, max_value in role_bounds if min_value is not None}
        statistics[file_index] = FileStatistics(num_rows, num_bad_rows, num_bad_rows_by_check, bounds_by_role, num_events)
    return statistics


def first_bad_row_of_table(
    session: SqlSession, config: InteractionsConfig, checks: Sequence[RowCheck], *, rows_sql: str, table_name: str
) -> BadRow:
    """Return the first row of a table that fails a check, with the first check that it fails.

    The rows of a table have no numbers. They are therefore ordered by user, item and position, and the message names the row by
    its ids.
    """
    alias_by_column = {column: alias for alias, column in column_by_alias(config).items() if alias != "time"}
    if config.timestamp_column is not None:
        alias_by_column[config.timestamp_column] = "position"
    values_sql = [f'"{alias_by_column[check.column]}" AS value_{index}' for index, check in enumerate(checks)]
    flags_sql = [f"coalesce({check.failure_sql}, false) AS fails_{index}" for index, check in enumerate(checks)]
    ((user, item, *values_and_flags),) = session.fetch_rows(
        f'SELECT "user", item, {", ".join(values_sql + flags_sql)} FROM {rows_sql} WHERE NOT ({pass_sql(checks)}) '
        'ORDER BY "user", item, position LIMIT 1'
    )
    values, failure_flags = values_and_flags[: len(checks)], values_and_flags[len(checks) :]
    check_index = failure_flags.index(True)
    check, value = checks[check_index], values[check_index]
    if check.column == config.timestamp_column and value is not None:
        with suppress(ValueError, OverflowError):  # outside the range of Python's datetime
            value = datetime.fromtimestamp(value / 1e6, UTC)
    problem = f"{check.problem(value)}, in a row with user {shown(user)} and item {shown(item)}"
    return BadRow(table_name, check.column, None, problem, check_name=check.name, fix=check.fix)


def _id_checks(alias: str, column: str, data_type: pa.DataType) -> list[RowCheck]:
    checks = [RowCheck(column, "null", f'"{alias}" IS NULL', FIX_ROWS)]
    if pa.types.is_uint64(value_type(data_type)):
        is_too_large_sql = f'"{alias}" > {INT64_MAX}'
        checks.append(
            RowCheck(column, "too large for int64", is_too_large_sql, "ids have to fit into int64; write them as strings")
        )
    if not pa.types.is_integer(value_type(data_type)):
        checks.append(RowCheck(column, "an empty string", f"\"{alias}\" = ''", FIX_ROWS))
    return checks


def _time_checks(column: str, *, latest_valid_us: int) -> list[RowCheck]:
    # `position` is the time in microseconds; it is null if this number does not fit into 64 bits. For such a time, the column
    # `before_1970` of `raw` is still correct.
    overflow_sql = "position IS NULL AND time IS NOT NULL"
    return [
        RowCheck(column, "null", "time IS NULL", FIX_ROWS),
        RowCheck(column, FUTURE_REASON, f"position > {latest_valid_us} OR ({overflow_sql} AND NOT before_1970)", FUTURE_ADVICE),
        RowCheck(column, "before 1970", f"position < 0 OR ({overflow_sql} AND before_1970)", TIMES_ADVICE),
    ]


def order_position_sql(data_type: pa.DataType) -> str:
    """Return SQL for the sort key of a user's events from an order column of this type. Whole numbers are not rounded."""
    is_whole_number = pa.types.is_integer(data_type) or is_whole_decimal(data_type)
    return "TRY_CAST(sequence AS BIGINT)" if is_whole_number else "CAST(sequence AS DOUBLE)"


def _order_checks(column: str, data_type: pa.DataType) -> list[RowCheck]:
    checks = _number_checks("sequence", column, data_type)
    if pa.types.is_uint64(data_type) or is_whole_decimal(data_type):
        checks.append(RowCheck(column, "too large for int64", "position IS NULL AND sequence IS NOT NULL", FIX_ROWS))
    return checks


def label_lower_bound(label: float, data_type: pa.DataType) -> float:
    """Return `label`, or its rounded value in this type if that is smaller. Labels of this type are compared with the result.

    float32 stores the label 0.7 as 0.699999988. A comparison with 0.7 would therefore report a stored 0.7 as too small. If the
    type cannot store `label`, the result is `label`.

    >>> label_lower_bound(0.7, pa.float64()), round(label_lower_bound(0.7, pa.float32()), 9), label_lower_bound(3, pa.float32())
    (0.7, 0.699999988, 3)
    """
    if not pa.types.is_floating(data_type):
        return label
    with np.errstate(over="ignore"):
        stored_label = float(data_type.to_pandas_dtype()(label))
    return min(label, stored_label) if math.isfinite(stored_label) else label


def _label_checks(column: str, data_type: pa.DataType, *, label_range: tuple[float, float] | None) -> list[RowCheck]:
    checks = _number_checks("label", column, data_type)
    if label_range is not None:
        min_label, max_label = label_range
        # DuckDB and Spark order NaN above all numbers, and NaN has a check of its own.
        lower_bound, upper_bound = label_lower_bound(min_label, data_type), -label_lower_bound(-max_label, data_type)
        is_outside_sql = f"{_is_finite_sql('label')} AND (label::DOUBLE < {lower_bound!r} OR label::DOUBLE > {upper_bound!r})"
        checks.append(
            RowCheck(
                column,
                f"outside of {min_label:g} to {max_label:g}",
                is_outside_sql,
                "fix these labels, or change interactions.label_range",
            )
        )
    return checks


def _weight_checks(column: str, data_type: pa.DataType) -> list[RowCheck]:
    is_negative_sql, is_too_large_sql = "weight < 0", f"weight::DOUBLE > {FLOAT32_MAX!r}"
    return [
        *_number_checks("weight", column, data_type),
        RowCheck(column, "negative", f"{is_negative_sql} AND {_is_finite_sql('weight')}", "a weight has to be 0 or more"),
        RowCheck(column, "too large for float32", f"{is_too_large_sql} AND {_is_finite_sql('weight')}", FIX_ROWS),
    ]


def _number_checks(alias: str, column: str, data_type: pa.DataType) -> list[RowCheck]:
    if not pa.types.is_floating(data_type):
        return [RowCheck(column, "null or not a number", f"{alias} IS NULL", FIX_ROWS)]
    return [
        RowCheck(column, "null or not a number", f"{alias} IS NULL OR isnan({alias}::DOUBLE)", FIX_ROWS),
        RowCheck(column, "infinite", f"abs({alias}::DOUBLE) = {INFINITY_SQL}", FIX_ROWS),
    ]


def _is_finite_sql(alias: str) -> str:
    return f"abs({alias}::DOUBLE) < {INFINITY_SQL}"
