"""New files of the log, read once: rows checked, ids turned into codes, events written as one part.

A part is parquet with the codes of the ids in place of the ids. Codes are never given twice, so a part stays true on later
nights: only what is new has to be read again.
"""

import shutil
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import duckdb
import pyarrow as pa

from recsys_core.data.interactions.checks import FUTURE, FileFacts, good_rows, refuse_bad_rows, row_checks, scan_rows
from recsys_core.data.interactions.config import GivenSplit, InteractionsConfig
from recsys_core.data.interactions.read_errors import damage_is_told, refuse_untrue_nulls
from recsys_core.data.interactions.schema import InteractionsInput
from recsys_core.errors import InputError
from recsys_core.manifests import IdType, InteractionsManifest, LogPart, ReadFile, SourceFile, fingerprint_of
from recsys_core.parquet.columns import require_column
from recsys_core.parquet.duckdb_session import SQL_TYPE, quoted, scan, scan_all
from recsys_core.parquet.guards import has_page_checksums, verify_pages, verify_sidecars
from recsys_core.parquet.local_copies import local_files
from recsys_core.parquet.sources import Source

MICROSECONDS = {"s": "* 1000000", "ms": "* 1000", "us": "", "ns": "// 1000"}
PAIR, ITEM = 'hash("user"::VARCHAR, item::VARCHAR', "hash(item::VARCHAR"
"""Of strings: the hash of a number depends on how wide the file's writer made it."""
READING = {
    "user_column", "item_column", "timestamp_column", "timestamp_unit", "order_column", "label_column", "label_threshold",
    "label_range", "weight_column", "context_columns", "on_bad_rows", "max_future_days",
}  # fmt: skip
"""Settings that decide what a part holds; whatever else changes, last night's parts still hold."""


def gather_parts(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    found: InteractionsInput,
    out: Path,
    *,
    continued: InteractionsManifest | None,
) -> tuple[tuple[LogPart, ...], tuple[Source, ...]]:
    """Last night's parts that hold for tonight's files, and a new one of the files that none of them has: these files too."""
    (out / "parts").mkdir()
    keys = {name: str(kind) for name, kind in found.sources[0].partition_types.items() if name in config.columns}
    reading = fingerprint_of(duckdb.__version__, config.model_dump(mode="json", include=READING), _draw(config), keys)
    kept = []
    for part in continued.parts if continued else ():
        if part.reading == reading and _holds(part, found.splits) and not _waits(part):
            assert continued is not None
            _take_over(continued.path(part.file), out / part.file)
            kept.append(part)
    known = {file.source for part in kept for file in part.files}
    fresh = tuple(source for source in found.sources if source.record not in known)
    if not fresh:
        return tuple(kept), fresh
    name = fingerprint_of(reading, [source.record for source in fresh])[:16]
    types = (found.user_id_type, found.item_id_type)
    made = read_part(connection, config, sources=fresh, types=types, reading=reading, file=out / "parts" / f"{name}.parquet")
    return (*kept, made), fresh


def _holds(part: LogPart, live: Mapping[SourceFile, int]) -> bool:
    """Whether at least half of its rows are of files still there and unchanged: the rest is carried along for nothing."""
    rows = sum(file.source.rows for file in part.files)
    return 2 * sum(file.source.rows for file in part.files if file.source in live) >= rows


def _waits(part: LogPart) -> bool:
    """Whether rows were dropped for a time in the future, which may have come by now."""
    return any(name.endswith(FUTURE) for file in part.files for name in file.bad_rows)


def _take_over(kept: Path, target: Path) -> None:
    """A part is never written again, so it is linked; it is copied where the disk is another one or knows no links."""
    try:
        target.hardlink_to(kept)
    except OSError:
        shutil.copyfile(kept, target)


