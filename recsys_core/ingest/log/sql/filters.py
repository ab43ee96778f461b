"""Filters and split of the events: SQL that creates `log`, a table or a view, from the parts.

Columns of `log`: user, item, position, split, extra columns and, with `validation_share`, draw (see LogPart). User and item are
codes (see vocabulary.py). Position is the sort key of a user's events: the event time in microseconds, the value of the order
column, or a hash of the user and the item. The extra columns are the weight and the context columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from recsys_core.ingest.log.config import InteractionsConfig, LogFilter
from recsys_core.ingest.log.engine import LogCounts
from recsys_core.ingest.log.log_statistics import current_files
from recsys_core.ingest.log.split_config import FileSplit, LeaveLastOut, TimeSplit
from recsys_core.ingest.log.sql.known_negatives import create_known_negatives
from recsys_core.ingest.log.sql.session import SqlSession, fetch_count, first_rows_sql
from recsys_core.manifests import SPLITS, IngestedFile, LogPart, SourceFile
from recsys_core.units import DAY_US

MIN_SPAN_PER_TEST_PERIOD = 5
"""Smallest ratio of the log's time span to the test period with `test_days: auto`. The period is at least one day, however."""


def load_log(
    session: SqlSession,
    config: InteractionsConfig,
    *,
    parts: Sequence[LogPart],
    folder: Path,
    split_code_by_file: Mapping[SourceFile, int],
) -> LogCounts:
    """Create `log` from the parts in `folder`, and return its counts. If there is no event, `log` is not created.

    Args:
        split_code_by_file: code of the split of each input file; events of other files are not in `log`.
    """
    _create_events_view(session, config, parts=parts, folder=folder, split_code_by_file=split_code_by_file)
    num_events = fetch_count(session, "SELECT count(*) FROM events")
    if num_events == 0:
        return LogCounts(num_read_events=0)
    files = current_files(parts, input_files=split_code_by_file)
    newest_us = _newest_time_us(files, config.timestamp_column) if config.timestamp_column else 0
    end_us, is_in_window_sql = _time_window(config.filter, newest_us=newest_us)
    events_sql, num_removed_by_filter = _filter_events(
        session, config.filter, num_events=num_events, is_in_window_sql=is_in_window_sql
    )
    test_days = _test_days(session, config.split, events_sql, end_us=end_us) if isinstance(config.split, TimeSplit) else None
    split_sql = _split_code_sql(
        config, end_us=end_us, test_days=test_days, tie_breaker_columns=extra_column_names(session, "events")
    )
    # A view is evaluated at each use, which is cheap except for the window function of leave_last_out.
    create_log = session.create_table if isinstance(config.split, LeaveLastOut) else session.create_view
    create_log("log", f"SELECT * EXCLUDE (split), ({split_sql})::TINYINT AS split FROM {events_sql}")
    if config.explicit_negatives:
        create_known_negatives(session, config, split_sql=split_sql, is_in_window_sql=is_in_window_sql or "true")
    num_removed_by_reason = {"below_threshold": sum(file.num_below_threshold for file in files)} | num_removed_by_filter
    return replace(
        count_log(session, config, num_read_events=num_events),
        num_removed_by_reason={reason: count for reason, count in num_removed_by_reason.items() if count},
        test_days=test_days,
    )


def _create_events_view(
    session: SqlSession,
    config: InteractionsConfig,
    *,
    parts: Sequence[LogPart],
    folder: Path,
    split_code_by_file: Mapping[SourceFile, int],
) -> None:
    """Create the view `events`, and with explicit negatives also `coded_events`, which contains the negatives."""
    # A part of an earlier run is left out if none of its files is still an input file.
    current_parts = [part for part in parts if any(file.source in split_code_by_file for file in part.files)]
    part_rows_sql = " UNION ALL ".join(
        _part_sql(
            session,
            part,
            folder=folder,
            split_code_by_file=split_code_by_file,
            is_split_by_files=isinstance(config.split, FileSplit),
        )
        for part in current_parts
    )
    if config.explicit_negatives:
        session.create_view("coded_events", part_rows_sql)
        part_rows_sql = "SELECT * EXCLUDE (is_negative) FROM coded_events WHERE NOT is_negative"
    session.create_view("events", part_rows_sql)


def _time_window(log_filter: LogFilter, *, newest_us: int) -> tuple[int, str | None]:
    """Return the end of the filter's time window, and its SQL condition. The condition is None if there is no window.

    newest_us: time of the newest event of the log.
    """
    end_us = newest_us
    conditions_sql = []
    if log_filter.until is not None:
        end_us = min(newest_us, time_us(log_filter.until))
        conditions_sql.append(f"position <= {end_us}")
    if log_filter.window_days is not None:
        conditions_sql.append(f"position > {end_us - int(log_filter.window_days * DAY_US)}")
    return end_us, " AND ".join(conditions_sql) or None


