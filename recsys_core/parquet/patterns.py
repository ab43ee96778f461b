"""Names of files: globs, read alike on a disk and in a store."""

import glob
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

SIDECAR = ".sha256"
"""Ending of the file with the checksum of another file."""
URI = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?]*)(/.*?|)(?:\?([a-z_]+=[^?]*))?", re.DOTALL | re.IGNORECASE)


def is_uri(pattern: str) -> bool:
    """Whether `pattern` is a URI such as s3://bucket/log, not a path.

    >>> is_uri("s3://bucket/log"), is_uri("log/dt=2026-11-19"), is_uri("/a//b")
    (True, False, False)
    """
    return URI.fullmatch(pattern) is not None


def split_glob(pattern: str) -> tuple[str, list[str]]:
    """The folder that a glob starts in, and the components after it."""
    parts = pattern.split("/")
    first = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    base = "/".join(parts[:first])
    return base or ("/" if pattern.startswith("/") else ""), [part for part in parts[first:] if part]


def parts_of(path: str, base: str) -> list[str]:
    return [part for part in path.removeprefix(base).split("/") if part]


def matches(parts: Sequence[str], tail: Sequence[str]) -> bool:
    """Whether the components fit the pattern's, as glob reads it: ** stands for any number of folders."""
    if not tail:
        return not parts
    if tail[0] == "**":
        if len(tail) == 1:
            return bool(parts)
        return any(matches(parts[start:], tail[1:]) for start in range(len(parts)))
    return bool(parts) and fnmatchcase(parts[0], tail[0]) and matches(parts[1:], tail[1:])


def set_aside(path: str, *, below: str) -> bool:
    """Whether a glob passes over `path`: half-written or not data, by custom, or the checksum of a file."""
    return path.endswith(SIDECAR) or any(part[0] in "_." and part not in (".", "..") for part in parts_of(path, below))
