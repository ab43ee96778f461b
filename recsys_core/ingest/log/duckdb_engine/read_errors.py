"""Explanations of DuckDB's read errors: the file, column and row behind a damaged page or an out-of-range time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from recsys_core.errors import InputError, first_line, shown
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.engine import FileStatistics, LogFiles
from recsys_core.ingest.log.log_statistics import FIX_CLOCK, latest_valid_time_us
from recsys_core.ingest.row_checks import values_at
from recsys_core.parquet.duckdb_session import DAMAGED_FILE_ERRORS, quoted, scan_sql
from recsys_core.parquet.guards import verify_pages
from recsys_core.parquet.sources import Source
from recsys_core.units import DAY_US

TICKS_PER_S = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_BATCH_ROWS = 262_144
_FALSE_NULL_COUNT_MESSAGE = (
    "{name}: damaged: its statistics claim that it has no nulls, but it has nulls; copy or write the file again"
)


@contextmanager
def explain_read_errors(config: InteractionsConfig, files: LogFiles) -> Iterator[None]:
    """Replace a DuckDB error about the content of a file by an InputError that names the file and the column."""
    sources = files.sources
    try:
        yield
    except duckdb.ConstraintException as error:  # an id is null although the file's statistics claim that none is
        file_name = next((source.name for source in sources if _has_null_id(source, config)), sources[0].name)
        raise InputError(_FALSE_NULL_COUNT_MESSAGE.format(name=file_name)) from error
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        is_read_error = (
            isinstance(error, duckdb.ConversionException | pa.ArrowException | OSError) or type(error) in DAMAGED_FILE_ERRORS
        )
        if is_read_error and "no space left" not in str(error).lower():
            for source, path in zip(sources, files.paths, strict=True):
                verify_pages(source, config.columns)
                _reject_unreadable_column(source, path, config)
                if isinstance(error, duckdb.ConversionException):
                    _reject_out_of_range_time(config, source)
        raise


def reject_false_null_counts(
    written_counts_by_file: Mapping[int, tuple[int, int]],
    statistics: Sequence[FileStatistics],
    sources: Sequence[Source],
    *,
    has_label: bool,
) -> None:
    """Raise InputError for a file that has nulls although its parquet statistics claim that it has none.

    DuckDB trusts these statistics: the scan of the file reports no null in such a column, even if the column has nulls.

    Args:
        written_counts_by_file: number of written rows and number of written rows with a null, by index in `sources`.
        statistics: statistics of each file, from the scan.
        has_label: whether the log has labels. The label threshold then also removes rows, so row counts are not compared.
    """
    for index, file_statistics in enumerate(statistics):
        num_rows, num_nulls = written_counts_by_file.get(index, (0, 0))
        if num_nulls or (not has_label and num_rows != file_statistics.num_rows - file_statistics.num_bad):
            raise InputError(_FALSE_NULL_COUNT_MESSAGE.format(name=sources[index].name))


def _has_null_id(source: Source, config: InteractionsConfig) -> bool:
    column_names = [name for name in (config.user_column, config.item_column) if name in source.schema.names]
    with source.open() as file:
        return any(
            column.null_count for batch in file.iter_batches(_BATCH_ROWS, columns=column_names) for column in batch.columns
        )


def _reject_unreadable_column(source: Source, path: Path, config: InteractionsConfig) -> None:
    """Raise InputError for the first column that DuckDB cannot read. Some damage is an error in DuckDB but not in pyarrow."""
    with duckdb.connect(config={"threads": 1}) as connection:
        for column in config.columns:
            if column not in source.schema.names:  # a hive key
                continue
            try:
                connection.sql(f"SELECT max(hash({quoted(column)})) FROM {scan_sql(path)}").fetchall()
            except duckdb.ConversionException:  # an out-of-range time, which _reject_out_of_range_time reports
                continue
            except duckdb.Error as error:
                message = first_line(error).replace(str(path), source.name)
                raise InputError(
                    f"{source.name}: column {column!r}: damaged, or not of the declared type ({message}); copy or write the "
                    "file again"
                ) from error


def _reject_out_of_range_time(config: InteractionsConfig, source: Source) -> None:
    """Raise InputError for the first time before 1970 or in the future in a column of timestamps or of date32."""
    column, latest_us, first_row = config.timestamp_column or "", latest_valid_time_us(config), 0
    if column not in source.schema.names:  # a hive key, whose values pyarrow has already parsed
        return
    data_type = source.schema.field(column).type
    if pa.types.is_timestamp(data_type):
        storage_type, latest_ticks = pa.int64(), latest_us * TICKS_PER_S[data_type.unit] // 1_000_000
    elif pa.types.is_date32(data_type):
        storage_type, latest_ticks = pa.int32(), latest_us // DAY_US
    else:
        return
    with source.open() as file:
        for batch in file.iter_batches(_BATCH_ROWS, columns=[column]):
            ticks = batch.column(0).view(storage_type)
            is_out_of_range = pc.or_(pc.less(ticks, 0), pc.greater(ticks, latest_ticks))
            index_in_batch = pc.index(is_out_of_range, True).as_py()
            if index_in_batch >= 0:
                row = first_row + index_in_batch
                (time,) = values_at(source, [column], row)
                raise InputError(
                    f"{source.name}: column {column!r}, row {row}: {shown(time)} is before 1970 or in "
                    f"the future; such rows cannot be dropped, because DuckDB cannot read some of these times; {FIX_CLOCK}"
                )
            first_row += batch.num_rows
