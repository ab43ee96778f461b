"""The interaction log as DuckDB's table `log`: user, item, position (what orders a user's events), split."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys_core.data.config import InteractionsConfig, LeaveLastOut, TimeSplit
from recsys_core.data.sources import Source, literal
from recsys_core.errors import InputError
from recsys_core.manifests import IdType

SPLITS = ("train", "validation", "test")
"""A split's code is its position here; a user's events are stored in this order."""
SQL_TYPE = {"int64": "BIGINT", "string": "VARCHAR"}
MICROSECONDS = {"s": "* 1000000", "ms": "* 1000", "us": "", "ns": "// 1000"}
DAY_US = 86_400_000_000
YEAR_1_US, YEAR_10000_US = -62_135_596_800_000_000, 253_402_300_800_000_000


def quoted(name: str, *, mark: str = '"') -> str:
    """`name` as an SQL identifier, or with mark "'" as a string.

    >>> quoted('a "b"')
    '"a ""b\"""'
    """
    return mark + name.replace(mark, 2 * mark) + mark


def load_log(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    *,
    given: Mapping[str, Sequence[Source]],
    types: tuple[IdType, IdType],
) -> int:
    """Creates table `log` from all files, split; returns how many events fell below the label threshold."""
    for name, group in given.items():
        _refuse_nulls(connection, config, group)
        connection.execute(f"CREATE VIEW raw_{name} AS {_selection(config, group, types=types)}")
    kept = "WHERE label::DOUBLE >= ?" if config.label_column else ""
    threshold = [config.label_threshold] if config.label_column else []
    union = " UNION ALL ".join(f"SELECT *, {SPLITS.index(name)} AS split FROM raw_{name} {kept}" for name in given)
    try:
        connection.execute(f"CREATE TABLE unsplit AS {union}", threshold * len(given))
    except duckdb.ConversionException as error:
        raise InputError(f"{_files(given)}: {str(error).splitlines()[0]}; ids and times fit into int64") from error
    except duckdb.OutOfRangeException as error:
        raise InputError(_wrong_unit(config, _files(given), str(error).splitlines()[0])) from error
    if config.label_column and _count(connection, "SELECT count(*) FROM unsplit") == 0:
        raise InputError(
            f"{_files(given)}: column {config.label_column!r}: no event reaches interactions.label_threshold, "
            f"{config.label_threshold}; lower it"
        )
    connection.execute(f"CREATE TABLE log AS {_split_query(connection, config)}")
    connection.execute("DROP TABLE unsplit")
    total = sum(source.record.rows for group in given.values() for source in group)
    return total - _count(connection, "SELECT count(*) FROM log")


def check_log(connection: duckdb.DuckDBPyConnection, config: InteractionsConfig, *, first_file: str) -> dict[str, Any]:
    """The log's time span; InputError when a split is empty."""
    counts = [_count(connection, f"SELECT count(*) FROM log WHERE split = {code}") for code in range(len(SPLITS))]
    for name, count in zip(SPLITS, counts, strict=True):
        if count == 0 and name != "validation":
            raise InputError(
                f"{first_file}: the split {config.split.kind!r} leaves no {name} events ({_told(counts)}); "
                "change interactions.split"
            )
    if config.timestamp_column is None:
        return {}
    span = connection.execute("SELECT min(position), max(position) FROM log").fetchone()
    assert span is not None
    if span[0] < YEAR_1_US or span[1] >= YEAR_10000_US:
        raise InputError(_wrong_unit(config, first_file, f"times from {span[0]:,} to {span[1]:,} microseconds since 1970"))
    return {name: _iso(value) for name, value in zip(("first_time", "last_time"), span, strict=True)}


def _selection(config: InteractionsConfig, group: Sequence[Source], *, types: tuple[IdType, IdType]) -> str:
    user, item = (
        f"CAST({quoted(column)} AS {SQL_TYPE[kind]})"
        for column, kind in zip((config.user_column, config.item_column), types, strict=True)
    )
    columns = [f"{user} AS user", f"{item} AS item", f"{_position(config, group[0])} AS position"]
    if config.label_column:
        columns.append(f"{quoted(config.label_column)} AS label")
    return f"SELECT {', '.join(columns)} FROM {_read(group)}"


