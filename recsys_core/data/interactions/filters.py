"""Parts of the log -> table or view `log`: user and item (codes), position, split, and what else rides along."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import duckdb

from recsys_core.data.interactions.config import SPLITS, GivenSplit, InteractionsConfig, LeaveLastOut, LogFilter, TimeSplit
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
    live: Mapping[SourceFile, int],
) -> dict[str, int]:
    """Creates `log` from the parts in `folder`; returns how many events were set aside, by reason.

    Args:
        live: tonight's files with the code of the split each is given for; events of other files are not taken.
    """
    given = isinstance(config.split, GivenSplit)
    # Of a part that was all files without rows, none may be left.
    some_live = [part for part in parts if any(file.source in live for file in part.files)]
    events = " UNION ALL ".join(_part(part, folder=folder, live=live, given=given) for part in some_live)
    connection.execute(f"CREATE VIEW events AS {events}").fetchall()
    before = _count(connection, "SELECT count(*) FROM events")
    if before == 0:
        raise InputError(_nothing(config, parts))
    aside: dict[str, int] = {
        "below_threshold": sum(read.below_threshold for part in parts for read in part.files if read.source in live)
    }
    newest = _newest(parts, config, live) if config.timestamp_column else 0
    kept = "events"
    if config.filter.window_days is not None:
        kept = f"(SELECT * FROM events WHERE position > {newest - int(config.filter.window_days * DAY_US)})"
    if config.filter != LogFilter(window_days=config.filter.window_days):
        connection.execute(f"CREATE TABLE kept AS SELECT * FROM {kept}").fetchall()
        left = _count(connection, "SELECT count(*) FROM kept")
        aside |= {"outside_window": before - left} | _filter(connection, config.filter)
        kept = "kept"
    elif config.filter.window_days is not None:
        aside["outside_window"] = before - _count(connection, f"SELECT count(*) FROM {kept}")
    split = _split(config, newest=newest, riders=rider_columns(connection, "events"))
    # A view costs nothing but is worked out at each use; windows over users are worked out once.
    kind = "TABLE" if isinstance(config.split, LeaveLastOut) else "VIEW"
    connection.execute(f"CREATE {kind} log AS SELECT * EXCLUDE (split), ({split})::TINYINT AS split FROM {kept}").fetchall()
    return {reason: count for reason, count in aside.items() if count}


def rider_columns(connection: duckdb.DuckDBPyConnection, table: str) -> list[str]:
    """What an event of `table` carries beyond user, item, position and split; it settles ties: no order is left to chance."""
    return [name for name in connection.table(table).columns if name == "weight" or name.startswith("context_")]


def check_log(connection: duckdb.DuckDBPyConnection, config: InteractionsConfig, *, first_file: str) -> dict[str, str]:
    """The log's time span; InputError when a split is empty, or where there is nothing to choose between."""
    counts = dict(connection.sql("SELECT split, count(*) FROM log GROUP BY split").fetchall())
    told = ", ".join(f"{counts.get(code, 0):,} {name}" for code, name in enumerate(SPLITS))
    if not counts:
        raise InputError(f"{first_file}: interactions.filter leaves no events; loosen it")
    for code, name in enumerate(SPLITS):
        if not counts.get(code) and name != "validation":
            raise InputError(
                f"{first_file}: the split {config.split.kind!r} leaves no {name} events ({told}); change interactions.split"
            )
    for side, column in (("user", config.user_column), ("item", config.item_column)):
        if _count(connection, f'SELECT count(*) FROM (SELECT DISTINCT "{side}" FROM log LIMIT 2)') < 2:
            raise InputError(f"{first_file}: column {column!r}: the log has a single {side}; there is nothing to learn from it")
    if config.timestamp_column is None:
        return {}
    ((first, last),) = connection.sql("SELECT min(position), max(position) FROM log").fetchall()
    return {"first_time": as_time(first), "last_time": as_time(last)}


def _part(part: LogPart, *, folder: Path, live: Mapping[SourceFile, int], given: bool) -> str:
    read = scan(folder / part.file)
    alive = [(at, live[file.source]) for at, file in enumerate(part.files) if file.source in live]
    if len(alive) == len(part.files) and not given:
        return f"SELECT * EXCLUDE (source), 0 AS split FROM {read}"
    values = ", ".join(f"({at}, {split})" for at, split in alive)
    return f"SELECT * EXCLUDE (source) FROM {read} JOIN (VALUES {values}) AS alive(source, split) USING (source)"


