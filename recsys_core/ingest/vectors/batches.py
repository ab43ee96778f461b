"""Batches of a parquet file of embeddings, streamed page by page; damage becomes an InputError that names the file."""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.errors import InputError, first_line
from recsys_core.parquet.duckdb_session import quoted, scan_sql
from recsys_core.parquet.sources import Source

PAGE_BUFFER_BYTES = 256 * 1024


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a file to stream its pages. By default, pyarrow would hold whole column chunks in memory."""
    return pq.ParquetFile(path, pre_buffer=False, buffer_size=PAGE_BUFFER_BYTES, page_checksum_verification=True)


def read_batches(
    source: Source, path: Path, *, columns: Sequence[str], batch_rows: int, row_groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the non-empty batches of a file.

    Args:
        path: local file with the content of `source`.
        row_groups: None for all row groups.

    Raises:
        InputError: the data is damaged, or has another number of rows than the footer declares.
    """
    num_rows = 0
    try:
        with open_parquet(path) as file:
            group_indexes = list(range(file.num_row_groups) if row_groups is None else row_groups)
            expected_rows = source.record.rows
            if row_groups is not None:
                expected_rows = sum(file.metadata.row_group(index).num_rows for index in group_indexes)
            for batch in file.iter_batches(batch_rows, row_groups=group_indexes, columns=list(columns), use_threads=False):
                num_rows += batch.num_rows
                if batch.num_rows:
                    yield batch
    except (pa.ArrowException, OSError) as error:
        for column in columns:
            _reject_null_of_fixed_size(source, path, column)
        raise InputError(f"{source.name}: damaged: {first_line(error)}; write it again") from error
    if num_rows != expected_rows:
        raise InputError(
            f"{source.name}: damaged: the footer declares {expected_rows:,} rows, but the file has {num_rows:,}; write it again"
        )


def decode_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same batches. A thread decodes the next batch while the caller works on the current batch."""
    with ThreadPoolExecutor(1, thread_name_prefix="decoder") as decoder:
        next_batch = decoder.submit(next, batches, None)
        while (batch := next_batch.result()) is not None:
            next_batch = decoder.submit(next, batches, None)
            yield batch


def _reject_null_of_fixed_size(source: Source, path: Path, column: str) -> None:
    """Raise InputError for a null in a column of fixed-size lists. Pyarrow cannot read such a null."""
    if not pa.types.is_fixed_size_list(source.schema.field(column).type):
        return
    rows_sql = scan_sql(path, options_sql="file_row_number = true")
    query = f"SELECT min(file_row_number), count(*) FROM {rows_sql} WHERE {quoted(column)} IS NULL"
    with duckdb.connect() as connection, contextlib.suppress(duckdb.Error):
        first_row, num_nulls = connection.execute(query).fetchall()[0]
        if num_nulls:
            raise InputError(
                f"{source.name}: column {column!r}, row {first_row}: the vector is null ({num_nulls:,} of "
                f"{source.record.rows:,} rows); fix these rows, or write the column as a list of "
                "variable size, whose null rows can be dropped"
            )
