"""What one row group tells that no footer does: how long vectors are, whether ids match, and which year it is."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from recsys_core.data.embeddings.schema import VectorFiles, refuse_wider
from recsys_core.data.interactions.config import InteractionsConfig
from recsys_core.errors import InputError, first_line, shown
from recsys_core.parquet.columns import value_type
from recsys_core.parquet.duckdb_session import database, quoted, scan_all
from recsys_core.parquet.sources import Source
from recsys_core.units import DAY_S

ROWS = 65_536
_VECTOR_ROWS = 256
_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_YEAR_1971, _YEAR_1990 = 31_536_000, 631_152_000


def first_values(sources: Sequence[Source], column: str, *, rows: int = ROWS) -> pa.Array | None:
    """The first values of `column` in one row group of the first file that has rows; None for a key of the path.

    Raises InputError where they cannot be read.
    """
    source = next(source for source in sources if source.record.rows)
    if column not in source.schema.names:
        return None
    group = next(index for index, count in enumerate(source.footer.group_rows) if count)
    try:
        with source.open(page_checksum_verification=True) as file:
            batch = next(file.iter_batches(rows, row_groups=[group], columns=[column]), None)
    except (pa.ArrowException, OSError, UnicodeError) as error:
        why = first_line(error)
        raise InputError(f"{source.name}: column {column!r}: damaged, or not readable ({why}); write the file again") from error
    return None if batch is None else batch.column(0)


def vector_length(files: VectorFiles) -> int | None:
    """Numbers of a vector as it is kept: by the schema, or by the first rows; None where those differ among each other.

    Raises InputError for a projection to more numbers than there are.
    """
    length = files.source_dim
    if length is None:
        vectors = first_values(files.sources, files.columns[0], rows=_VECTOR_ROWS)
        lengths = set() if vectors is None else set(pc.list_value_length(vectors).drop_null().to_pylist())
        if len(lengths) != 1:
            return files.config.pca_dim
        length = lengths.pop()
        if (files.config.pca_dim or 0) > length:
            refuse_wider(files, length)
    return files.config.pca_dim or length


def check_years(config: InteractionsConfig, sources: Sequence[Source]) -> None:
    """InputError for times that are in 1970 or in the future as they are read, and of our days in another unit."""
    column = config.timestamp_column
    values = first_values(sources, column) if column is not None else None
    if values is None or pa.types.is_date(values.type):
        return
    unit = values.type.unit if pa.types.is_timestamp(values.type) else config.timestamp_unit
    ticks = pc.min_max(values.view(pa.int64()) if pa.types.is_timestamp(values.type) else values.drop_null()).as_py()
    latest = time.time() + config.max_future_days * DAY_S
    if ticks["min"] is None or ticks["max"] < 0:
        return
    newest = ticks["max"] // _PER_S[unit]
    if newest >= _YEAR_1971 and ticks["min"] // _PER_S[unit] <= latest:
        return
    for other, per_s in _PER_S.items():
        if _YEAR_1990 <= ticks["max"] // per_s <= latest:
            source = next(source for source in sources if source.record.rows)
            way_out = f"set interactions.timestamp_unit to {other}" if values.type != pa.timestamp(unit) else "write it again"
            raise InputError(
                f"{source.name}: column {column!r}: {ticks['max']} is {_day(newest)} in {unit}, and "
                f"{_day(ticks['max'] // per_s)} in {other}; {way_out}"
            )


def _day(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}" if seconds < 2**37 else "after the year 6000"


def check_matches(
    config: InteractionsConfig, log: Sequence[Source], vectors: Sequence[VectorFiles], *, columns: Mapping[str, str]
) -> None:
    """InputError where no vector of a table belongs to an id of the log. columns: of the log, by table.

    Where one row group of each has an id in common nothing else is read; else all ids are, unless some are in a store.
    """
    for table, column in columns.items():
        entries = [files for files in vectors if files.config.table == table]
        first = first_values(log, column) if entries else None
        if first is None or any(_overlap(first, files) for files in entries):
            continue
        everything = (*log, *(source for files in entries for source in (*files.sources, *files.id_map)))
        if not all(source.local and column in each.schema.names for source in everything for each in log):
            continue
        if not _any_match(config, log, column, entries):
            rows, one = sum(files.rows for files in entries), first_values(entries[0].sources, entries[0].config.id_column)
            raise InputError(
                f"embeddings: none of the {rows:,} {table} vectors belongs to one of the log's {table}s: column {column!r} of "
                f"{log[0].name} has ids such as {_example(first)}, {entries[0].sources[0].name} such as {_example(one)}; "
                "write both with the same ids"
            )


def _overlap(ids: pa.Array, files: VectorFiles) -> bool:
    if files.config.id_map is not None:
        return False
    known = first_values(files.sources, files.config.id_column)
    return known is None or bool(pc.any(pc.is_in(_as_text(ids), value_set=_as_text(known))).as_py())


def _as_text(ids: pa.Array) -> pa.Array:
    return ids.cast(value_type(ids.type)).cast(pa.string()).drop_null()


def _any_match(config: InteractionsConfig, log: Sequence[Source], column: str, entries: Sequence[VectorFiles]) -> bool:
    with (
        tempfile.TemporaryDirectory(prefix="nightjar-ids-") as folder,
        database(
            memory_limit=config.memory_limit, threads=config.threads, spill=Path(folder), subject="the ids of log and vectors"
        ) as connection,
    ):
        ours = f"SELECT {quoted(column)}::VARCHAR AS id FROM {_scan(log)}"
        for files in entries:
            theirs = f"SELECT {quoted(files.config.id_column)}::VARCHAR AS id FROM {_scan(files.sources)}"
            if files.config.id_map is not None:
                source, target = quoted(files.config.id_map.from_column), quoted(files.config.id_map.to_column)
                pairs = f"SELECT {source}::VARCHAR AS source, {target}::VARCHAR AS id FROM {_scan(files.id_map)}"
                theirs = f"SELECT pairs.id FROM ({pairs}) pairs SEMI JOIN ({theirs}) theirs ON pairs.source = theirs.id"
            if connection.sql(f"SELECT 1 FROM ({ours}) SEMI JOIN ({theirs}) USING (id) LIMIT 1").fetchall():
                return True
    return False


def _scan(sources: Sequence[Source]) -> str:
    return scan_all([source.path for source in sources])


def _example(ids: Any) -> str:
    known = None if ids is None else ids.drop_null()
    return "none" if known is None or not len(known) else shown(known[0].as_py())
