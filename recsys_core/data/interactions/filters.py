"""Filters and split of the log: from the parts to the table or view `log` (user, item, position, split, extra columns).

User and item are codes (see vocabulary.py). An extra column is the weight or a context column.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import duckdb

from recsys_core.data.interactions.config import SPLITS, FileSplit, InteractionsConfig, LeaveLastOut, LogFilter, TimeSplit
from recsys_core.errors import InputError
from recsys_core.manifests import LogPart, SourceFile
from recsys_core.parquet.duckdb_session import scan
from recsys_core.units import DAY_US


def load_log(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    *,
    parts: Sequence[LogPart],
    folder: Path,
    splits: Mapping[SourceFile, int],
) -> dict[str, int]:
    """Create `log` from the parts in `folder`; return the number of removed events by reason.

    Args:
        splits: the current input files, each with the code of its split; events of other files are left out.
    """
    # A part whose files all had no rows may have no current file left.
    current = [part for part in parts if any(file.source in splits for file in part.files)]
    is_given = isinstance(config.split, FileSplit)
    events = " UNION ALL ".join(_events_of(part, folder=folder, splits=splits, is_given=is_given) for part in current)
    connection.execute(f"CREATE VIEW events AS {events}").fetchall()
    num_events = _count(connection, "SELECT count(*) FROM events")
    if num_events == 0:
        raise InputError(_no_events(config, parts))
    removed = {"below_threshold": sum(file.below_threshold for part in parts for file in part.files if file.source in splits)}
    newest = _newest_time(parts, config, splits) if config.timestamp_column else 0
    kept = "events"
    if config.filter.window_days is not None:
        kept = f"(SELECT * FROM events WHERE position > {newest - int(config.filter.window_days * DAY_US)})"
    if config.filter != LogFilter(window_days=config.filter.window_days):
        connection.execute(f"CREATE TABLE kept AS SELECT * FROM {kept}").fetchall()
        removed["outside_window"] = num_events - _count(connection, "SELECT count(*) FROM kept")
        removed |= _apply_filters(connection, config.filter)
        kept = "kept"
    elif config.filter.window_days is not None:
        removed["outside_window"] = num_events - _count(connection, f"SELECT count(*) FROM {kept}")
    split = _split(config, newest=newest, extra=extra_columns(connection, "events"))
    # A view is evaluated again at each use, which is cheap unless the split needs a window function over users.
    kind = "TABLE" if isinstance(config.split, LeaveLastOut) else "VIEW"
    connection.execute(f"CREATE {kind} log AS SELECT * EXCLUDE (split), ({split})::TINYINT AS split FROM {kept}").fetchall()
    return {reason: count for reason, count in removed.items() if count}


def extra_columns(connection: duckdb.DuckDBPyConnection, table: str) -> list[str]:
    """Return the weight and context columns of `table`. Sorts use them as tie-breakers, so that every order is determined."""
    return [name for name in connection.table(table).columns if name == "weight" or name.startswith("context_")]


def check_log(connection: duckdb.DuckDBPyConnection, config: InteractionsConfig, *, first_file: str) -> dict[str, str]:
    """Return the time span of the log.

    Raises:
        InputError: the training or the test split is empty, or the log has a single user or a single item.
    """
    counts = dict(connection.sql("SELECT split, count(*) FROM log GROUP BY split").fetchall())
    if not counts:
        raise InputError(f"{first_file}: interactions.filter removes all events; relax it")
    sizes = ", ".join(f"{counts.get(code, 0):,} {name}" for code, name in enumerate(SPLITS))
    for code, name in enumerate(SPLITS):
        if not counts.get(code) and name != "validation":
            raise InputError(
                f"{first_file}: the split {config.split.kind!r} leaves no {name} events ({sizes}); change interactions.split"
            )
    for side, column in (("user", config.user_column), ("item", config.item_column)):
        if _count(connection, f'SELECT count(*) FROM (SELECT DISTINCT "{side}" FROM log LIMIT 2)') < 2:
            raise InputError(f"{first_file}: column {column!r}: the log has a single {side}; a model needs at least two")
    if config.timestamp_column is None:
        return {}
    ((first, last),) = connection.sql("SELECT min(position), max(position) FROM log").fetchall()
    return {"first_time": as_time(first), "last_time": as_time(last)}


def _events_of(part: LogPart, *, folder: Path, splits: Mapping[SourceFile, int], is_given: bool) -> str:
    """Return SQL for the events of the current files of `part`, with the split of their file."""
    read = scan(folder / part.file)
    current = [(index, splits[file.source]) for index, file in enumerate(part.files) if file.source in splits]
    if len(current) == len(part.files) and not is_given:
        return f"SELECT * EXCLUDE (source), 0 AS split FROM {read}"
    values = ", ".join(f"({index}, {split})" for index, split in current)
    return f"SELECT * EXCLUDE (source) FROM {read} JOIN (VALUES {values}) AS current(source, split) USING (source)"


def _apply_filters(connection: duckdb.DuckDBPyConnection, filters: LogFilter) -> dict[str, int]:
    """Remove events from table `kept`; return the number of removed events by reason, and the number of bot users."""
    removed: dict[str, int] = {}
    if filters.duplicates != "keep":
        removed["duplicates"] = _remove_duplicates(connection, filters.duplicates)
    if filters.bot_threshold is not None:
        bots = f'SELECT "user" FROM kept GROUP BY "user" HAVING count(*) > {filters.bot_threshold}'
        removed["bot_users"] = _count(connection, f"SELECT count(*) FROM ({bots})")
        removed["bot_events"] = _replace_kept(connection, f'SELECT * FROM kept ANTI JOIN ({bots}) USING ("user")')
    removed["rare"] = _remove_rare(connection, filters)
    if filters.max_user_events is not None:
        order = _newest_first(("split", *extra_columns(connection, "kept")))
        newest = f'row_number() OVER (PARTITION BY "user" ORDER BY {order}) <= {filters.max_user_events}'
        removed["over_cap"] = _replace_kept(connection, f"SELECT * FROM kept QUALIFY {newest}")
    return removed


def _remove_duplicates(connection: duckdb.DuckDBPyConnection, duplicates: str) -> int:
    key = '"user", item, position' if duplicates == "exact" else '"user", item'
    time_order = "position DESC" if duplicates == "last" else "position"
    # By split: of an event in both the training and the test files, the training event is kept.
    order = ", ".join([time_order, "split", *extra_columns(connection, "kept")])
    return _replace_kept(connection, f"SELECT * FROM kept QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY {order}) = 1")


def _remove_rare(connection: duckdb.DuckDBPyConnection, filters: LogFilter) -> int:
    """Remove users and items with too few events until none is left (k-core): each removal takes events from the others."""
    minimums = {"item": filters.min_item_events, "user": filters.min_user_events}
    total = 0
    while True:
        removed = 0
        for side, minimum in minimums.items():
            if minimum > 1:
                rare = f'SELECT "{side}" FROM kept GROUP BY "{side}" HAVING count(*) < {minimum}'
                removed += _replace_kept(connection, f'SELECT * FROM kept ANTI JOIN ({rare}) USING ("{side}")')
        total += removed
        if removed == 0:
            return total


def _replace_kept(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    """Replace table `kept` by the rows of `query`; return how many rows this removes."""
    before = _count(connection, "SELECT count(*) FROM kept")
    connection.execute(f"CREATE TABLE next AS {query}").fetchall()
    connection.execute("DROP TABLE kept").fetchall()
    connection.execute("ALTER TABLE next RENAME TO kept").fetchall()
    return before - _count(connection, "SELECT count(*) FROM kept")


def _newest_first(tie_breakers: Sequence[str]) -> str:
    """Return SQL that orders the events of a user, the newest first."""
    return ", ".join(f"{column} DESC" for column in ("position", "item", *tie_breakers))


def _split(config: InteractionsConfig, *, newest: int, extra: Sequence[str]) -> str:
    """Return SQL for the code of an event's split. `newest` is the newest time of the log, `extra` the extra columns."""
    split = config.split
    if isinstance(split, TimeSplit):
        test = newest - int(split.test_days * DAY_US)
        validation = test - int(split.validation_days * DAY_US)
        return f"CASE WHEN position > {test} THEN 2 WHEN position > {validation} THEN 1 ELSE 0 END"
    if isinstance(split, LeaveLastOut):
        window = f'PARTITION BY "user" ORDER BY {_newest_first(extra)}'
        few = f'count(*) OVER (PARTITION BY "user") < {split.min_events}'
        return f"CASE WHEN {few} THEN 0 ELSE greatest(0, 3 - row_number() OVER ({window})) END"
    if split.validation_share > 0:
        return f"CASE WHEN split = 0 AND draw < {int(split.validation_share * 1_000_000)} THEN 1 ELSE split END"
    return "split"


def _newest_time(parts: Sequence[LogPart], config: InteractionsConfig, splits: Mapping[SourceFile, int]) -> int:
    """Return the newest time of the current files in microseconds. The float spans are exact until the year 2255."""
    column = config.timestamp_column or ""
    files = [file for part in parts for file in part.files if file.source in splits and column in file.spans]
    return int(max(file.spans[column][1] for file in files))


def _no_events(config: InteractionsConfig, parts: Sequence[LogPart]) -> str:
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
