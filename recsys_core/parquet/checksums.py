"""SHA-256 of whole files, next to them as sha256sum writes it: part-0.parquet.sha256 for part-0.parquet."""

import hashlib
import re
from collections.abc import Sequence
from functools import partial

import pyarrow as pa

from recsys_core.errors import InputError, first_line, shown
from recsys_core.parquet.patterns import SIDECAR
from recsys_core.parquet.retries import retrying
from recsys_core.parquet.sources import Source

_MOST_BYTES = 10_000
_BLOCK_BYTES = 1 << 20
_LINE = re.compile(r"\\?([0-9a-fA-F]{64})([ \t]+\*?[^\n]*)?\s*")


def require_sidecars(sources: Sequence[Source]) -> None:
    """InputError for a file without a sidecar, or with one that holds no sha256; no file is read."""
    for source in sources:
        _expected(source)


def verify_sidecars(sources: Sequence[Source]) -> None:
    """Reads each file once. InputError for one whose sha256 is not that of its sidecar."""
    for source in sources:
        expected, actual = _expected(source), retrying(partial(_sha256, source))
        if actual != expected:
            raise InputError(
                f"{source.name}: its sha256 is {actual}, but {expected} in {source.name}{SIDECAR}: one of them is damaged or "
                "out of date; copy or write the file again, then its sidecar"
            )


def _expected(source: Source) -> str:
    location = source.location
    try:
        with location.filesystem.open_input_stream(location.path + SIDECAR) as file:
            text = bytes(file.read(_MOST_BYTES)).decode(errors="replace")
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{source.name}{SIDECAR}: cannot be read ({first_line(error)}), but checksums is sidecar; "
            "write it with sha256sum, or set checksums to pages"
        ) from None
    match = _LINE.fullmatch(text)
    if match is None:
        raise InputError(
            f"{source.name}{SIDECAR}: holds {shown(text)}, expected one line of 64 hexadecimal digits and the name "
            "of the file; write it with sha256sum"
        )
    return match[1].lower()


def _sha256(source: Source) -> str:
    digest = hashlib.sha256()
    try:
        with source.location.filesystem.open_input_stream(source.location.path) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    except pa.ArrowException as error:
        raise InputError(f"{source.name}: cannot be read: {first_line(error)}") from error
    return digest.hexdigest()
