"""The marker in each folder that nightjar made: nothing without it is removed or written over."""

import os
import shutil
from pathlib import Path

from recsys_core.errors import InputError

MARKER = ".nightjar"
_TEXT = "nightjar made this folder, and may replace or remove what is in it.\n"


def own(folder: Path) -> None:
    """Makes `folder`, or takes one that is empty or has the marker. Raises InputError as require_own does."""
    require_own(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MARKER).exists():
        (folder / MARKER).write_text(_TEXT)


def require_own(folder: Path) -> None:
    """InputError for a link, for a file, and for a folder that holds files but no marker; none of them is touched."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise InputError(
            f"{folder}: is {'a link' if folder.is_symlink() else 'a file'}, where nightjar keeps a folder of its own and "
            "removes what is in it; move it away"
        )
    if not (folder / MARKER).is_file() and any(folder.iterdir()):
        raise InputError(
            f"{folder}: holds files, but not the marker {MARKER} that nightjar leaves in each folder it makes; nothing in it "
            f"is replaced or removed. Move it away, or, if nightjar made it, put an empty file {MARKER} into it"
        )


def remove_own(folder: Path) -> None:
    """Removes `folder` where nightjar made it, the marker last, so that a kill in between leaves what can be removed later.

    Raises InputError as require_own does.
    """
    require_own(folder)
    if not folder.exists():
        return
    for entry in folder.iterdir():
        if entry.name == MARKER:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    (folder / MARKER).unlink(missing_ok=True)
    folder.rmdir()
