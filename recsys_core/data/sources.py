"""Input parquet before anything is read from it: which files, which columns, which types."""

import difflib
import glob
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.errors import InputError
from recsys_core.manifests import IdType, SourceFile


@dataclass(frozen=True)
class Source:
    """A parquet file with its schema and its record for a manifest."""

    path: Path
    schema: pa.Schema
    record: SourceFile
    partition: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Hive keys of the path, e.g. {"dt": "2026-11-19"}."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.path)


def open_sources(patterns: Sequence[str], *, setting: str) -> tuple[Source, ...]:
    """All files that `patterns` (paths or globs) name, sorted, each once.

    Args:
        setting: the config key the patterns come from, for messages.

    Raises:
        InputError: nothing matches, a file is no parquet file, or all of them are empty.
    """
    paths: set[Path] = set()
    for pattern in patterns:
        # A file of exactly this name is meant, even if the name reads as a pattern.
        names = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)  # noqa: PTH207  # may be absolute
        found = [Path(name) for name in names if Path(name).is_file()]
        if not found:
            kind = "no file matches" if glob.has_magic(pattern) else "no such file"
            raise InputError(f"{setting}: {kind}: {pattern}")
        paths.update(found)
    sources = tuple(_open(path) for path in sorted(paths))
    if sum(source.record.rows for source in sources) == 0:
        raise InputError(f"{setting}: {_names(sources)}: no rows; check what writes this table")
    return sources


def _open(path: Path) -> Source:
    status = path.stat()
    try:
        with pq.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(
            f"{path}: not a readable parquet file ({status.st_size:,} bytes): {str(error).splitlines()[0]}"
        ) from error
    with path.open("rb") as raw:
        raw.seek(-8, 2)
        footer = int.from_bytes(raw.read(4), "little")
        raw.seek(-(8 + footer), 2)
        digest = hashlib.sha256(raw.read()).hexdigest()
    record = SourceFile(path=str(path), bytes=status.st_size, rows=rows, modified_ns=status.st_mtime_ns, footer_sha256=digest)
    return Source(path, schema, record)


def require_column(source: Source, column: str, *, setting: str) -> pa.DataType:
    """Type of `column`; InputError with the columns there are and the nearest name when it is missing or double."""
    count = source.schema.names.count(column)
    if count > 1:
        raise InputError(f"{source.path}: {count} columns are named {column!r}; rename all but one")
    if count == 0:
        near = difflib.get_close_matches(column, source.schema.names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"{source.path}: no column {column!r} ({setting}); {hint}it has {source.schema.names}")
    return source.schema.field(column).type


def id_type(sources: Sequence[Source], column: str, *, setting: str) -> IdType:
    """Whether `column` holds integers or strings, the same in every file."""
    kinds = {source: _id_kind(source, column, setting=setting) for source in sources}
    first = sources[0]
    for source, kind in kinds.items():
        if kind != kinds[first]:
            raise InputError(f"{source.path}: column {column!r} is {kind}, but {kinds[first]} in {first.path}; write one type")
    return kinds[first]


def _id_kind(source: Source, column: str, *, setting: str) -> IdType:
    kind = require_column(source, column, setting=setting)
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_integer(value):
        return "int64"
    if pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value):
        return "string"
    raise InputError(f"{source.path}: column {column!r} is {kind}, but ids are integers or strings; cast it")


@contextmanager
def local_files(sources: Sequence[Source], *, columns: Sequence[str], scratch: Path) -> Iterator[list[Path]]:
    """A local parquet file for each source that holds at least `columns`, rows in the same order, for as long as the context."""
    yield [source.path for source in sources]


def literal(path: Path) -> str:
    """`path` for DuckDB's read_parquet, which would take *, ? and [ in a file's own name for a pattern.

    >>> literal(Path("log/day[1].parquet"))
    'log/day[[]1].parquet'
    """
    return re.sub(r"[*?\[]", r"[\g<0>]", str(path))


def _names(sources: Sequence[Source]) -> str:
    return str(sources[0].path) + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")
