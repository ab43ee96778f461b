"""What DuckDB stopped at without a word on where: damaged pages, and times so far off that it has no number for them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys_core.data.interactions.checks import CLOCK, FileFacts, latest_time, value_at
from recsys_core.data.interactions.config import InteractionsConfig
from recsys_core.errors import InputError, first_line, shown
from recsys_core.parquet.duckdb_session import DAMAGED_FILE_ERRORS, quoted, scan
from recsys_core.parquet.guards import verify_pages
from recsys_core.parquet.sources import Source
from recsys_core.units import DAY_US, INT64_MAX

TICKS_PER_S = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_BATCH_ROWS = 262_144
_UNTRUE_NULLS = "{name}: damaged: its statistics say that no value is null, but some are; copy or write the file again"


@contextmanager
def damage_is_told(config: InteractionsConfig, sources: Sequence[Source], paths: Sequence[Path]) -> Iterator[None]:
    """Turns an error of DuckDB over what a file holds into an InputError that names the file and the column.

    Args:
        paths: a local file for each of the sources.
    """
    try:
        yield
    except duckdb.ConstraintException as error:  # a null id where the statistics say that there is none
        name = next((source.name for source in sources if _has_null_id(source, config)), sources[0].name)
        raise InputError(_UNTRUE_NULLS.format(name=name)) from error
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        read = isinstance(error, (duckdb.ConversionException, pa.ArrowException, OSError)) or type(error) in DAMAGED_FILE_ERRORS
        if read and "no space left" not in str(error).lower():
            for source in sources:
                verify_pages(source, config.columns)
            for source, path in zip(sources, paths, strict=True):
                _refuse_unread(source, path, config)
        if isinstance(error, duckdb.ConversionException):
            _refuse_wild_times(config, sources)
        raise


def refuse_untrue_nulls(
    kept: Mapping[int, tuple[int, int]], found: Sequence[FileFacts], sources: Sequence[Source], *, labelled: bool
) -> None:
    """Where statistics say that a column has no null, DuckDB looks for none: damage may have made some all the same.

    Args:
        kept: rows written, and rows of these without a value, by position in `sources`.
        found: what the scan of the rows told.
        labelled: a threshold leaves out rows too.
    """
    for at, facts in enumerate(found):
        rows, lost = kept.get(at, (0, 0))
        if lost or (not labelled and rows != facts.rows - facts.bad):
            raise InputError(_UNTRUE_NULLS.format(name=sources[at].name))


def _has_null_id(source: Source, config: InteractionsConfig) -> bool:
    columns = [name for name in (config.user_column, config.item_column) if name in source.schema.names]
    with source.open() as file:
        return any(column.null_count for batch in file.iter_batches(_BATCH_ROWS, columns=columns) for column in batch.columns)


def _refuse_unread(source: Source, path: Path, config: InteractionsConfig) -> None:
    """Damage that pyarrow reads over: InputError for the first column that DuckDB cannot read."""
    with duckdb.connect(config={"threads": 1}) as connection:
        for column in config.columns:
            if column not in source.schema.names:  # a hive key
                continue
            try:
                connection.sql(f"SELECT max(hash({quoted(column)})) FROM {scan(path)}").fetchall()
            except duckdb.ConversionException:  # a time: see _refuse_wild_times
                continue
            except duckdb.Error as error:
                told = first_line(error).replace(str(path), source.name)
                raise InputError(
                    f"{source.name}: column {column!r}: damaged, or not what its type says ({told}); copy or write it again"
                ) from error


def _refuse_wild_times(config: InteractionsConfig, sources: Sequence[Source]) -> None:
    """InputError for the first time before 1970 or in the future, with the count; they cannot be dropped."""
    column, latest = config.timestamp_column or "", latest_time(config)
    first: tuple[Source, int] | None = None
    count = 0
    for source in sources:
        bad_N = _wild_rows(source, column, latest_us=latest)
        count += len(bad_N)
        if len(bad_N) and first is None:
            first = source, int(bad_N[0])
    if first is not None:
        source, row = first
        rows = sum(each.record.rows for each in sources)
        raise InputError(
            f"{source.name}: column {column!r}, row {row}: {shown(value_at(source, column, row))} is before 1970 or in the "
            f"future, as in {count:,} of {rows:,} rows in all, and some are so far off that they cannot be dropped; {CLOCK}"
        )


def _wild_rows(source: Source, column: str, *, latest_us: int) -> NDArray[np.int64]:
    if column not in source.schema.names:  # a hive key: a day that pyarrow has read
        return np.empty(0, np.int64)
    kind = source.schema.field(column).type
    if pa.types.is_timestamp(kind):
        stored, latest = pa.int64(), latest_us * TICKS_PER_S[kind.unit] // 1_000_000
    elif pa.types.is_date32(kind):
        stored, latest = pa.int32(), latest_us // DAY_US
    else:
        return np.empty(0, np.int64)
    found, start = [], 0
    with source.open() as file:
        for batch in file.iter_batches(_BATCH_ROWS, columns=[column]):
            time = batch.column(0).view(stored)
            wild = pc.fill_null(
                pc.or_(pc.less(time, 0), pc.greater(time, pa.scalar(min(latest, INT64_MAX), pa.int64()))), False
            )
            found.append(start + np.flatnonzero(wild.to_numpy(zero_copy_only=False)))
            start += batch.num_rows
    return np.concatenate(found) if found else np.empty(0, np.int64)
