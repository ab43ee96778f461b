"""Files on a disk that may be full: checks of the free space, errors that report it, and atomic replacement of files."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recsys_core.errors import InputError, NightjarError
from recsys_core.units import format_gib

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
DISK_FULL_PATTERN = re.compile(
    r"No space left on device|[Dd]isk quota exceeded|disk is full|\d+ requested and \d+ written|unexpected pos \d+ vs \d+"
)
"""Messages of FAISS, Arrow, SQLite, numpy and torch.save about a full disk. The errors of these libraries have no errno."""
MIN_STAGE_BYTES = 2**16
"""Space that a stage needs if it writes only a manifest."""
HARD_LINK_ERRORS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
"""Errors of a hard link between two disks, or on a file system without hard links (SMB, exFAT, some mounted object stores)."""


def require_free_space(folder: Path, needed_bytes: int, *, subject: str) -> None:
    """Raise InputError if the disk of `folder` has less free space than `needed_bytes`; the folder need not exist yet.

    subject: the object that needs the space, as named in the message, such as "the train stage".
    """
    if free_bytes(folder) < needed_bytes:
        raise disk_full_error(folder, reason=f"{subject} takes at least {format_gib(needed_bytes, digits=3)}")


@contextmanager
def explain_disk_full(folder: Path) -> Iterator[None]:
    """If the block fails because the disk is full, raise an InputError that reports the free space.

    The block writes below `folder`. Some libraries do not report why a write failed, so any error counts as caused by a full
    disk if less than MIN_STAGE_BYTES are free.
    """
    try:
        yield
    except NightjarError:
        raise
    except Exception as error:
        if not is_disk_full(error) and free_bytes(folder) >= MIN_STAGE_BYTES:
            raise
        raise disk_full_error(folder, reason="the stage does not fit") from error


def is_disk_full(error: BaseException) -> bool:
    """Return whether a full disk caused `error` itself, or an error in its chain of causes."""
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        return True
    cause = error.__cause__ or error.__context__
    return DISK_FULL_PATTERN.search(str(error)) is not None or (cause is not None and is_disk_full(cause))


def disk_full_error(folder: Path, *, reason: str) -> InputError:
    """Return the error to raise if a disk is too small.

    reason: start of the message, such as "the checkpoint does not fit".
    """
    existing_folder = _nearest_existing_folder(folder)
    mount_point = next(path for path in (existing_folder, *existing_folder.parents) if path.is_mount())
    return InputError(
        f"{folder}: {reason}, but the disk has {format_gib(free_bytes(folder), digits=3)} free; "
        f"free some space, or set workspace to a folder on a larger disk than the one at {mount_point}"
    )


def used_bytes(folder: Path) -> int:
    """Return the space that the files below `folder` take on the disk. A file with several hard links is counted once.

    A file that another process removes in the meantime is left out.
    """
    num_blocks_by_inode: dict[tuple[int, int], int] = {}
    for parent_folder, _, file_names in os.walk(folder):
        for file_name in file_names:
            with suppress(OSError):
                file_status = (Path(parent_folder) / file_name).lstat()
                num_blocks_by_inode[file_status.st_dev, file_status.st_ino] = file_status.st_blocks
    return 512 * sum(num_blocks_by_inode.values())  # st_blocks counts units of 512 bytes


def free_bytes(folder: Path) -> int:
    """Return the space that this user can still fill on the disk of `folder`, which need not exist yet."""
    return shutil.disk_usage(_nearest_existing_folder(folder)).free


def _nearest_existing_folder(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def link_or_copy(source_path: str | Path, target_path: str | Path) -> None:
    """Hard-link a file that never changes; copy the file if the disk does not support links."""
    try:
        Path(target_path).hardlink_to(source_path)
    except OSError as error:
        if error.errno not in HARD_LINK_ERRORS:
            raise
        shutil.copyfile(source_path, target_path)


@contextmanager
def atomic_replacement(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; rename it to `path` at the end, or remove it after an error.

    Readers see the old content of `path` or the new content, never a part of the new content. Two processes may replace a file
    at the same time, because the temporary name contains the process id.
    """
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary_path
        temporary_path.replace(path)
    except BaseException:
        temporary_path.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` with `text`, in UTF-8. After a power failure, the file has the old or the new content."""
    with atomic_replacement(path) as temporary_path, temporary_path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
