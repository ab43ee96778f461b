"""Local copies of the needed columns of remote parquet files. An interrupted copy resumes after a network failure."""

import errno
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.errors import InputError, first_line
from recsys_core.parquet.footers import Footer
from recsys_core.parquet.locations import Location, is_temporary_error, retrying
from recsys_core.parquet.sources import Source

_BATCH_ROWS = 65_536
_BUFFER_BYTES = 256 * 1024 * 1024


@contextmanager
def local_files(sources: Sequence[Source], *, columns: Sequence[str], scratch_folder: Path) -> Iterator[list[Path]]:
    """Yield a local parquet file for each source, with at least `columns` and the rows in the same order.

    For a local source, the path of the source itself is yielded. The `columns` of a remote source are copied into a file in
    `scratch_folder`, and the pages are verified. Columns that exist only as hive keys in the path are not in the copy. The
    copies are removed at the end of the context.

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
    """Copy `columns` of a remote file to `copy_path`.

    The memory is bounded by the larger of two sizes: a batch of 65,536 rows, and 256 MiB of compressed pages.
    """
    columns_in_file = [name for name in dict.fromkeys(columns) if name in source.schema.names]
    # If all columns are hive keys, the first column of the file is copied, because the copy needs the same number of rows.
    resumable_copy = _ResumableCopy(
        source.location, source.footer, columns=columns_in_file or source.schema.names[:1], copy_path=copy_path
    )
    free_bytes = shutil.disk_usage(copy_path.parent).free
    if resumable_copy.compressed_bytes > free_bytes:
        raise _disk_full_error(source, copy_path, needed_bytes=resumable_copy.compressed_bytes, free_bytes=free_bytes)
    try:
        retrying(resumable_copy.resume)
        resumable_copy.close()
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            free_bytes = shutil.disk_usage(copy_path.parent).free
            raise _disk_full_error(
                source, copy_path, needed_bytes=resumable_copy.compressed_bytes, free_bytes=free_bytes
            ) from error
        problem = "the store stopped answering" if is_temporary_error(error) else "damaged, or not readable"
        raise InputError(f"{source.name}: {problem}, at row {resumable_copy.num_copied_rows:,}: {first_line(error)}") from error
    return copy_path


def _disk_full_error(source: Source, copy_path: Path, *, needed_bytes: int, free_bytes: int) -> InputError:
    return InputError(
        f"{source.name}: its copy needs about {needed_bytes:,} bytes in {copy_path.parent}, where {free_bytes:,} are free; "
        "free some space, or move the workspace"
    )


class _ResumableCopy:
    """A copy that counts the rows it has written, so that a retry continues after these rows."""

    def __init__(self, location: Location, footer: Footer, *, columns: Sequence[str], copy_path: Path) -> None:
        self._location, self._footer, self._columns, self._copy_path = location, footer, list(columns), copy_path
        self._writer: pq.ParquetWriter | None = None
        self._group_index, self._num_rows_in_group = 0, 0
        self.num_copied_rows = 0
        bytes_per_group = footer.compressed_bytes[:, footer.leaf_indices_of(self._columns)].sum(axis=1)
        self.compressed_bytes = int(bytes_per_group.sum())
        # A small row group is fetched in one request; a large one streams through a buffer per column.
        self._fetch_options: dict[str, Any] = {"pre_buffer": True}
        if bytes_per_group.max(initial=0) > _BUFFER_BYTES:
            buffer_bytes = max(64 * 1024, min(8 * 1024 * 1024, _BUFFER_BYTES // max(1, len(self._columns))))
            self._fetch_options = {"pre_buffer": False, "buffer_size": buffer_bytes}

    def resume(self) -> None:
        """Copy the rows that are not in the copy yet."""
        with pq.ParquetFile(
            self._location.path,
            filesystem=self._location.filesystem,
            metadata=self._footer.metadata,
            page_checksum_verification=True,
            **self._fetch_options,
        ) as file:
            if self._writer is None:
                schema = pa.schema([file.schema_arrow.field(column) for column in self._columns])
                self._writer = pq.ParquetWriter(self._copy_path, schema)
            while self._group_index < file.num_row_groups:
                num_rows_to_skip = self._num_rows_in_group
                for batch in file.iter_batches(_BATCH_ROWS, row_groups=[self._group_index], columns=self._columns):
                    new_rows = batch.slice(min(num_rows_to_skip, batch.num_rows))
                    num_rows_to_skip -= batch.num_rows - new_rows.num_rows
                    if new_rows.num_rows:
                        self._writer.write_batch(new_rows.select(self._columns))
                        self._num_rows_in_group += new_rows.num_rows
                        self.num_copied_rows += new_rows.num_rows
                self._group_index, self._num_rows_in_group = self._group_index + 1, 0

    def close(self) -> None:
        assert self._writer is not None, "resume() opens the writer"
        self._writer.close()