def _filter(connection: duckdb.DuckDBPyConnection, wanted: LogFilter) -> dict[str, int]:
    """Leaves out what `wanted` says from table kept; returns the events per reason, and the users set aside as bots."""
    aside: dict[str, int] = {}
    if wanted.duplicates != "keep":
        same = '"user", item, position' if wanted.duplicates == "exact" else '"user", item'
        newest = "position DESC" if wanted.duplicates == "last" else "position"
        # Of an event that is given for training and for the test, the training one stays.
        order = ", ".join([newest, "split", *rider_columns(connection, "kept")])
        aside["duplicates"] = _keep(
            connection, f"SELECT * FROM kept QUALIFY row_number() OVER (PARTITION BY {same} ORDER BY {order}) = 1"
        )
    if wanted.bot_threshold is not None:
        busy = f'SELECT "user" FROM kept GROUP BY "user" HAVING count(*) > {wanted.bot_threshold}'
        aside["bot_users"] = _count(connection, f"SELECT count(*) FROM ({busy})")
        aside["bot_events"] = _keep(connection, f'SELECT * FROM kept ANTI JOIN ({busy}) USING ("user")')
    aside["rare"] = 0
    minimums = {
        side: least for side, least in (("item", wanted.min_item_events), ("user", wanted.min_user_events)) if least > 1
    }
    dropped = 1
    while dropped and minimums:  # leaving out a user takes events from items, and the other way round
        dropped = 0
        for side, least in minimums.items():
            rare = f'SELECT "{side}" FROM kept GROUP BY "{side}" HAVING count(*) < {least}'
            dropped += _keep(connection, f'SELECT * FROM kept ANTI JOIN ({rare}) USING ("{side}")')
        aside["rare"] += dropped
    if wanted.max_user_events is not None:
        order = _newest_first(("split", *rider_columns(connection, "kept")))
        newest = f'row_number() OVER (PARTITION BY "user" ORDER BY {order}) <= {wanted.max_user_events}'
        aside["over_cap"] = _keep(connection, f"SELECT * FROM kept QUALIFY {newest}")
    return aside


def _keep(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    """Replaces table kept by `query`'s rows; returns how many are gone."""
    before = _count(connection, "SELECT count(*) FROM kept")
    connection.execute(f"CREATE TABLE next AS {query}").fetchall()
    connection.execute("DROP TABLE kept").fetchall()
    connection.execute("ALTER TABLE next RENAME TO kept").fetchall()
    return before - _count(connection, "SELECT count(*) FROM kept")


def _newest_first(ties: Sequence[str]) -> str:
    """SQL that orders a user's events; what stands in `ties` comes last."""
    return ", ".join(f"{column} DESC" for column in ("position", "item", *ties))


def _split(config: InteractionsConfig, *, newest: int, riders: Sequence[str]) -> str:
    """SQL for the code of an event's split."""
    split = config.split
    if isinstance(split, TimeSplit):
        test = newest - int(split.test_days * DAY_US)
        validation = test - int(split.validation_days * DAY_US)
        return f"CASE WHEN position > {test} THEN 2 WHEN position > {validation} THEN 1 ELSE 0 END"
    if isinstance(split, LeaveLastOut):
        window = f'PARTITION BY "user" ORDER BY {_newest_first(riders)}'
        few = f'count(*) OVER (PARTITION BY "user") < {split.min_events}'
        return f"CASE WHEN {few} THEN 0 ELSE greatest(0, 3 - row_number() OVER ({window})) END"
    if split.validation_share > 0:
        return f"CASE WHEN split = 0 AND draw < {int(split.validation_share * 1_000_000)} THEN 1 ELSE split END"
    return "split"


def _newest(parts: Sequence[LogPart], config: InteractionsConfig, live: Mapping[SourceFile, int]) -> int:
    """The newest time of tonight's files, in microseconds (spans are floats: exact to the microsecond until the year 2255)."""
    column = config.timestamp_column or ""
    return int(
        max(file.spans[column][1] for part in parts for file in part.files if file.source in live and column in file.spans)
    )


def _nothing(config: InteractionsConfig, parts: Sequence[LogPart]) -> str:
    file = parts[0].files[0].source.path
    if config.label_column:
        return (
            f"{file}: column {config.label_column!r}: no event reaches interactions.label_threshold, {config.label_threshold}; "
            "lower it"
        )
    return f"{file}: no good row is left in the log; see interactions.on_bad_rows"


def _count(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    ((count,),) = connection.sql(query).fetchall()
    return int(count)


def as_time(microseconds: int) -> str:
    """ISO 8601 in UTC, to the second."""
    return datetime.fromtimestamp(microseconds / 1e6, UTC).isoformat(timespec="seconds")
