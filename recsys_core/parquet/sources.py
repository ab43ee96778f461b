"""Input parquet before anything is read from it: which files, which columns, which types."""

import difflib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys_core.errors import InputError, first_line, shown_names
from recsys_core.manifests import IdType, SourceFile
from recsys_core.parquet.copies import copy_columns
from recsys_core.parquet.footers import Footer, read_footers
from recsys_core.parquet.locations import Location, find
from recsys_core.parquet.partitions import NULL, partition_of, partition_type
from recsys_core.parquet.retries import retrying


@dataclass(frozen=True, eq=False)
class Source:
    """A parquet file, local or remote, with what its footer says and its record for a manifest."""

    location: Location
    footer: Footer = field(repr=False)
    record: SourceFile
    partition: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Hive keys of the path, e.g. {"dt": "2026-11-19"}."""
    partition_types: Mapping[str, pa.DataType] = field(default_factory=dict)
    """int64, date32 or string: what fits the key's values in all files of the setting."""

    @property
    def name(self) -> str:
        """What messages call it: a local path, or a URI without options."""
        return self.location.name

    @property
    def schema(self) -> pa.Schema:
        """Columns and types of the file."""
        return self.footer.schema

    @property
    def local(self) -> bool:
        """Whether it lies on this machine."""
        return self.location.local

    @property
    def path(self) -> Path:
        """Of a local file; InputError for a remote one. `open` and `local_files` do for both."""
        if not self.local:
            raise InputError(f"{self.name}: lies in a store, but this is read from local files only; copy it here")
        return Path(self.location.path)

    @property
    def columns(self) -> tuple[str, ...]:
        """The file's columns, then the hive keys that are not among them."""
        return (*self.schema.names, *(key for key in self.partition if key not in self.schema.names))

    def constant(self, key: str) -> int | date | str:
        """The value of hive key `key`, in its type, for every row of this file."""
        value: int | date | str = pa.scalar(self.partition[key]).cast(self.partition_types[key]).as_py()
        return value

    def open(self, **options: Any) -> pq.ParquetFile:
        """The file for reading; `options` are those of pyarrow.parquet.ParquetFile. InputError if it changed since."""
        path, filesystem = self.location.path, self.location.filesystem
        try:
            now = retrying(lambda: filesystem.get_file_info(path))
            if (now.size, now.mtime_ns or 0) != (self.location.bytes, self.location.modified_ns):
                raise InputError(f"{self.name}: changed while it was being read; run again when what writes it is done")
            # With the footer that was checked: no other one is trusted.
            return pq.ParquetFile(path, filesystem=filesystem, metadata=self.footer.metadata, **options)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{self.name}: cannot be read: {first_line(error)}") from error


def open_sources(patterns: Sequence[str], *, setting: str, data_root: Path | None = None) -> tuple[Source, ...]:
    """All files that `patterns` name, sorted by name, each once, their footers read and checked.

    A pattern is a path, a glob, or a folder, which means all *.parquet in and below it; local, or a URI (s3://, gs://, file://).

    Args:
        setting: the config key the patterns come from, for messages.
        data_root: where every file has to lie, links and .. resolved.

    Raises:
        InputError: nothing matches, a file is no sound parquet file or outside of data_root, hive keys differ between the
            files, all of them are empty, or a file is reached under two names.
    """
    found: dict[str, Location] = {}
    for pattern in patterns:
        for location in find(pattern, setting=setting, data_root=data_root):
            found[location.name] = location
    locations = [found[name] for name in sorted(found)]
    refuse_second_names(locations, setting=setting)
    sources = tuple(_source(*pair) for pair in zip(locations, read_footers(locations), strict=True))
    if not sources:
        raise InputError(f"{setting}: names no file; give a path, a glob or a folder")
    if sum(source.record.rows for source in sources) == 0:
        raise InputError(f"{setting}: {_names(sources)}: no rows; check what writes this table")
    return _with_partition_types(sources)


def refuse_second_names(locations: Sequence[Location], *, setting: str) -> None:
    """InputError for a local file that is among `locations` under two names, through a link or two spellings of its path."""
    first: dict[tuple[int, int], str] = {}
    for location in locations:
        other = location.name if location.inode is None else first.setdefault(location.inode, location.name)
        if other != location.name:
            raise InputError(
                f"{setting}: {location.name}: is the same file as {other}, through a link or another spelling of its path, and "
                "its rows would count twice; name it once, or leave the link out"
            )


def _source(location: Location, footer: Footer) -> Source:
    record = SourceFile(
        path=location.name,
        bytes=location.bytes,
        rows=footer.metadata.num_rows,
        modified_ns=location.modified_ns,
        footer_sha256=footer.sha256,
    )
    return Source(location, footer, record, partition_of(location.path))


