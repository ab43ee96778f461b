"""Marker file in each folder that nightjar created; a folder without it is never removed or overwritten."""

import shutil
from pathlib import Path

from recsys_core.errors import InputError

MARKER_NAME = ".nightjar"
_MARKER_TEXT = "nightjar created this folder, and may replace or remove the files in it.\n"


def create_own_folder(folder: Path) -> None:
    """Create `folder` with the marker, or mark an empty folder. Raise InputError like `require_own_folder`."""
    require_own_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MARKER_NAME).exists():
        (folder / MARKER_NAME).write_text(_MARKER_TEXT)


def require_own_folder(folder: Path) -> None:
    """Raise InputError if `folder` is a link, a file, or a folder with files but no marker. Nothing is changed."""
    require_no_link(folder)
    if not folder.exists():
        return
    if not (folder / MARKER_NAME).is_file() and any(folder.iterdir()):
        raise InputError(
            f"{folder}: holds files, but not the marker {MARKER_NAME} of a folder that nightjar created, so nightjar does not "
            "replace or remove them; move the folder away, or, if nightjar created it, create an empty file "
            f"{MARKER_NAME} in it"
        )


def require_no_link(folder: Path) -> None:
    """Raise InputError if `folder` is a link or a file: nightjar may not own the files behind a link."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(
            f"{folder}: is {'a link' if folder.is_symlink() else 'a file'}, but nightjar needs a folder of its own here, to "
            f"replace and remove files in it; move the {'link' if folder.is_symlink() else 'file'} away"
        )


def remove_own_folder(folder: Path) -> None:
    """Remove a folder that nightjar created. Raise InputError like `require_own_folder`.

    The marker is removed last, so that a folder that was removed only in part can still be removed later.
    """
    require_own_folder(folder)
    if not folder.exists():
        return
    for path in folder.iterdir():
        if path.name == MARKER_NAME:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (folder / MARKER_NAME).unlink(missing_ok=True)
    folder.rmdir()
