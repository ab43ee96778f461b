"""Incremental reading of the interaction log: each file is checked once, and its events are kept as codes in a part.

A part is a parquet file of events in which codes replace the user and item ids. A code is never given to a second id, so a
part stays valid in later runs, and only new files have to be read.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import duckdb
import pyarrow as pa

from recsys_core.data.interactions.checks import IN_FUTURE, FileStatistics, reject_bad_log, row_checks, scan_files
from recsys_core.data.interactions.config import FileSplit, InteractionsConfig
from recsys_core.data.interactions.read_errors import explain_read_errors, reject_false_null_counts
from recsys_core.data.interactions.schema import InteractionsInput
from recsys_core.data.row_checks import pass_condition
from recsys_core.errors import InputError
from recsys_core.manifests import IdType, InteractionsManifest, LogPart, ReadFile, SourceFile, fingerprint_of
from recsys_core.parquet.columns import require_column
from recsys_core.parquet.duckdb_session import SQL_TYPE, quoted, scan, scan_all
from recsys_core.parquet.guards import has_page_checksums, verify_pages, verify_sidecars
from recsys_core.parquet.local_copies import local_files
from recsys_core.parquet.sources import Source

MICROSECONDS = {"s": "* 1000000", "ms": "* 1000", "us": "", "ns": "// 1000"}
PAIR, ITEM = 'hash("user"::VARCHAR, item::VARCHAR', "hash(item::VARCHAR"
"""Start of a hash of an event, or of its item. Ids are hashed as strings: the hash of a number depends on its width."""
READING = {
    "user_column", "item_column", "timestamp_column", "timestamp_unit", "order_column", "label_column", "label_threshold",
    "label_range", "weight_column", "context_columns", "on_bad_rows", "max_future_days",
}  # fmt: skip
"""Settings that decide the content of a part; a change of any other setting keeps the parts of the previous run."""


@dataclass(frozen=True)
class GatheredParts:
    """The parts that hold the events of all input files."""

    parts: tuple[LogPart, ...]
    new_sources: tuple[Source, ...]
    """Files that were read in this run."""


def gather_parts(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    log: InteractionsInput,
    out: Path,
    *,
    continued: InteractionsManifest | None,
) -> GatheredParts:
    """Keep the valid parts of the run `continued`, and read all files that are in none of them into one new part."""
    (out / "parts").mkdir()
    keys = {name: str(kind) for name, kind in log.sources[0].partition_types.items() if name in config.columns}
    reading = fingerprint_of(
        duckdb.__version__, config.model_dump(mode="json", include=READING), _validation_draw(config), keys
    )
    parts = []
    for part in continued.parts if continued else ():
        if part.reading == reading and _is_mostly_current(part, log.splits) and not _has_dropped_future_rows(part):
            assert continued is not None
            _link_or_copy(continued.path(part.file), out / part.file)
            parts.append(part)
    known_files = {file.source for part in parts for file in part.files}
    new_sources = tuple(source for source in log.sources if source.record not in known_files)
    if new_sources:
        name = fingerprint_of(reading, [source.record for source in new_sources])[:16]
        types = (log.user_id_type, log.item_id_type)
        file = out / "parts" / f"{name}.parquet"
        parts.append(read_part(connection, config, sources=new_sources, types=types, reading=reading, file=file))
    return GatheredParts(tuple(parts), new_sources)


def _is_mostly_current(part: LogPart, current: Mapping[SourceFile, int]) -> bool:
    """Return whether at least half of the rows of `part` are from files that still exist unchanged."""
    num_rows = sum(file.source.rows for file in part.files)
    return 2 * sum(file.source.rows for file in part.files if file.source in current) >= num_rows


def _has_dropped_future_rows(part: LogPart) -> bool:
    """Return whether rows were dropped for a time in the future: in this run the time may have passed."""
    return any(name.endswith(IN_FUTURE) for file in part.files for name in file.bad_rows)


def _link_or_copy(part: Path, target: Path) -> None:
    """Hard-link a part, which is never changed; copy it if the file system has no hard links between the two folders."""
    try:
        target.hardlink_to(part)
    except OSError:
        shutil.copyfile(part, target)


def read_part(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    *,
    sources: Sequence[Source],
    types: tuple[IdType, IdType],
    reading: str,
    file: Path,
) -> LogPart:
    """Write the events of `sources` to `file`, and add their new ids to the tables user_ids and item_ids.

    Args:
        types: types of the user ids and of the item ids.
        reading: fingerprint of the settings that decide the content of a part.

    Raises:
        InputError: bad rows (see config.on_bad_rows), and files whose content contradicts their footer.
    """
    schema = {
        column: _widest([require_column(each, column, setting="interactions") for each in sources]) for column in config.columns
    }
    if config.checksums == "sidecar":
        verify_sidecars(sources)
    checksummed = [has_page_checksums(source, config.columns) for source in sources]
    for source, has_some in zip(sources, checksummed, strict=True):
        if source.local and has_some:  # pages of remote files are verified while they are copied
            verify_pages(source, config.columns)
    with (
        local_files(sources, columns=config.columns, scratch=file.with_suffix(".remote")) as paths,
        explain_read_errors(config, sources, paths),
    ):
        connection.execute(f"CREATE OR REPLACE TEMP VIEW raw AS {_raw(config, sources, paths, schema=schema)}").fetchall()
        checks = row_checks(config, schema=schema)
        columns = _range_columns(config)
        positive = f"label::DOUBLE >= {config.label_threshold!r}" if config.label_column else "true"
        statistics = scan_files(connection, checks, num_files=len(sources), range_columns=list(columns), positive=positive)
        _require_rows_of_footer(statistics, sources)
        reject_bad_log(connection, config, checks, statistics, sources=sources)
        # The checks cost a second per 20 million rows, so they are left out where no row is bad.
        good = f"{pass_condition(checks)} AND {positive}" if any(each.num_bad for each in statistics) else positive
        for side, kind in zip(("user", "item"), types, strict=True):
            _add_ids(connection, side, kind=kind, good=good)
        written = _write_events(connection, config, file=file, good=good, types=types)
        reject_false_null_counts(written, statistics, sources, has_label=config.label_column is not None)
    files = tuple(
        ReadFile(
            source=source.record,
            bad_rows=dict(each.bad_counts),
            below_threshold=each.num_rows - each.num_bad - written.get(index, (0, 0))[0] if config.label_column else 0,
            spans={columns[alias]: bounds for alias, bounds in each.ranges.items()},
            checksums=checksummed[index],
        )
        for index, (source, each) in enumerate(zip(sources, statistics, strict=True))
    )
    return LogPart(file=f"parts/{file.name}", reading=reading, files=files)


def _raw(
    config: InteractionsConfig, sources: Sequence[Source], paths: Sequence[Path], *, schema: Mapping[str, pa.DataType]
) -> str:
    """Return SQL for the log under fixed column names, so that no later query has to quote the user's names."""
    names = {"user": config.user_column, "item": config.item_column, "time": config.timestamp_column}
    names |= {"sequence": config.order_column, "label": config.label_column, "weight": config.weight_column}
    names |= {f"context_{index}": column for index, column in enumerate(config.context_columns)}
    in_path = {name for source in sources for name in source.partition if name not in source.schema.names} & set(config.columns)
    columns = [
        f'{"keys" if column in in_path else "file"}.{quoted(column)} AS "{alias}"' for alias, column in names.items() if column
    ]
    read = f"{scan_all(paths)} AS file"
    if in_path:
        read += f" JOIN ({_hive_keys(sources, sorted(in_path))}) AS keys ON file.file_index = keys.source"
    raw = f"SELECT {', '.join(columns)}, file.file_index AS source, file.file_row_number AS row FROM {read}"
    early = f", {_is_before_1970(schema[config.timestamp_column])} AS early" if config.timestamp_column else ""
    return f"SELECT *, {_position(config, schema)} AS position{early} FROM ({raw})"