def read_part(
    connection: duckdb.DuckDBPyConnection,
    config: InteractionsConfig,
    *,
    sources: Sequence[Source],
    types: tuple[IdType, IdType],
    reading: str,
    file: Path,
) -> LogPart:
    """Writes the events of `sources` to `file` and adds their new ids to the tables user_ids and item_ids (id, code).

    Args:
        reading: fingerprint of the settings that decide what is read.

    Raises:
        InputError: bad rows (as config.on_bad_rows has it), and files whose data does not keep what their footer says.
    """
    schema = {
        column: _widest([require_column(each, column, setting="interactions") for each in sources]) for column in config.columns
    }
    if config.checksums == "sidecar":
        verify_sidecars(sources)
    checksummed = [has_page_checksums(source, config.columns) for source in sources]
    for source, has_some in zip(sources, checksummed, strict=True):
        if source.local and has_some:  # of remote ones they are compared while copying
            verify_pages(source, config.columns)
    with (
        local_files(sources, columns=config.columns, scratch=file.with_suffix(".remote")) as paths,
        damage_is_told(config, sources, paths),
    ):
        connection.execute(f"CREATE OR REPLACE TEMP VIEW raw AS {_raw(config, sources, paths, schema=schema)}").fetchall()
        checks = row_checks(config, schema=schema)
        numbers = _numbers(config)
        threshold = f" AND label::DOUBLE >= {config.label_threshold!r}" if config.label_column else ""
        found = scan_rows(connection, checks, files=len(sources), numbers=list(numbers), threshold=threshold)
        _refuse_lies(found, sources)
        refuse_bad_rows(connection, config, checks, found, sources=sources)
        # Nine conditions on each row, three times over, are a second per 20 million rows: not where no row is bad.
        good = (good_rows(checks) if any(each.bad for each in found) else "true") + threshold
        for side, kind in zip(("user", "item"), types, strict=True):
            _add_ids(connection, side, kind=kind, good=good)
        kept = _write(connection, config, file=file, good=good, types=types)
        refuse_untrue_nulls(kept, found, sources, labelled=config.label_column is not None)
    files = tuple(
        ReadFile(
            source=source.record,
            bad_rows=dict(each.counts),
            below_threshold=each.rows - each.bad - kept.get(at, (0, 0))[0] if config.label_column else 0,
            spans={numbers[alias]: span for alias, span in each.spans.items()},
            checksums=checksummed[at],
        )
        for at, (source, each) in enumerate(zip(sources, found, strict=True))
    )
    return LogPart(file=f"parts/{file.name}", reading=reading, files=files)


def _raw(
    config: InteractionsConfig, sources: Sequence[Source], paths: Sequence[Path], *, schema: Mapping[str, pa.DataType]
) -> str:
    """The log under names of ours: whatever the user's columns are called, no later query has to quote them."""
    names = {"user": config.user_column, "item": config.item_column, "time": config.timestamp_column}
    names |= {"sequence": config.order_column, "label": config.label_column, "weight": config.weight_column}
    names |= {f"context_{at}": column for at, column in enumerate(config.context_columns)}
    in_path = {name for source in sources for name in source.partition if name not in source.schema.names} & set(config.columns)
    columns = [
        f'{"keys" if column in in_path else "file"}.{quoted(column)} AS "{alias}"' for alias, column in names.items() if column
    ]
    read = f"{scan_all(paths)} AS file"
    if in_path:
        read += f" JOIN ({_keys(sources, sorted(in_path))}) AS keys ON file.file_index = keys.source"
    raw = f"SELECT {', '.join(columns)}, file.file_index AS source, file.file_row_number AS row FROM {read}"
    early = f", {_early(schema[config.timestamp_column])} AS early" if config.timestamp_column else ""
    return f"SELECT *, {_position(config, schema)} AS position{early} FROM ({raw})"


def _widest(kinds: Sequence[pa.DataType]) -> pa.DataType:
    """The type that DuckDB reads a column as when its files differ, as far as checks and casts care."""
    wide = [kind for kind in kinds if pa.types.is_floating(kind) or pa.types.is_uint64(kind)]
    return (wide or list(kinds))[0]


def _keys(sources: Sequence[Source], names: Sequence[str]) -> str:
    """The hive keys of the paths as a table; a day is a day, a number a number."""
    rows = [f"({at}, {', '.join(_constant(source.constant(name)) for name in names)})" for at, source in enumerate(sources)]
    return f"SELECT * FROM (VALUES {', '.join(rows)}) AS t(source, {', '.join(quoted(name) for name in names)})"


def _constant(value: int | date | str) -> str:
    if isinstance(value, int):
        return f"{value}::BIGINT"
    return f"DATE '{value.isoformat()}'" if isinstance(value, date) else quoted(value, mark="'")


def _position(config: InteractionsConfig, schema: Mapping[str, pa.DataType]) -> str:
    """What orders a user's events: the time in microseconds, the order column, or (unordered) a hash, for a random order."""
    if config.order_column is not None:
        return "TRY(sequence::BIGINT)" if pa.types.is_integer(schema[config.order_column]) else "sequence::DOUBLE"
    if config.timestamp_column is None:
        return f"({PAIR}) >> 1)::BIGINT"
    kind = schema[config.timestamp_column]
    if pa.types.is_integer(kind):
        return f"TRY(CAST(time AS BIGINT) {MICROSECONDS[config.timestamp_unit]})"
    zoned = pa.types.is_timestamp(kind) and kind.tz is not None
    return f"TRY(epoch_us(time::{'TIMESTAMPTZ' if zoned else 'TIMESTAMP'}))"  # it takes no nanoseconds with zone


