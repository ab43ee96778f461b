"""Atomic replacement of one file: readers see the old content or the new content, never part of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_replacement(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; rename it to `path` at the end, or remove it after an error.

    Two processes may replace the same file: the temporary name contains the process id.
    """
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary_path
        temporary_path.replace(path)
    except BaseException:
        temporary_path.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` with `text`, in UTF-8."""
    with atomic_replacement(path) as temporary_path:
        temporary_path.write_text(text, encoding="utf-8")
