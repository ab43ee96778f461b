"""Arrays that all ranks write together, each into a file of its own.

Hosts that write one file through maps of it overwrite each other's pages on network storage, in silence. Here a rank appends
records to its own part, which is on disk and closed before the barrier after which other ranks read it.
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

from recsys_core.disk import allocate_npy, explain_disk_full
from recsys_core.errors import StageError
from recsys_core.training.process_group import Process

Place = tuple[slice, slice]
RECORD_NUMBERS = 2**22
"""Numbers of a record, at most: what a reader holds in memory."""


class Part:
    """This rank's part of one array. A record is a header, int64 [4] (row, column, rows, columns), and its float32 values."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def add(self, row: int, column: int, values_RC: Tensor) -> None:
        """Appends a rectangle of the array that begins at (row, column)."""
        rows, columns = values_RC.shape
        step = max(1, RECORD_NUMBERS // max(1, columns))
        for start in range(0, rows, step):
            record_RC = values_RC[start : start + step].detach().cpu().float().numpy()
            self._file.write(np.array([row + start, column, *record_RC.shape], np.int64).tobytes())
            self._file.write(np.ascontiguousarray(record_RC).data)


@contextmanager
def writing_part(path: Path, *, process: Process) -> Iterator[Part]:
    """Collective. This rank's part of the array that belongs to `path`; afterwards every rank can read all parts."""
    with explain_disk_full(path.parent), _part(path, process.rank).open("wb") as file:
        yield Part(file)
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()


def build_array(
    path: Path, *, shape: tuple[int, ...], process: Process, adds: bool = False, on_record: Callable[[], None]
) -> None:
    """Writes the .npy `path` from all parts and removes them. To be called by one rank.

    adds: whether records of the same place add up; else each number of the array has to be in exactly one record.
    Raises StageError where the parts are not what belongs to an array of this shape, InputError where the disk is full.
    """
    if 0 in shape:
        np.save(path, np.empty(shape, np.float32))
    else:
        target = allocate_npy(path, dtype=np.float32, shape=shape)
        fill_array(path, target, process=process, adds=adds, on_record=on_record)
        assert isinstance(target, np.memmap)
        target.flush()
    for rank in range(process.world_size):
        _part(path, rank).unlink()


def fill_array(
    path: Path,
    target: NDArray[np.float32],
    *,
    process: Process,
    adds: bool = False,
    on_record: Callable[[], None] = lambda: None,
) -> None:
    """Puts all parts of `path` into `target`, zeros before, in the order of the ranks; see build_array."""
    whole_RC = target if target.ndim == 2 else target[:, None]
    numbers = 0
    for rank in range(process.world_size):
        for place, values_RC in _records(_part(path, rank), shape=whole_RC.shape):
            if adds:
                whole_RC[place] += values_RC
            else:
                whole_RC[place] = values_RC
            numbers += values_RC.size
            on_record()
    if not adds and numbers != target.size:
        raise StageError(
            f"{path}: the {process.world_size} ranks wrote {numbers:,} numbers of an array of {target.size:,}; all hosts have "
            "to see the same storage under this path"
        )


def remove_part(path: Path, *, process: Process) -> None:
    """Collective. Removes this rank's part once all ranks have read it."""
    dist.barrier()
    _part(path, process.rank).unlink()


def _part(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank-{rank}")


def _records(part: Path, *, shape: tuple[int, ...]) -> Iterator[tuple[Place, NDArray[np.float32]]]:
    try:
        file = part.open("rb")
    except FileNotFoundError:
        raise StageError(f"{part}: a rank wrote it, but it is not here; all hosts have to see the same storage") from None
    with file:
        while header := file.read(4 * 8):
            row, column, rows, columns = np.frombuffer(header.ljust(32, b"\xff"), np.int64).tolist()
            is_inside = min(row, column, rows, columns) >= 0 and row + rows <= shape[0] and column + columns <= shape[1]
            content = file.read(rows * columns * 4) if is_inside else b""
            if not is_inside or len(content) != rows * columns * 4:
                raise StageError(
                    f"{part}: a record at row {row}, column {column} of {rows} x {columns} numbers does not fit an array of "
                    f"{shape[0]} x {shape[1]}, or is cut off; all hosts have to see the same storage, and it has to be intact"
                )
            values_RC = np.frombuffer(content, np.float32).reshape(rows, columns)
            yield (slice(row, row + rows), slice(column, column + columns)), values_RC
