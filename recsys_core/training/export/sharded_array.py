"""Arrays written by all ranks together: each rank appends to its own file, and one rank joins the files.

On network storage, hosts that write one file through memory maps silently overwrite each other's pages. Here each rank appends
records to a file of its own, its *part*. All ranks sync and close their parts before a barrier, and read parts only after it.

Shapes: R rows and C columns of a rectangle of the array.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from recsys_core.dataset.layout import allocate_npy
from recsys_core.disk import explain_disk_full
from recsys_core.errors import StageError
from recsys_core.training.job.process_group import Process

Region = tuple[slice, slice]
MAX_RECORD_VALUES = 2**22
"""Largest number of values of a record. A reader holds one record in memory."""
HEADER_BYTES = 4 * 8


class Part:
    """The records of one rank. A record is a header, int64 [4] (first row, first column, rows, columns), and float32 values."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def add(self, first_row: int, first_column: int, values_RC: Tensor) -> None:
        """Append a rectangle of the array. first_row, first_column: position of the rectangle in the array."""
        num_rows, num_columns = values_RC.shape
        rows_per_record = max(1, MAX_RECORD_VALUES // max(1, num_columns))
        for record_start in range(0, num_rows, rows_per_record):
            record_RC = values_RC[record_start : record_start + rows_per_record].detach().cpu().float().numpy()
            self._file.write(np.array([first_row + record_start, first_column, *record_RC.shape], np.int64).tobytes())
            self._file.write(np.ascontiguousarray(record_RC).data)


@contextmanager
def writing_part(path: Path, *, process: Process) -> Iterator[Part]:
    """Collective. Yield this rank's part of the array `path`; after the block every rank can read all parts."""
    with explain_disk_full(path.parent), _part_path(path, process.rank).open("wb") as file:
        yield Part(file)
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()


def build_array(
    path: Path, *, shape: tuple[int, ...], process: Process, accumulate: bool = False, on_record: Callable[[], None]
) -> None:
    """Write the .npy file `path` from all parts, and remove the parts. Only one rank calls this function.

    Args:
        accumulate: add up overlapping records. By default, each value of the array must be in exactly one record.
        on_record: called after each record.

    Raises:
        StageError: the parts do not make up an array of this shape.
        InputError: the disk is full.
    """
    if 0 in shape:
        np.save(path, np.empty(shape, np.float32))
    else:
        array = allocate_npy(path, dtype=np.float32, shape=shape)
        fill_array(path, array, process=process, accumulate=accumulate, on_record=on_record)
        assert isinstance(array, np.memmap)
        array.flush()
    for rank in range(process.world_size):
        _part_path(path, rank).unlink()


def fill_array(
    path: Path,
    array: NDArray[np.float32],
    *,
    process: Process,
    accumulate: bool = False,
    on_record: Callable[[], None] = lambda: None,
) -> None:
    """Copy all parts of `path` into `array`, an array of zeros, in the order of the ranks. accumulate: see build_array."""
    array_RC = array if array.ndim == 2 else array[:, None]
    num_values = 0
    for rank in range(process.world_size):
        for region, values_RC in _read_records(_part_path(path, rank), shape=array_RC.shape):
            if accumulate:
                array_RC[region] += values_RC
            else:
                array_RC[region] = values_RC
            num_values += values_RC.size
            on_record()
    if not accumulate and num_values != array.size:
        raise StageError(
            f"{path}: the {process.world_size} ranks wrote {num_values:,} values, but the array has {array.size:,}; mount the "
            "same storage under this path on all hosts"
        )


def remove_part(path: Path, *, process: Process) -> None:
    """Collective. Remove this rank's part after all ranks have read it."""
    dist.barrier()
    _part_path(path, process.rank).unlink()


def _part_path(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank-{rank}")


def _read_records(part_path: Path, *, shape: tuple[int, ...]) -> Iterator[tuple[Region, NDArray[np.float32]]]:
    try:
        file = part_path.open("rb")
    except FileNotFoundError:
        raise StageError(
            f"{part_path}: this file of another rank is not visible here; mount the same storage under this path on all hosts"
        ) from None
    with file:
        while raw_header := file.read(HEADER_BYTES):
            # A truncated header is padded to negative numbers, so that it fails the check below.
            row, column, num_rows, num_columns = np.frombuffer(raw_header.ljust(HEADER_BYTES, b"\xff"), np.int64).tolist()
            is_inside = (
                min(row, column, num_rows, num_columns) >= 0 and row + num_rows <= shape[0] and column + num_columns <= shape[1]
            )
            raw_values = file.read(num_rows * num_columns * 4) if is_inside else b""
            if not is_inside or len(raw_values) != num_rows * num_columns * 4:
                raise StageError(
                    f"{part_path}: a record of {num_rows} x {num_columns} values at row {row}, column {column} is cut off or "
                    f"does not fit into an array of {shape[0]} x {shape[1]}; mount the same, intact storage under this path "
                    "on all hosts"
                )
            values_RC = np.frombuffer(raw_values, np.float32).reshape(num_rows, num_columns)
            yield (slice(row, row + num_rows), slice(column, column + num_columns)), values_RC