def _filter_events(
    session: SqlSession, log_filter: LogFilter, *, num_events: int, is_in_window_sql: str | None
) -> tuple[str, dict[str, int]]:
    """Apply the filter to `events`. Return the SQL of the remaining events, and the number of removed events by reason."""
    events_sql = f"(SELECT * FROM events WHERE {is_in_window_sql})" if is_in_window_sql else "events"
    if log_filter.model_copy(update={"until": None, "window_days": None}) != LogFilter():
        session.create_table("remaining", f"SELECT * FROM {events_sql}")
        num_outside_window = num_events - fetch_count(session, "SELECT count(*) FROM remaining")
        return "remaining", {"outside_window": num_outside_window, **_apply_filters(session, log_filter)}
    if is_in_window_sql is None:
        return events_sql, {}
    return events_sql, {"outside_window": num_events - fetch_count(session, f"SELECT count(*) FROM {events_sql}")}


def extra_column_names(session: SqlSession, table_name: str) -> list[str]:
    """Return the weight and context columns of `table_name`.

    They are the last columns by which events are sorted, so that the order of the events is reproducible.
    """
    return [name for name in session.column_names(table_name) if name == "weight" or name.startswith("context_")]


def count_log(session: SqlSession, config: InteractionsConfig, *, num_read_events: int) -> LogCounts:
    """Return the counts of `log`; the fields about filters and the test period are not set."""
    time_sql = ", min(position), max(position)" if config.timestamp_column is not None else ""
    rows = session.fetch_rows(f"SELECT split, count(*){time_sql} FROM log GROUP BY split")
    if not rows:
        return LogCounts(num_read_events, num_events_by_split=(0,) * len(SPLITS))
    split_codes, event_counts, *time_bounds = zip(*rows, strict=True)
    num_events_by_code = dict(zip(split_codes, event_counts, strict=True))
    return LogCounts(
        num_read_events,
        num_events_by_split=tuple(num_events_by_code.get(code, 0) for code in range(len(SPLITS))),
        sides_with_one_id=frozenset(side for side in ("user", "item") if not _has_several_ids(session, side)),
        time_span_us=(min(time_bounds[0]), max(time_bounds[1])) if time_bounds else None,
    )


def _has_several_ids(session: SqlSession, side: str) -> bool:
    other_id_sql = f'SELECT 1 FROM log WHERE "{side}" != (SELECT "{side}" FROM log LIMIT 1) LIMIT 1'
    return bool(session.fetch_rows(other_id_sql))


def _part_sql(
    session: SqlSession, part: LogPart, *, folder: Path, split_code_by_file: Mapping[SourceFile, int], is_split_by_files: bool
) -> str:
    """Return SQL for the events of `part` that come from input files. The column `split` has the code of the file's split."""
    part_scan_sql = session.scan_sql(folder / part.file_name)
    index_and_code_pairs = [
        (index, split_code_by_file[file.source]) for index, file in enumerate(part.files) if file.source in split_code_by_file
    ]
    if len(index_and_code_pairs) == len(part.files) and not is_split_by_files:
        return f"SELECT * EXCLUDE (source), 0 AS split FROM {part_scan_sql}"
    values_sql = ", ".join(f"({index}, {split_code})" for index, split_code in index_and_code_pairs)
    return (
        f"SELECT * EXCLUDE (source) FROM {part_scan_sql} "
        f"JOIN (VALUES {values_sql}) AS source_splits(source, split) USING (source)"
    )


def _apply_filters(session: SqlSession, log_filter: LogFilter) -> dict[str, int]:
    """Apply the filters to table `remaining`, except the time window. Return the number of removed events by reason.

    The reason `bot_users` counts users.
    """
    num_removed_by_reason: dict[str, int] = {}
    if log_filter.duplicates != "keep":
        num_removed_by_reason["duplicates"] = _remove_duplicates(session, log_filter.duplicates)
    if log_filter.bot_threshold is not None:
        bots_sql = f'SELECT "user" FROM remaining GROUP BY "user" HAVING count(*) > {log_filter.bot_threshold}'
        num_removed_by_reason["bot_users"] = fetch_count(session, f"SELECT count(*) FROM ({bots_sql})")
        num_removed_by_reason["bot_events"] = _replace_remaining(
            session, f'SELECT * FROM remaining ANTI JOIN ({bots_sql}) USING ("user")'
        )
    num_removed_by_reason["rare"] = _remove_rare_ids(session, log_filter)
    if log_filter.max_user_events is not None:
        order_sql = _newest_first_sql(("split", *extra_column_names(session, "remaining")))
        window_sql = f'PARTITION BY "user" ORDER BY {order_sql}'
        num_removed_by_reason["over_cap"] = _replace_remaining(
            session, first_rows_sql("remaining", window_sql=window_sql, num_rows=log_filter.max_user_events)
        )
    return num_removed_by_reason


def _remove_duplicates(session: SqlSession, policy: str) -> int:
    """Remove repeated events from table `remaining`; return their number. policy: see LogFilter.duplicates."""
    key_sql = '"user", item, position' if policy == "exact" else '"user", item'
    time_order_sql = "position DESC" if policy == "last" else "position"
    # `split` comes before the extra columns: if an event is in both the training and the test files, the training event stays.
    order_sql = ", ".join([time_order_sql, "split", *extra_column_names(session, "remaining")])
    window_sql = f"PARTITION BY {key_sql} ORDER BY {order_sql}"
    return _replace_remaining(session, first_rows_sql("remaining", window_sql=window_sql))