def _widest(kinds: Sequence[pa.DataType]) -> pa.DataType:
    """Return the type that decides the checks and casts of a column that has another type in another file."""
    wide = [kind for kind in kinds if pa.types.is_floating(kind) or pa.types.is_uint64(kind)]
    return (wide or list(kinds))[0]


def _hive_keys(sources: Sequence[Source], names: Sequence[str]) -> str:
    """Return SQL for a table with the hive keys `names` of each file, as dates, integers or strings."""
    rows = [
        f"({index}, {', '.join(_constant(source.partition_value(name)) for name in names)})"
        for index, source in enumerate(sources)
    ]
    return f"SELECT * FROM (VALUES {', '.join(rows)}) AS t(source, {', '.join(quoted(name) for name in names)})"


def _constant(value: int | date | str) -> str:
    if isinstance(value, int):
        return f"{value}::BIGINT"
    return f"DATE '{value.isoformat()}'" if isinstance(value, date) else quoted(value, quote="'")


def _position(config: InteractionsConfig, schema: Mapping[str, pa.DataType]) -> str:
    """Return SQL for the sort key of a user's events: the time in microseconds, the order column, or a hash without both."""
    if config.order_column is not None:
        return "TRY(sequence::BIGINT)" if pa.types.is_integer(schema[config.order_column]) else "sequence::DOUBLE"
    if config.timestamp_column is None:
        return f"({PAIR}) >> 1)::BIGINT"
    kind = schema[config.timestamp_column]
    if pa.types.is_integer(kind):
        return f"TRY(CAST(time AS BIGINT) {MICROSECONDS[config.timestamp_unit]})"
    zoned = pa.types.is_timestamp(kind) and kind.tz is not None
    # The cast: epoch_us does not accept nanoseconds with a time zone.
    return f"TRY(epoch_us(time::{'TIMESTAMPTZ' if zoned else 'TIMESTAMP'}))"


