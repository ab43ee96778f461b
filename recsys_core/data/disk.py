"""Files that are as large as the data: a full disk has to be an error before the first page is written to a map."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recsys_core.errors import InputError


def allocate_matrix(path: Path, *, rows: int, dim: int) -> NDArray[np.float32]:
    """A new .npy of float32 [rows, dim] as a map, its blocks reserved; InputError where the disk has too little room.

    A store into a map that the disk cannot hold kills the process (SIGBUS), so nothing may be left to chance here.
    """
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)})
        file.flush()
        size = file.tell() + rows * dim * 4
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            path.unlink()
            raise _too_small(path.parent, needed=f"{rows:,} vectors of {dim} numbers take {_gib(size)}") from error
    mapped: NDArray[np.float32] = np.lib.format.open_memmap(path, mode="r+")
    return mapped


@contextmanager
def full_disk_is_told(folder: Path) -> Iterator[None]:
    """Turns "no space left" of any write below `folder` into an InputError that says how much is free."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise _too_small(folder, needed="the stage does not fit") from error


def _too_small(folder: Path, *, needed: str) -> InputError:
    return InputError(
        f"{folder}: {needed}, but the disk has {_gib(shutil.disk_usage(folder).free)} free; "
        "free some, or set workspace to a folder on a larger disk"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.3f} GiB"
