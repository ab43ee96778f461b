"""Local copies of columns of remote parquet files, and a reader that streams local files page by page."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.disk import disk_full_error, is_disk_full, require_free_space
from recsys_core.errors import InputError, first_line
from recsys_core.parquet.duckdb_session import quoted, scan_sql
from recsys_core.parquet.locations import is_temporary_error, retrying
from recsys_core.parquet.sources import Source

_BATCH_ROWS = 65_536
_BUFFER_BYTES = 256 * 1024 * 1024
_PAGE_BUFFER_BYTES = 256 * 1024


@contextlib.contextmanager
def local_files(sources: Sequence[Source], *, columns: Sequence[str], scratch_folder: Path) -> Iterator[list[Path]]:
    """Yield a local parquet file for each source, with at least `columns` and the rows in the same order.

    For a local source, the path of the source itself is yielded. The `columns` of a remote source are copied into a file in
    `scratch_folder`, and the pages are verified. Columns that exist only as hive keys in the path are not in the copy. For a
    table, the first rows are copied. The copies are removed at the end of the context.

    Raises:
        InputError: a store stops answering, the disk is full, or a remote file is damaged.
    """
    scratch_folder.mkdir(parents=True, exist_ok=True)
    copy_folder = Path(tempfile.mkdtemp(prefix="remote-", dir=scratch_folder))
    try:
        yield [
            source.path if source.is_local else _copy_columns(source, columns, copy_folder / f"{index:06d}.parquet")
            for index, source in enumerate(sources)
        ]
    finally:
        shutil.rmtree(copy_folder, ignore_errors=True)


def _copy_columns(source: Source, columns: Sequence[str], copy_path: Path) -> Path:
    """Copy `columns` of a remote file, or the first rows of a table, to `copy_path`.

    The copy needs the memory of a batch of 65,536 rows, or 256 MiB if the batch needs less.
    """
    if source.table is not None:
        copy_path.write_bytes(source.table.first_rows)
        return copy_path
    footer = source.footer
    # If all columns are hive keys, the first column of the file is copied, so that the copy has the same number of rows.
    columns_in_file = [name for name in dict.fromkeys(columns) if name in source.schema.names] or source.schema.names[:1]
    bytes_per_group = footer.compressed_bytes[:, footer.leaf_indices_of(columns_in_file)].sum(axis=1)
    needed_bytes = int(bytes_per_group.sum())
    # A small row group is fetched in one request; a large one streams through a buffer per column.
    fetch_options: dict[str, Any] = {"pre_buffer": True}
    if bytes_per_group.max(initial=0) > _BUFFER_BYTES:
        buffer_bytes = max(64 * 1024, min(8 * 1024 * 1024, _BUFFER_BYTES // len(columns_in_file)))
        fetch_options = {"pre_buffer": False, "buffer_size": buffer_bytes}

    def copy_batches() -> None:
        with pq.ParquetFile(
            source.location.path,
            filesystem=source.location.filesystem,
            metadata=footer.metadata,
            page_checksum_verification=True,
            **fetch_options,
        ) as file:
            copy_schema = pa.schema([file.schema_arrow.field(column) for column in columns_in_file])
            with pq.ParquetWriter(copy_path, copy_schema) as copy_writer:
                for group_index in range(file.num_row_groups):
                    for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group_index], columns=columns_in_file):
                        copy_writer.write_batch(batch.select(columns_in_file))

    require_free_space(copy_path.parent, needed_bytes, subject=f"the copy of {source.name}")
    try:
        retrying(copy_batches)
    except (pa.ArrowException, OSError) as error:
        if is_disk_full(error):
            raise disk_full_error(copy_path.parent, reason=f"the copy of {source.name} does not fit") from error
        problem = "the store stopped answering" if is_temporary_error(error) else "damaged, or not readable"
        raise InputError(f"{source.name}: {problem}: {first_line(error)}") from error
    return copy_path


def read_batches(
    source: Source, path: Path, *, columns: Sequence[str], batch_rows: int, row_groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the non-empty batches of a file.

    Args:
        path: local file with the content of `source`.
        row_groups: indices of the row groups to read; None: all row groups.

    Raises:
        InputError: the data is damaged, or has another number of rows than the footer declares.
    """
    num_read_rows = 0
    try:
        # With its defaults, pyarrow would hold whole column chunks in memory.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=_PAGE_BUFFER_BYTES, page_checksum_verification=True) as file:
            group_indices = list(range(file.num_row_groups) if row_groups is None else row_groups)
            num_expected_rows = source.record.num_rows
            if row_groups is not None:
                num_expected_rows = sum(file.metadata.row_group(index).num_rows for index in group_indices)
            for batch in file.iter_batches(batch_rows, row_groups=group_indices, columns=list(columns), use_threads=False):
                num_read_rows += batch.num_rows
                if batch.num_rows:
                    yield batch
    except (pa.ArrowException, OSError) as error:
        for column in columns:
            _reject_null_vector(source, path, column)
        raise InputError(f"{source.name}: damaged: {first_line(error)}; write it again") from error
    if num_read_rows != num_expected_rows:
        raise InputError(
            f"{source.name}: damaged: the footer declares {num_expected_rows:,} rows, but the file has {num_read_rows:,}; "
            "write it again"
        )


def decode_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield `batches`. A thread decodes the next batch while the caller works on the current batch.

    The first batch may need a long sort. It is decoded in the caller's thread, so an interrupt ends the sort immediately.
    """
    batch = next(batches, None)
    with ThreadPoolExecutor(1, thread_name_prefix="decoder") as decoder_pool:
        while batch is not None:
            next_batch_future = decoder_pool.submit(next, batches, None)
            yield batch
            batch = next_batch_future.result()


def _reject_null_vector(source: Source, path: Path, column: str) -> None:
    """Raise InputError for a null in a column of fixed-size lists. Pyarrow cannot read such a null."""
    if not pa.types.is_fixed_size_list(source.schema.field(column).type):
        return
    rows_sql = scan_sql(path, options_sql="file_row_number = true")
    query = f"SELECT min(file_row_number), count(*) FROM {rows_sql} WHERE {quoted(column)} IS NULL"
    with duckdb.connect() as connection, contextlib.suppress(duckdb.Error):
        first_null_row, num_nulls = connection.execute(query).fetchall()[0]
        if num_nulls:
            raise InputError(
                f"{source.name}: column {column!r}, row {first_null_row}: the vector is null ({num_nulls:,} of "
                f"{source.record.num_rows:,} rows); fix these rows, or write the column as a list of "
                "variable size, whose null rows can be dropped"
            )
