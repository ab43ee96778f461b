"""Files that are as large as the data: a full disk has to be an error before the first page is written to a map."""

import errno
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from recsys_core.errors import InputError

_CUT_OFF = re.compile(r"^\d+ requested and \d+ written$")
"""What numpy says of a full disk."""


def allocate(path: Path, *, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """A new .npy as a writable map, its blocks reserved; InputError where the disk has too little room.

    A store into a map that the disk cannot hold kills the process (SIGBUS), so nothing may be left to chance here.
    """
    kind = np.dtype(dtype)
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()
        size = file.tell() + math.prod(shape) * kind.itemsize
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            path.unlink()
            what = f"{path.name}, {' x '.join(f'{length:,}' for length in shape)} numbers, takes {_gib(size)}"
            raise too_small(path.parent, needed=what) from error
    mapped: NDArray[Any] = np.load(path, mmap_mode="r+")
    return mapped


@contextmanager
def full_disk_is_told(folder: Path) -> Iterator[None]:
    """Turns "no space left" of any write below `folder` into an InputError that says how much is free."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC and not _CUT_OFF.search(str(error)):
            raise
        raise too_small(folder, needed="the stage does not fit") from error


def too_small(folder: Path, *, needed: str) -> InputError:
    """The error for a disk that has no room."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return InputError(
        f"{folder}: {needed}, but the disk has {_gib(shutil.disk_usage(there).free)} free; "
        "free some, or set workspace to a folder on a larger disk"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.3f} GiB"
