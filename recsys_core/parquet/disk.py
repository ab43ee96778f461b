"""Files that are as large as the data: a full disk has to be an error before the first page is written to a map."""

import errno
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from recsys_core.disk import FULL, too_small
from recsys_core.units import gib


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
            if error.errno not in (*FULL, errno.EFBIG):
                raise
            path.unlink()
            what = f"{path.name}, {' x '.join(f'{length:,}' for length in shape)} numbers, takes {gib(size, digits=3)}"
            raise too_small(path.parent, needed=what) from error
    mapped: NDArray[Any] = np.load(path, mmap_mode="r+")
    return mapped


def save(path: Path, array: NDArray[Any]) -> None:
    """numpy.save that tells a full disk: numpy's own error does not say what it is."""
    allocate(path, dtype=array.dtype, shape=array.shape)[...] = array