def _position(config: InteractionsConfig, source: Source) -> str:
    """What orders a user's events: the time in microseconds, the order column, or (unordered) a hash, for a random order."""
    if config.order_column is not None:
        return quoted(config.order_column)
    if config.timestamp_column is None:
        return f"hash({quoted(config.user_column)}, {quoted(config.item_column)})"
    column = quoted(config.timestamp_column)
    kind = source.schema.field(config.timestamp_column).type
    if pa.types.is_integer(kind):
        return f"CAST({column} AS BIGINT) {MICROSECONDS[config.timestamp_unit]}"
    zoned = pa.types.is_timestamp(kind) and kind.tz is not None
    return f"epoch_us({column}::{'TIMESTAMPTZ' if zoned else 'TIMESTAMP'})"  # it takes no nanoseconds with zone


def _split_query(connection: duckdb.DuckDBPyConnection, config: InteractionsConfig) -> str:
    split = config.split
    if isinstance(split, TimeSplit):
        last = _count(connection, "SELECT max(position) FROM unsplit")
        test = last - int(split.test_days * DAY_US)
        validation = test - int(split.validation_days * DAY_US)
        code = f"CASE WHEN position > {test} THEN 2 WHEN position > {validation} THEN 1 ELSE 0 END"
    elif isinstance(split, LeaveLastOut):
        window = "PARTITION BY user ORDER BY position DESC, item DESC"
        code = (
            f"CASE WHEN count(*) OVER (PARTITION BY user) < {split.min_events} THEN 0 "
            f"ELSE greatest(0, 3 - row_number() OVER ({window})) END"
        )
    elif split.validation_share > 0:
        held_out = f"hash(user, item, 'validation') % 1000000 < {int(split.validation_share * 1_000_000)}"
        code = f"CASE WHEN split = 0 AND {held_out} THEN 1 ELSE split END"
    else:
        code = "split"
    return f"SELECT user, item, position, ({code})::TINYINT AS split FROM unsplit"


def _refuse_nulls(connection: duckdb.DuckDBPyConnection, config: InteractionsConfig, group: Sequence[Source]) -> None:
    """Refuses NaN too, which DuckDB holds for the largest number."""
    absent = {}
    for column in config.columns:
        floating = any(pa.types.is_floating(source.schema.field(column).type) for source in group)
        nan = f" OR isnan({quoted(column)}::DOUBLE)" if floating else ""
        absent[column] = f"count(*) FILTER ({quoted(column)} IS NULL{nan})"
    counts = connection.execute(f"SELECT {', '.join(absent.values())} FROM {_read(group)}").fetchone()
    assert counts is not None
    for column, count in zip(absent, counts, strict=True):
        if count:
            raise InputError(
                f"{_first_null(group, column)}: null or NaN, as in {count:,} rows in all; "
                "drop these rows, or mend what writes them"
            )


def _first_null(group: Sequence[Source], column: str) -> str:
    for source in group:
        row = 0
        with pq.ParquetFile(source.path) as file:
            for batch in file.iter_batches(columns=[column]):
                found = pc.index(batch.column(column).is_null(nan_is_null=True), True).as_py()
                if found >= 0:
                    return f"{source.path}: column {column!r}, row {row + found}"
                row += batch.num_rows
    raise AssertionError(f"DuckDB sees nulls in {column!r} where pyarrow sees none")


def _read(group: Sequence[Source]) -> str:
    paths = ", ".join(quoted(literal(source.path), mark="'") for source in group)
    return f"read_parquet([{paths}], union_by_name = true, hive_partitioning = false)"


def _wrong_unit(config: InteractionsConfig, file: str, why: str) -> str:
    return (
        f"{file}: column {config.timestamp_column!r}: {why}, beyond the years 1 to 9999; "
        f"interactions.timestamp_unit is {config.timestamp_unit!r}, is that its unit?"
    )


def _count(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    row = connection.execute(query).fetchone()
    return int(row[0]) if row and row[0] is not None else 0


def _told(counts: Sequence[int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in zip(SPLITS, counts, strict=True))


def _files(given: Mapping[str, Sequence[Source]]) -> str:
    return str(next(iter(given.values()))[0].path)


def _iso(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).isoformat(timespec="seconds")
