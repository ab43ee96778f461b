"""Disks that are full, or too small for what is to be written: one error with the folder, what it needs and what is free."""

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recsys_core.errors import InputError, NightjarError
from recsys_core.units import gib

FULL = (errno.ENOSPC, errno.EDQUOT)
SAYS_FULL = re.compile(
    r"No space left on device|[Dd]isk quota exceeded|disk is full|\d+ requested and \d+ written|unexpected pos \d+ vs \d+"
)
"""How FAISS, Arrow, SQLite, numpy and torch.save, in this order at the latest, say it where no errno comes with the error."""
LEAST_BYTES = 2**16
"""Of a stage that only writes a manifest."""


def require_free(folder: Path, needed_bytes: int, *, what: str) -> None:
    """InputError unless the disk that `folder` is on, or would be made on, has so much room; `what` begins the message."""
    if free_bytes(folder) < needed_bytes:
        raise too_small(folder, needed=f"{what} takes at least {gib(needed_bytes, digits=3)}")


@contextmanager
def full_disk_is_told(folder: Path) -> Iterator[None]:
    """Turns whatever a full disk ends a write below `folder` with into an InputError that says how much is free.

    Some libraries do not say what a write failed of: while there is no room at all, any error counts.
    """
    try:
        yield
    except NightjarError:
        raise
    except Exception as error:
        if not is_full_disk(error) and free_bytes(folder) >= LEAST_BYTES:
            raise
        raise too_small(folder, needed="the stage does not fit") from error


def is_full_disk(error: BaseException) -> bool:
    """Whether an error, or one that led to it, is that of a disk without room."""
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    cause = error.__cause__ or error.__context__
    return SAYS_FULL.search(str(error)) is not None or (cause is not None and is_full_disk(cause))


def too_small(folder: Path, *, needed: str) -> InputError:
    """The error for a disk that has no room."""
    there = _existing(folder)
    mount = next(path for path in (there, *there.parents) if path.is_mount())
    return InputError(
        f"{folder}: {needed}, but the disk has {gib(free_bytes(folder), digits=3)} free; "
        f"free some, or set workspace to a folder on a larger disk than the one at {mount}"
    )


def free_bytes(folder: Path) -> int:
    """What this user may still write on the disk that `folder` is on, or would be made on."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())