def _early(kind: pa.DataType) -> str:
    """Whether a time is before 1970, also one whose `position` is lost."""
    if pa.types.is_integer(kind):
        return "time < 0"
    zoned = pa.types.is_timestamp(kind) and kind.tz is not None
    return "time::TIMESTAMPTZ < TIMESTAMPTZ '1970-01-01 00:00:00+00'" if zoned else "time < DATE '1970-01-01'"


def _numbers(config: InteractionsConfig) -> dict[str, str]:
    """Alias in `raw` -> column whose smallest and largest value are worth knowing."""
    named = {
        "position": config.timestamp_column or config.order_column,
        "label": config.label_column,
        "weight": config.weight_column,
    }
    return {alias: column for alias, column in named.items() if column is not None}


def _refuse_lies(found: Sequence[FileFacts], sources: Sequence[Source]) -> None:
    for source, facts in zip(sources, found, strict=True):
        if facts.rows != source.record.rows:
            raise InputError(
                f"{source.name}: its footer says {source.record.rows:,} rows, but {facts.rows:,} came; the file is damaged, "
                "write it again"
            )


def _add_ids(connection: duckdb.DuckDBPyConnection, side: str, *, kind: IdType, good: str) -> None:
    """New ids of `raw` get the next codes, the most frequent first."""
    ((known,),) = connection.sql(f"SELECT count(*) FROM {side}_ids").fetchall()
    new = f'SELECT TRY_CAST("{side}" AS {SQL_TYPE[kind]}) AS id, count(*) AS events FROM raw WHERE {good} GROUP BY 1'
    anti = f"ANTI JOIN {side}_ids USING (id)" if known else ""
    connection.execute(
        f"INSERT INTO {side}_ids SELECT id, ({known} + row_number() OVER (ORDER BY events DESC, id) - 1)::INTEGER, NULL "
        f"FROM ({new}) {anti}"
    ).fetchall()


def _write(
    connection: duckdb.DuckDBPyConnection, config: InteractionsConfig, *, file: Path, good: str, types: tuple[IdType, IdType]
) -> dict[int, tuple[int, int]]:
    """The good rows as codes; returns how many each source kept, and how many of them lack a value all the same."""
    # TRY_CAST: DuckDB casts before it has left the bad rows out, and one of those may not fit.
    user, item = (f'TRY_CAST(raw."{side}" AS {SQL_TYPE[kind]})' for side, kind in zip(("user", "item"), types, strict=True))
    extra = [*(["TRY_CAST(weight AS FLOAT) AS weight"] if config.weight_column else [])]
    extra += [f"context_{at}" for at in range(len(config.context_columns))]
    draw = _draw(config)
    extra += [] if draw is None else [f"{draw} AS draw"]
    columns = ", ".join(["source::INTEGER AS source", 'u.code AS "user"', "i.code AS item", "position", *extra])
    joins = [
        f"JOIN {side}_ids {side[0]} ON {_probe(connection, side, value=value)}"
        for side, value in (("user", user), ("item", item))
    ]
    connection.execute(
        f"COPY (SELECT {columns} FROM raw {' '.join(joins)} WHERE {good}) "
        f"TO {quoted(str(file), mark=chr(39))} (FORMAT parquet, COMPRESSION lz4_raw)"
    ).fetchall()
    nulls = "position IS NULL" + (" OR weight IS NULL" if config.weight_column else "")
    query = f"SELECT source, count(*), count(*) FILTER ({nulls}) FROM {scan(file)} GROUP BY 1"
    return {source: (rows, lost) for source, rows, lost in connection.sql(query).fetchall()}


def _draw(config: InteractionsConfig) -> str | None:
    """SQL for a number below a million by which validation is drawn from the training log: the same for a pair, or an item."""
    if not isinstance(config.split, GivenSplit) or config.split.validation_share == 0:
        return None
    hashed = PAIR if config.split.validation_by == "pair" else ITEM
    return f"({hashed}, 'validation') % 1000000)::INTEGER"


def _probe(connection: duckdb.DuckDBPyConnection, side: str, *, value: str) -> str:
    """The join's condition: by hash, a third faster than by string, where no two ids share one (every id is in the table)."""
    ((ids, hashes),) = connection.sql(f"SELECT count(*), count(DISTINCT hash(id)) FROM {side}_ids").fetchall()
    return f"hash({value}) = hash({side[0]}.id)" if hashes == ids else f"{value} = {side[0]}.id"