def _remove_rare_ids(session: SqlSession, log_filter: LogFilter) -> int:
    """Remove the events of rare items and users until every item and user has enough events (k-core).

    One pass is not enough, because removing an item takes events from users, and removing a user takes events from items.

    Return the number of removed events.
    """
    min_events_by_side = {"item": log_filter.min_item_events, "user": log_filter.min_user_events}
    num_removed_events = 0
    while True:
        num_removed_in_pass = 0
        for side, min_events in min_events_by_side.items():
            if min_events > 1:
                rare_ids_sql = f'SELECT "{side}" FROM remaining GROUP BY "{side}" HAVING count(*) < {min_events}'
                num_removed_in_pass += _replace_remaining(
                    session, f'SELECT * FROM remaining ANTI JOIN ({rare_ids_sql}) USING ("{side}")'
                )
        num_removed_events += num_removed_in_pass
        if num_removed_in_pass == 0:
            return num_removed_events


def _replace_remaining(session: SqlSession, query: str) -> int:
    """Replace table `remaining` by the rows of `query`; return the number of removed events."""
    num_events_before = fetch_count(session, "SELECT count(*) FROM remaining")
    session.create_table("remaining", query)
    return num_events_before - fetch_count(session, "SELECT count(*) FROM remaining")


def _newest_first_sql(tie_breaker_columns: Sequence[str]) -> str:
    """Return the ORDER BY terms that sort a user's events, the newest first."""
    return ", ".join(f"{column} DESC" for column in ("position", "item", *tie_breaker_columns))


def _test_days(session: SqlSession, split: TimeSplit, events_sql: str, *, end_us: int) -> float:
    """Return the length of the test period. For `auto`, it is the smallest number of days with enough users; see TimeSplit."""
    if split.test_days != "auto":
        return split.test_days
    ((oldest_us, latest_start_us),) = session.fetch_rows(
        f"""
        WITH users AS (SELECT min(position) AS oldest, max(position) AS newest FROM {events_sql} GROUP BY "user")
        SELECT (SELECT min(oldest) FROM users), min(newest)
        FROM (SELECT newest FROM users ORDER BY newest DESC LIMIT {split.test_users})
        """
    )
    if oldest_us is None:  # the filters have removed all events
        return 1.0
    min_days = (end_us - latest_start_us) // DAY_US + 1
    return float(max(1, min(min_days, (end_us - oldest_us) // (MIN_SPAN_PER_TEST_PERIOD * DAY_US))))


_FOLD_HASH_SQL = (
    '(("user"::BIGINT // 65536 % 65536 * 2654435761 % 65536 * 65536 + "user"::BIGINT % 65536 * 2654435761)'
    " % 4294967296 // 65536)"
)
"""Multiplicative hash of a user's code (Knuth, The Art of Computer Programming, volume 3, section 6.4). The code is
multiplied in two halves of 16 bits, because the whole product can exceed 64 bits."""


def _split_code_sql(
    config: InteractionsConfig, *, end_us: int, test_days: float | None, tie_breaker_columns: Sequence[str]
) -> str:
    """Return SQL for the code of an event's split.

    Args:
        end_us: end of the test period; used only for a split by time.
        test_days: length of the test period; None for other splits than by time.
        tie_breaker_columns: columns that order a user's events with the same position and item.
    """
    split_config = config.split
    if isinstance(split_config, TimeSplit):
        assert test_days is not None
        test_start_us = end_us - int(test_days * DAY_US)
        validation_start_us = test_start_us - int(split_config.validation_days * DAY_US)
        return f"CASE WHEN position > {test_start_us} THEN 2 WHEN position > {validation_start_us} THEN 1 ELSE 0 END"
    if isinstance(split_config, LeaveLastOut):
        window_sql = f'PARTITION BY "user" ORDER BY {_newest_first_sql(tie_breaker_columns)}'
        is_training_only_sql = f'count(*) OVER (PARTITION BY "user") < {split_config.min_events}'
        if split_config.num_folds > 1:
            is_training_only_sql += f" OR {_FOLD_HASH_SQL} % {split_config.num_folds} != {split_config.fold}"
        return f"CASE WHEN {is_training_only_sql} THEN 0 ELSE greatest(0, 3 - row_number() OVER ({window_sql})) END"
    if split_config.validation_share > 0:
        return f"CASE WHEN split = 0 AND draw < {int(split_config.validation_share * 1_000_000)} THEN 1 ELSE split END"
    return "split"


def time_us(time: datetime) -> int:
    """Convert a time to microseconds since 1970. A time without an offset is in UTC.

    >>> time_us(datetime(1970, 1, 2)) == DAY_US
    True
    """
    return (time.replace(tzinfo=time.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def _newest_time_us(files: Sequence[IngestedFile], timestamp_column: str) -> int:
    """Return the newest time of the files in microseconds. The spans are floats, which are exact until the year 2255."""
    return int(max(file.spans[timestamp_column][1] for file in files if timestamp_column in file.spans))