def _is_before_1970(kind: pa.DataType) -> str:
    """Return SQL for whether a time is before 1970, also for a time that overflows `position`."""
    if pa.types.is_integer(kind):
        return "time < 0"
    zoned = pa.types.is_timestamp(kind) and kind.tz is not None
    return "time::TIMESTAMPTZ < TIMESTAMPTZ '1970-01-01 00:00:00+00'" if zoned else "time < DATE '1970-01-01'"


def _range_columns(config: InteractionsConfig) -> dict[str, str]:
    """Return the columns of `raw` whose smallest and largest value are reported, with the user's name of each."""
    names = {
        "position": config.timestamp_column or config.order_column,
        "label": config.label_column,
        "weight": config.weight_column,
    }
    return {alias: column for alias, column in names.items() if column is not None}


def _require_rows_of_footer(statistics: Sequence[FileStatistics], sources: Sequence[Source]) -> None:
    for source, file in zip(sources, statistics, strict=True):
        if file.num_rows != source.record.rows:
            raise InputError(
                f"{source.name}: damaged: the footer declares {source.record.rows:,} rows, but the file has "
                f"{file.num_rows:,}; write the file again"
            )


def _add_ids(connection: duckdb.DuckDBPyConnection, side: str, *, kind: IdType, good: str) -> None:
    """Give the new ids of `raw` the next codes, the most frequent id first."""
    ((num_known,),) = connection.sql(f"SELECT count(*) FROM {side}_ids").fetchall()
    new = f'SELECT TRY_CAST("{side}" AS {SQL_TYPE[kind]}) AS id, count(*) AS events FROM raw WHERE {good} GROUP BY 1'
    anti = f"ANTI JOIN {side}_ids USING (id)" if num_known else ""
    connection.execute(
        f"INSERT INTO {side}_ids SELECT id, ({num_known} + row_number() OVER (ORDER BY events DESC, id) - 1)::INTEGER, NULL "
        f"FROM ({new}) {anti}"
    ).fetchall()


def _write_events(
    connection: duckdb.DuckDBPyConnection, config: InteractionsConfig, *, file: Path, good: str, types: tuple[IdType, IdType]
) -> dict[int, tuple[int, int]]:
    """Write the good rows as codes; return for each source the number of rows written and how many of them have a null."""
    # TRY_CAST: DuckDB may cast a bad row before the filter removes it.
    user, item = (f'TRY_CAST(raw."{side}" AS {SQL_TYPE[kind]})' for side, kind in zip(("user", "item"), types, strict=True))
    extra = ["TRY_CAST(weight AS FLOAT) AS weight"] if config.weight_column else []
    extra += [f"context_{index}" for index in range(len(config.context_columns))]
    draw = _validation_draw(config)
    extra += [] if draw is None else [f"{draw} AS draw"]
    columns = ", ".join(["source::INTEGER AS source", 'u.code AS "user"', "i.code AS item", "position", *extra])
    joins = [
        f"JOIN {side}_ids {side[0]} ON {_id_condition(connection, side, value=value)}"
        for side, value in (("user", user), ("item", item))
    ]
    connection.execute(
        f"COPY (SELECT {columns} FROM raw {' '.join(joins)} WHERE {good}) "
        f"TO {quoted(str(file), quote=chr(39))} (FORMAT parquet, COMPRESSION lz4_raw)"
    ).fetchall()
    nulls = "position IS NULL" + (" OR weight IS NULL" if config.weight_column else "")
    query = f"SELECT source, count(*), count(*) FILTER ({nulls}) FROM {scan(file)} GROUP BY 1"
    return {source: (num_rows, num_nulls) for source, num_rows, num_nulls in connection.sql(query).fetchall()}


def _validation_draw(config: InteractionsConfig) -> str | None:
    """Return SQL for a number below 1,000,000 that decides whether a training event is held out for validation.

    All events of a pair of user and item, or of an item (see validation_by), have the same number. None without such a draw.
    """
    if not isinstance(config.split, FileSplit) or config.split.validation_share == 0:
        return None
    hashed = PAIR if config.split.validation_by == "pair" else ITEM
    return f"({hashed}, 'validation') % 1000000)::INTEGER"


def _id_condition(connection: duckdb.DuckDBPyConnection, side: str, *, value: str) -> str:
    """Return the condition that joins `value` with its id: by hash if all hashes differ, a third faster than by string."""
    ((num_ids, num_hashes),) = connection.sql(f"SELECT count(*), count(DISTINCT hash(id)) FROM {side}_ids").fetchall()
    return f"hash({value}) = hash({side[0]}.id)" if num_hashes == num_ids else f"{value} = {side[0]}.id"
