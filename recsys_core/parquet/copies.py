"""Local copies of remote parquet: some columns, streamed, taken up again where the network broke off."""

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.errors import InputError, first_line
from recsys_core.parquet.footers import Footer
from recsys_core.parquet.locations import Location
from recsys_core.parquet.retries import is_passing, retrying

_BATCH_ROWS = 65_536
_BUFFER_BYTES = 256 * 1024 * 1024


def copy_columns(location: Location, footer: Footer, *, columns: Sequence[str], target: Path) -> None:
    """Writes `columns` of the file, rows in order, pages verified by their checksums where they have any.

    Memory is bounded by the larger of a batch of 65,536 rows and a quarter of a gigabyte of compressed pages.

    Raises:
        InputError: the disk is full, the network stays away, or the file is damaged.
    """
    copy = _Copy(location, footer, columns=columns, target=target)
    needed = copy.compressed_bytes
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise InputError(_full(location, target, needed=needed, free=free))
    try:
        retrying(copy.go_on)
        copy.close()
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            free = shutil.disk_usage(target.parent).free
            raise InputError(_full(location, target, needed=needed, free=free)) from error
        why = first_line(error)
        trouble = "the store stopped answering" if is_passing(error) else "damaged, or not readable"
        raise InputError(f"{location.name}: {trouble}, at row {copy.rows:,}: {why}") from error


def _full(location: Location, target: Path, *, needed: int, free: int) -> str:
    return (
        f"{location.name}: its copy needs about {needed:,} bytes in {target.parent}, where {free:,} are free; "
        "make room, or move the workspace"
    )


class _Copy:
    """A copy under way. It knows how far it is, so that another attempt goes on from there."""

    def __init__(self, location: Location, footer: Footer, *, columns: Sequence[str], target: Path) -> None:
        self._location, self._footer, self._columns, self._target = location, footer, list(columns), target
        self._writer: pq.ParquetWriter | None = None
        self._group, self._rows_in_group = 0, 0
        self.rows = 0
        groups_G = footer.compressed_GL[:, footer.leaves_of(self._columns)].sum(axis=1)
        self.compressed_bytes = int(groups_G.sum())
        # Whole row groups are fetched at once where they are small; larger ones stream through a buffer per column.
        self._fetch: dict[str, Any] = {"pre_buffer": True}
        if groups_G.max(initial=0) > _BUFFER_BYTES:
            size = max(64 * 1024, min(8 * 1024 * 1024, _BUFFER_BYTES // max(1, len(self._columns))))
            self._fetch = {"pre_buffer": False, "buffer_size": size}

    def go_on(self) -> None:
        """Copies the rows that are still missing."""
        with pq.ParquetFile(
            self._location.path,
            filesystem=self._location.filesystem,
            metadata=self._footer.metadata,
            page_checksum_verification=True,
            **self._fetch,
        ) as file:
            if self._writer is None:
                schema = pa.schema([file.schema_arrow.field(column) for column in self._columns])
                self._writer = pq.ParquetWriter(self._target, schema)
            while self._group < file.num_row_groups:
                skip = self._rows_in_group
                for batch in file.iter_batches(_BATCH_ROWS, row_groups=[self._group], columns=self._columns):
                    fresh = batch.slice(min(skip, batch.num_rows))
                    skip -= batch.num_rows - fresh.num_rows
                    if fresh.num_rows:
                        self._writer.write_batch(fresh.select(self._columns))
                        self._rows_in_group += fresh.num_rows
                        self.rows += fresh.num_rows
                self._group, self._rows_in_group = self._group + 1, 0

    def close(self) -> None:
        assert self._writer is not None  # go_on
        self._writer.close()
