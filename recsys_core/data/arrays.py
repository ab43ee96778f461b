"""Arrays on disk that are written through a memory map."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from recsys_core.errors import InputError


def new_array(path: Path, *, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """A writable .npy map whose bytes are already the file's: on a full disk a sparse one ends in SIGBUS, not in an error.

    Raises OSError (ENOSPC) where the disk has no room for it.
    """
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if array.nbytes:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


@contextmanager
def full_disk_named(folder: Path, *, wanted: str) -> Iterator[None]:
    """Turns "no space left on device" into an InputError that says where, how much is free, and the way out."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise full_disk(folder, wanted=wanted) from error


def full_disk(folder: Path, *, wanted: str) -> InputError:
    """The error for a disk that has no room for `wanted`."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    return InputError(
        f"{folder}: the disk is full while writing {wanted}; {free / 1e9:,.2f} GB are free; free some, or set workspace to a "
        "folder on another disk"
    )
