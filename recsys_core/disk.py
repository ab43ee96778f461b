"""Disks that are full or too small: checks before writing, InputError with the free space, and preallocated .npy files."""

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

from recsys_core.errors import InputError, NightjarError
from recsys_core.units import gib

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
DISK_FULL_MESSAGE = re.compile(
    r"No space left on device|[Dd]isk quota exceeded|disk is full|\d+ requested and \d+ written|unexpected pos \d+ vs \d+"
)
"""Messages of FAISS, Arrow, SQLite, numpy and torch.save, which raise errors without an errno."""
MIN_STAGE_BYTES = 2**16
"""Size of a stage that writes only a manifest."""


def require_free(folder: Path, needed_bytes: int, *, what: str) -> None:
    """Raise InputError unless the disk of `folder` has this much free space; the folder need not exist yet.

    what: the subject of the message: "the train stage".
    """
    if free_bytes(folder) < needed_bytes:
        raise disk_full_error(folder, needed=f"{what} takes at least {gib(needed_bytes, digits=3)}")


@contextmanager
def explain_disk_full(folder: Path) -> Iterator[None]:
    """Turn any error of a write below `folder` that a full disk caused into an InputError with the free space.

    Some libraries do not report why a write failed: while the disk has no space at all, every error counts.
    """
    try:
        yield
    except NightjarError:
        raise
    except Exception as error:
        if not is_disk_full(error) and free_bytes(folder) >= MIN_STAGE_BYTES:
            raise
        raise disk_full_error(folder, needed="the stage does not fit") from error


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk caused `error`, directly or through the errors it was raised from."""
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        return True
    cause = error.__cause__ or error.__context__
    return DISK_FULL_MESSAGE.search(str(error)) is not None or (cause is not None and is_disk_full(cause))


def disk_full_error(folder: Path, *, needed: str) -> InputError:
    """Return the error for a disk that is too small; `needed` says what does not fit."""
    existing = _nearest_existing(folder)
    mount = next(path for path in (existing, *existing.parents) if path.is_mount())
    return InputError(
        f"{folder}: {needed}, but the disk has {gib(free_bytes(folder), digits=3)} free; "
        f"free some, or set workspace to a folder on a larger disk than the one at {mount}"
    )


def free_bytes(folder: Path) -> int:
    """Return the free space of this user on the disk of `folder`; the folder need not exist yet."""
    return shutil.disk_usage(_nearest_existing(folder)).free


def _nearest_existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def allocate_npy(path: Path, *, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """Create a .npy file with reserved disk blocks and return it as a writable memory map.

    Without reserved blocks a write to the map kills the process (SIGBUS) when the disk is full.

    Raises:
        InputError: the disk has too little free space.
    """
    data_type = np.dtype(dtype)
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(data_type), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()
        size = file.tell() + math.prod(shape) * data_type.itemsize
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (*DISK_FULL_ERRNOS, errno.EFBIG):
                raise
            path.unlink()
            numbers = f"{' x '.join(f'{length:,}' for length in shape)} numbers"
            raise disk_full_error(path.parent, needed=f"{path.name}, {numbers}, takes {gib(size, digits=3)}") from error
    mapped: NDArray[Any] = np.load(path, mmap_mode="r+")
    return mapped


def save_npy(path: Path, array: NDArray[Any]) -> None:
    """Write `array` as numpy.save does, but with an error that names a full disk."""
    allocate_npy(path, dtype=array.dtype, shape=array.shape)[...] = array
