"""Filters and split of the log. They read the parts and create `log` (user, item, position, split, extra columns).

`log` is a table or a view in DuckDB. User and item are codes (see vocabulary.py). Position is the sort key of a user's events
(see incremental.py). The extra columns are the weight and the context columns.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import duckdb

from recsys_core.data.interactions.config import SPLITS, FileSplit, InteractionsConfig, LeaveLastOut, LogFilter, TimeSplit
from recsys_core.errors import InputError
from recsys_core.manifests import IngestedFile, LogPart, SourceFile
from recsys_core.parquet.duckdb_session import scan_sql
from recsys_core.units import DAY_US


def load_log(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    *,
    parts: Sequence[LogPart],
    folder: Path,
    split_codes: Mapping[SourceFile, int],
) -> dict[str, int]:
    """Create `log` from the parts in `folder`; return the number of removed events by reason.

    Args:
        split_codes: code of the split of each input file; events of other files are not in `log`.
    """
    # A part that an earlier run read can be without any file of the current input. Such a part is left out.
    current_parts = [part for part in parts if any(file.source in split_codes for file in part.files)]
    events_query = " UNION ALL ".join(
        _part_query(part, folder=folder, split_codes=split_codes, is_split_by_files=isinstance(config.split, FileSplit))
        for part in current_parts
    )
    connection.execute(f"CREATE VIEW events AS {events_query}").fetchall()
    num_events = _count(connection, "SELECT count(*) FROM events")
    if num_events == 0:
        raise InputError(_no_events_message(config, parts))
    current_files = [file for part in parts for file in part.files if file.source in split_codes]
    removed_counts = {"below_threshold": sum(file.below_threshold for file in current_files)}
    newest_us = _newest_time(current_files, config.timestamp_column) if config.timestamp_column else 0
    relation = "events"
    if config.filter.window_days is not None:
        relation = f"(SELECT * FROM events WHERE position > {newest_us - int(config.filter.window_days * DAY_US)})"
    if config.filter != LogFilter(window_days=config.filter.window_days):
        connection.execute(f"CREATE TABLE remaining AS SELECT * FROM {relation}").fetchall()
        removed_counts["outside_window"] = num_events - _count(connection, "SELECT count(*) FROM remaining")
        removed_counts |= _apply_filters(connection, config.filter)
        relation = "remaining"
    elif config.filter.window_days is not None:
        removed_counts["outside_window"] = num_events - _count(connection, f"SELECT count(*) FROM {relation}")
    split = _split_expression(config, newest_us=newest_us, tie_breakers=extra_columns(connection, "events"))
    # A view is evaluated at each use. This is cheap except for leave_last_out, which needs a window function.
    relation_kind = "TABLE" if isinstance(config.split, LeaveLastOut) else "VIEW"
    connection.execute(
        f"CREATE {relation_kind} log AS SELECT * EXCLUDE (split), ({split})::TINYINT AS split FROM {relation}"
    ).fetchall()
    return {reason: count for reason, count in removed_counts.items() if count}


def extra_columns(connection: duckdb.DuckDBPyConnection, table: str) -> list[str]:
    """Return the weight and context columns of `table`.

    Events that are equal in all other columns are sorted by these columns, so that their order is reproducible.
    """
    return [name for name in connection.table(table).columns if name == "weight" or name.startswith("context_")]


def check_log(connection: duckdb.DuckDBPyConnection, config: InteractionsConfig, *, first_file: str) -> dict[str, str]:
    """Return the time span of the log.

    Raises:
        InputError: the training or the test split is empty, or the log has a single user or a single item.
    """
    counts = dict(connection.sql("SELECT split, count(*) FROM log GROUP BY split").fetchall())
    if not counts:
        raise InputError(f"{first_file}: interactions.filter removes all events; relax it")
    split_sizes = ", ".join(f"{counts.get(code, 0):,} {name}" for code, name in enumerate(SPLITS))
    for code, name in enumerate(SPLITS):
        if not counts.get(code) and name != "validation":
            raise InputError(
                f"{first_file}: the split {config.split.kind!r} leaves no {name} events ({split_sizes}); "
                "change interactions.split"
            )
    for side, column in (("user", config.user_column), ("item", config.item_column)):
        if _count(connection, f'SELECT count(*) FROM (SELECT DISTINCT "{side}" FROM log LIMIT 2)') < 2:
            raise InputError(f"{first_file}: column {column!r}: the log has a single {side}; a model needs at least two")
    if config.timestamp_column is None:
        return {}
    ((first, last),) = connection.sql("SELECT min(position), max(position) FROM log").fetchall()
    return {"first_time": as_time(first), "last_time": as_time(last)}


def _part_query(part: LogPart, *, folder: Path, split_codes: Mapping[SourceFile, int], is_split_by_files: bool) -> str:
    """Return SQL for the events of `part`, without files that are no longer input, and with the split of each file."""
    part_scan = scan_sql(folder / part.file_name)
    source_splits = [(index, split_codes[file.source]) for index, file in enumerate(part.files) if file.source in split_codes]
    if len(source_splits) == len(part.files) and not is_split_by_files:
        return f"SELECT * EXCLUDE (source), 0 AS split FROM {part_scan}"
    values = ", ".join(f"({index}, {split})" for index, split in source_splits)
    return f"SELECT * EXCLUDE (source) FROM {part_scan} JOIN (VALUES {values}) AS source_splits(source, split) USING (source)"


def _apply_filters(connection: duckdb.DuckDBPyConnection, filters: LogFilter) -> dict[str, int]:
    """Remove events from table `remaining`; return the number of removed events by reason, and the number of bot users."""
    removed_counts: dict[str, int] = {}
    if filters.duplicates != "keep":
        removed_counts["duplicates"] = _remove_duplicates(connection, filters.duplicates)
    if filters.bot_threshold is not None:
        bots_query = f'SELECT "user" FROM remaining GROUP BY "user" HAVING count(*) > {filters.bot_threshold}'
        removed_counts["bot_users"] = _count(connection, f"SELECT count(*) FROM ({bots_query})")
        removed_counts["bot_events"] = _replace_remaining(
            connection, f'SELECT * FROM remaining ANTI JOIN ({bots_query}) USING ("user")'
        )
    removed_counts["rare"] = _remove_rare(connection, filters)
    if filters.max_user_events is not None:
        order = _newest_first(("split", *extra_columns(connection, "remaining")))
        is_newest_sql = f'row_number() OVER (PARTITION BY "user" ORDER BY {order}) <= {filters.max_user_events}'
        removed_counts["over_cap"] = _replace_remaining(connection, f"SELECT * FROM remaining QUALIFY {is_newest_sql}")
    return removed_counts


def _remove_duplicates(connection: duckdb.DuckDBPyConnection, duplicates: str) -> int:
    key = '"user", item, position' if duplicates == "exact" else '"user", item'
    time_order = "position DESC" if duplicates == "last" else "position"
    # `split` comes before the extra columns: if an event is in both the training and the test files, the training event stays.
    order = ", ".join([time_order, "split", *extra_columns(connection, "remaining")])
    return _replace_remaining(
        connection, f"SELECT * FROM remaining QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY {order}) = 1"
    )


def _remove_rare(connection: duckdb.DuckDBPyConnection, filters: LogFilter) -> int:
    """Remove the events of rare items and users until every item and user has enough events (k-core).

    One pass is not enough: removing an item takes events from users, and removing a user takes events from items.

    Return the number of removed events.
    """
    min_events = {"item": filters.min_item_events, "user": filters.min_user_events}
    total_removed = 0
    while True:
        num_removed = 0
        for side, minimum in min_events.items():
            if minimum > 1:
                rare_query = f'SELECT "{side}" FROM remaining GROUP BY "{side}" HAVING count(*) < {minimum}'
                num_removed += _replace_remaining(
                    connection, f'SELECT * FROM remaining ANTI JOIN ({rare_query}) USING ("{side}")'
                )
        total_removed += num_removed
        if num_removed == 0:
            return total_removed


def _replace_remaining(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    """Replace table `remaining` by the rows of `query`; return the number of removed rows."""
    num_before = _count(connection, "SELECT count(*) FROM remaining")
    connection.execute(f"CREATE TABLE next_remaining AS {query}").fetchall()
    connection.execute("DROP TABLE remaining").fetchall()
    connection.execute("ALTER TABLE next_remaining RENAME TO remaining").fetchall()
    return num_before - _count(connection, "SELECT count(*) FROM remaining")


def _newest_first(tie_breakers: Sequence[str]) -> str:
    """Return SQL that orders the events of a user, the newest first."""
    return ", ".join(f"{column} DESC" for column in ("position", "item", *tie_breakers))


def _split_expression(config: InteractionsConfig, *, newest_us: int, tie_breakers: Sequence[str]) -> str:
    """Return SQL for the code of an event's split.

    Args:
        newest_us: newest time of the log.
        tie_breakers: columns that order the events of a user with the same position and item.
    """
    split = config.split
    if isinstance(split, TimeSplit):
        test_start_us = newest_us - int(split.test_days * DAY_US)
        validation_start_us = test_start_us - int(split.validation_days * DAY_US)
        return f"CASE WHEN position > {test_start_us} THEN 2 WHEN position > {validation_start_us} THEN 1 ELSE 0 END"
    if isinstance(split, LeaveLastOut):
        window = f'PARTITION BY "user" ORDER BY {_newest_first(tie_breakers)}'
        has_few_events_sql = f'count(*) OVER (PARTITION BY "user") < {split.min_events}'
        return f"CASE WHEN {has_few_events_sql} THEN 0 ELSE greatest(0, 3 - row_number() OVER ({window})) END"
    if split.validation_share > 0:
        return f"CASE WHEN split = 0 AND draw < {int(split.validation_share * 1_000_000)} THEN 1 ELSE split END"
    return "split"


def _newest_time(files: Sequence[IngestedFile], timestamp_column: str) -> int:
    """Return the newest time of the files in microseconds. The spans are floats, which are exact until the year 2255."""
    return int(max(file.spans[timestamp_column][1] for file in files if timestamp_column in file.spans))


def _no_events_message(config: InteractionsConfig, parts: Sequence[LogPart]) -> str:
    file = parts[0].files[0].source.path
    if config.label_column:
        return (
            f"{file}: column {config.label_column!r}: no event reaches interactions.label_threshold, {config.label_threshold}; "
            "lower it"
        )
    return f"{file}: all rows of the log are bad; see interactions.on_bad_rows"


def _count(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    ((count,),) = connection.sql(query).fetchall()
    return int(count)


def as_time(microseconds: int) -> str:
    """Return an ISO 8601 time in UTC, to the second.

    >>> as_time(1_763_600_000_000_000)
    '2025-11-20T00:53:20+00:00'
    """
    return datetime.fromtimestamp(microseconds / 1e6, UTC).isoformat(timespec="seconds")