def _with_partition_types(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    first = sources[0]
    for source in sources:
        if set(source.partition) != set(first.partition):
            raise InputError(
                f"{source.name}: its folders have the keys {sorted(source.partition)}, but {sorted(first.partition)} in "
                f"{first.name}; give every file the same"
            )
    types = {
        key: partition_type([source.partition[key] for source in sources if source.partition[key] != NULL])
        for key in first.partition
    }
    return tuple(replace(source, partition_types=types) for source in sources)


def require_column(source: Source, column: str, *, setting: str) -> pa.DataType:
    """Type of `column`, of the file or a hive key of its path.

    InputError with the columns there are and the nearest name when it is missing, double, or one thing in the path and
    another in the file.
    """
    count = source.schema.names.count(column)
    if count > 1:
        raise InputError(f"{source.name}: {count} columns are named {column!r}; rename all but one")
    if column in source.partition:
        if source.partition[column] == NULL:
            raise InputError(f"{source.name}: the key {column!r} of its path is null ({setting}); name another column")
        if count == 0:
            return source.partition_types[column]
        _refuse_conflict(source, column, setting=setting)
    if count == 0:
        near = difflib.get_close_matches(column, source.columns, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"{source.name}: no column {column!r} ({setting}); {hint}it has {shown_names(source.columns)}")
    return source.schema.field(column).type


def _refuse_conflict(source: Source, column: str, *, setting: str) -> None:
    """The path and the file both give `column`: they have to say the same in every row."""
    kind, told = source.schema.field(column).type, source.partition[column]
    try:
        value = pa.scalar(told).cast(value_type(kind))
        with source.open(page_checksum_verification=True) as file:
            batches = file.iter_batches(columns=[column])
            same = all(pc.all(pc.equal(batch.column(column), value), skip_nulls=False).as_py() for batch in batches)
    except (pa.ArrowException, OSError):
        same = False
    if not same:
        raise InputError(
            f"{source.name}: column {column!r} ({setting}) is {told!r} in the path, but the file has a column of that name "
            f"({kind}) that does not say so in every row; rename one of them"
        )


def value_type(kind: pa.DataType) -> pa.DataType:
    """Of a dictionary its values' type, else the type itself."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def same_types(sources: Sequence[Source], columns: Sequence[str]) -> None:
    """Refuses columns that are of one kind in one file and of another in the next; widths and units may differ.

    Raises InputError naming both files and both types.
    """
    first = sources[0]
    for column in columns:
        wanted = require_column(first, column, setting="columns")
        for source in sources:
            kind = require_column(source, column, setting="columns")
            if _kind(kind) != _kind(wanted):
                raise InputError(
                    f"{source.name}: column {column!r} is {kind}, but {wanted} in {first.name}; write one type in all files"
                )


def _kind(kind: pa.DataType) -> str:
    """What all types have in common that may stand for each other."""
    kind = value_type(kind)
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_floating(kind):
        return "float"
    if pa.types.is_decimal(kind):
        return "decimal"
    if pa.types.is_date(kind):
        return "date"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz is None else "timestamp with zone"
    if is_text(kind):
        return "string"
    if is_list(kind):
        return f"list of {_kind(kind.value_type)}"
    return str(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether `kind` holds strings."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether `kind` holds lists, of one length or many."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def id_type(sources: Sequence[Source], column: str, *, setting: str) -> IdType:
    """Whether `column` holds integers or strings, the same in every file."""
    kinds = {source: _id_kind(source, column, setting=setting) for source in sources}
    first = sources[0]
    for source, kind in kinds.items():
        if kind != kinds[first]:
            raise InputError(f"{source.name}: column {column!r} is {kind}, but {kinds[first]} in {first.name}; write one type")
    return kinds[first]


def _id_kind(source: Source, column: str, *, setting: str) -> IdType:
    kind = require_column(source, column, setting=setting)
    value = value_type(kind)
    if pa.types.is_integer(value):
        return "int64"
    if is_text(value):
        return "string"
    raise InputError(f"{source.name}: column {column!r} is {kind}, but ids are integers or strings; cast it")


@contextmanager
def local_files(sources: Sequence[Source], *, columns: Sequence[str], scratch: Path) -> Iterator[list[Path]]:
    """A local parquet file for each source that holds at least `columns`, rows in the same order, for as long as the context.

    Local files are given as they are. Remote ones are copied into `scratch`, projected to `columns` (hive keys are not in a
    file, so neither in its copy), their pages verified on the way.

    Raises InputError if a store stops answering, the disk is full, or a remote file is damaged.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="remote-", dir=scratch))
    try:
        yield [
            source.path if source.local else _copied(source, columns, folder / f"{index:06d}.parquet")
            for index, source in enumerate(sources)
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copied(source: Source, columns: Sequence[str], target: Path) -> Path:
    names = [name for name in dict.fromkeys(columns) if name in source.schema.names]
    # Where all that is asked for stands in the path, some column has to carry the number of rows.
    copy_columns(source.location, source.footer, columns=names or source.schema.names[:1], target=target)
    return target


def literal(path: Path) -> str:
    """`path` for DuckDB's read_parquet, which would take *, ? and [ in a file's own name for a pattern.

    >>> literal(Path("log/day[1].parquet"))
    'log/day[[]1].parquet'
    """
    return re.sub(r"[*?\[]", r"[\g<0>]", str(path))


def _names(sources: Sequence[Source]) -> str:
    return sources[0].name + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")
