"""Errors about rows of the interaction log that an engine cannot read, as messages that name the file and the column."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from recsys_core.errors import InputError, first_line, shown
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.engine import LogFiles
from recsys_core.ingest.log.log_statistics import FUTURE_ADVICE, latest_valid_time_us
from recsys_core.ingest.row_checks import values_at
from recsys_core.parquet.duckdb_session import DAMAGED_FILE_ERRORS, quoted, scan_sql
from recsys_core.parquet.guards import verify_pages
from recsys_core.parquet.sources import Source
from recsys_core.units import DAY_US, TICKS_PER_S

_BATCH_ROWS = 262_144


@contextmanager
def explain_read_errors(config: InteractionsConfig, files: LogFiles) -> Iterator[None]:
    """Replace a DuckDB error about the content of a file by an InputError that names the file and the column."""
    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        is_read_error = (
            isinstance(error, duckdb.ConversionException | pa.ArrowException | OSError) or type(error) in DAMAGED_FILE_ERRORS
        )
        if is_read_error and "no space left" not in str(error).lower():
            reject_unreadable_files(config, files, has_bad_time=isinstance(error, duckdb.ConversionException))
        raise


def reject_unreadable_files(config: InteractionsConfig, files: LogFiles, *, has_bad_time: bool = True) -> None:
    """Raise InputError for the first file that is damaged or, if `has_bad_time`, has a time out of range."""
    for source, path in zip(files.sources, files.paths, strict=True):
        verify_pages(source, config.columns)
        _reject_unreadable_column(source, path, config)
        if has_bad_time:
            _reject_out_of_range_time(config, source)


def _reject_unreadable_column(source: Source, path: Path, config: InteractionsConfig) -> None:
    """Raise InputError for the first column that DuckDB cannot read. `verify_pages` does not detect every kind of damage."""
    with duckdb.connect(config={"threads": 1}) as connection:
        for column in [column for column in config.columns if column in source.schema.names]:
            try:
                connection.sql(f"SELECT max(hash({quoted(column)})) FROM {scan_sql(path)}").fetchall()
            except duckdb.ConversionException:  # an out-of-range time, which _reject_out_of_range_time reports
                continue
            except duckdb.Error as error:
                duckdb_message = first_line(error).replace(str(path), source.name)
                raise InputError(
                    f"{source.name}: column {column!r}: damaged, or not of the declared type ({duckdb_message}); copy or "
                    "write the file again"
                ) from error


def _reject_out_of_range_time(config: InteractionsConfig, source: Source) -> None:
    """Raise InputError for the first time before 1970 or in the future in a column of timestamps or of date32."""
    column, latest_valid_us, batch_start = config.timestamp_column or "", latest_valid_time_us(config), 0
    if column not in source.schema.names:  # a hive key, whose values pyarrow has already parsed
        return
    data_type = source.schema.field(column).type
    if pa.types.is_timestamp(data_type):
        storage_type, latest_valid_ticks = pa.int64(), latest_valid_us * TICKS_PER_S[data_type.unit] // 1_000_000
    elif pa.types.is_date32(data_type):
        storage_type, latest_valid_ticks = pa.int32(), latest_valid_us // DAY_US
    else:
        return
    with source.open() as file:
        for batch in file.iter_batches(_BATCH_ROWS, columns=[column]):
            ticks = batch.column(0).view(storage_type)
            is_out_of_range = pc.or_(pc.less(ticks, 0), pc.greater(ticks, latest_valid_ticks))
            index_in_batch = pc.index(is_out_of_range, True).as_py()
            if index_in_batch >= 0:
                row = batch_start + index_in_batch
                (time,) = values_at(source, [column], row)
                raise InputError(
                    f"{source.name}: column {column!r}, row {row}: {shown(time)} is before 1970 or in "
                    "the future; on_bad_rows does not apply, because DuckDB and Spark cannot read the file with such a time; "
                    f"{FUTURE_ADVICE}"
                )
            batch_start += batch.num_rows
