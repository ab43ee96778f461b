"""Input parquet files with checked footers, their columns, and the hive keys in their paths."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from recsys_core.errors import InputError, first_line, printable
from recsys_core.manifests import SourceFile
from recsys_core.parquet.footers import Footer, read_footers
from recsys_core.parquet.locations import Location, find_files, retrying
from recsys_core.units import MIB

_HASH_BLOCK_BYTES = 4 * MIB
NULL_KEY_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""Value that Hive and Spark write for a null key."""


@dataclass(frozen=True, eq=False)
class Table:
    """A version of a table in a format that only Spark reads."""

    format: str
    name: str
    """Path, or name in a catalog."""
    version: str
    first_rows: bytes = field(repr=False)
    """Parquet file with the first rows, for the checks before the ingest. Columns that are not needed are null."""


@dataclass(frozen=True, eq=False)
class Source:
    """A parquet file, local or remote, with its footer, the hive keys in its path, and its entry in a manifest.

    A source can also be a version of a `table`. In this case, the footer describes only the first rows of the table.
    """

    location: Location
    footer: Footer = field(repr=False)
    record: SourceFile
    partition_values: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Hive keys in the path, for example {"dt": "2026-11-19"}."""
    partition_types: Mapping[str, pa.DataType] = field(default_factory=dict)
    """Type of each hive key: int64, date32 or string. It is determined by the values of the key in all files."""
    table: Table | None = None
    """None for a parquet file."""

    @property
    def name(self) -> str:
        """Name in messages: a local path, or a URI without options."""
        return self.location.name

    @property
    def schema(self) -> pa.Schema:
        """Columns and types of the file."""
        return self.footer.schema

    @property
    def is_local(self) -> bool:
        """True for a file on this machine, false for a file in an object store and for a table."""
        return self.table is None and self.location.is_local

    @property
    def path(self) -> Path:
        """Path of a local file. Raise InputError for a file in an object store: use `open` or `local_files` for such a file."""
        if not self.is_local:
            raise InputError(f"{self.name}: is in an object store, but only local files can be read here; copy it")
        return Path(self.location.path)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the file, then the hive keys that are not among them."""
        return (*self.schema.names, *(key for key in self.partition_values if key not in self.schema.names))

    def partition_value(self, key: str) -> int | date | str:
        """Return the value of a hive key, converted to the type of the key. All rows of the file have this value."""
        value: int | date | str = pa.scalar(self.partition_values[key]).cast(self.partition_types[key]).as_py()
        return value

    def open(self, **options: Any) -> pq.ParquetFile:
        """Open the file with options of pyarrow.parquet.ParquetFile. Raise InputError if it changed since the footer check.

        For a table, open the first rows.
        """
        if self.table is not None:
            return pq.ParquetFile(pa.BufferReader(self.table.first_rows), **options)
        path, filesystem = self.location.path, self.location.filesystem
        try:
            file_info = retrying(lambda: filesystem.get_file_info(path))
            if (file_info.size, file_info.mtime_ns or 0) != (self.location.num_bytes, self.location.modified_ns):
                raise InputError(f"{self.name}: changed while it was being read; run again after its writer has finished")
            # With `metadata`, pyarrow uses the checked footer and does not parse the footer of the file again.
            return pq.ParquetFile(path, filesystem=filesystem, metadata=self.footer.metadata, **options)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{self.name}: cannot be read: {first_line(error)}") from error


def open_sources(patterns: Sequence[str], *, setting: str, allowed_data_root: Path | None = None) -> tuple[Source, ...]:
    """Find the files of `patterns`, each once and sorted by name; read and check their footers.

    A pattern is a path, a glob, or a folder, either local or as a URI (s3://, gs://, file://). A folder means all *.parquet
    files in it and below it.

    Args:
        setting: config key of the patterns, for messages.
        allowed_data_root: folder that must contain every file, after links and .. are resolved.

    Raises:
        InputError: a pattern matches nothing, a file is not valid parquet or is outside allowed_data_root, the hive keys of
            two files differ, all files are empty, or a file has two names among the matches.
    """
    location_by_name: dict[str, Location] = {}
    for pattern in patterns:
        for location in find_files(pattern, setting=setting, allowed_data_root=allowed_data_root):
            location_by_name[location.name] = location
    locations = [location_by_name[name] for name in sorted(location_by_name)]
    check_distinct_files(locations, setting=setting)
    footers = read_footers(locations)
    sources = tuple(
        Source(location, footer, _file_record(location, footer), parse_partition_values(location.path))
        for location, footer in zip(locations, footers, strict=True)
    )
    if not sources:
        raise InputError(f"{setting}: names no file; give a path, a glob or a folder")
    if sum(source.record.num_rows for source in sources) == 0:
        more_files_text = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
        raise InputError(f"{setting}: {sources[0].name}{more_files_text}: no rows; check the job that writes this table")
    return _with_partition_types(sources)


def open_stage_file(path: Path) -> Source:
    """Open a file that nightjar wrote. A folder named key=value in its path is not a hive key."""
    file_status = path.stat()
    location = Location(printable(str(path)), str(path), file_status.st_size, file_status.st_mtime_ns, pafs.LocalFileSystem())
    (footer,) = read_footers([location])
    return Source(location, footer, _file_record(location, footer))


def check_distinct_files(locations: Sequence[Location], *, setting: str) -> None:
    """Raise InputError if two `locations` are the same file, for example through a link or another spelling of the path."""
    name_by_file: dict[tuple[int, int] | str, str] = {}
    for location in locations:
        file_key = location.inode or location.name
        if name_by_file.get(file_key) == location.name:
            raise InputError(f"{setting}: {location.name}: is listed twice, so its rows would count twice; list it once")
        if file_key in name_by_file:
            raise InputError(
                f"{setting}: {location.name}: is the same file as {name_by_file[file_key]}, through a link or another spelling "
                "of its path, and its rows would count twice; list it once, or remove the link"
            )
        name_by_file[file_key] = location.name


def reject_copies(sources: Sequence[Source], *, setting: str) -> None:
    """Raise InputError if a file is a byte copy of another file of the same partition, because its rows would count twice.

    Only files with equal sizes and footers are read.
    """
    sources_by_footer: dict[tuple[object, ...], list[Source]] = {}
    for source in sources:
        if source.record.num_rows:
            record = source.record
            footer_key = (record.footer_sha256, record.size_bytes, tuple(sorted(source.partition_values.items())))
            sources_by_footer.setdefault(footer_key, []).append(source)
    for possible_copies in sources_by_footer.values():
        source_by_sha256: dict[str, Source] = {}
        for source in possible_copies if len(possible_copies) > 1 else ():
            original_source = source_by_sha256.setdefault(_content_sha256(source), source)
            if original_source is not source:
                raise InputError(
                    f"{setting}: {source.name} is a byte copy of {original_source.name}, so its {source.record.num_rows:,} "
                    "rows would count twice; remove one of the two files"
                )


def _content_sha256(source: Source) -> str:
    digest = hashlib.sha256()
    try:
        with source.location.filesystem.open_input_stream(source.location.path, compression=None) as stream:
            while block := stream.read(_HASH_BLOCK_BYTES):
                digest.update(block)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{source.name}: cannot be read: {first_line(error)}") from error
    return digest.hexdigest()


def _file_record(location: Location, footer: Footer) -> SourceFile:
    return SourceFile(
        path=location.name,
        size_bytes=location.num_bytes,
        num_rows=footer.metadata.num_rows,
        modified_ns=location.modified_ns,
        footer_sha256=footer.sha256,
    )


def parse_partition_values(path: str) -> dict[str, str]:
    """Parse the hive keys in the folder names of `path`. Raise InputError if a key occurs twice.

    >>> parse_partition_values("log/dt=2026-11-19/country=S%C3%A3o%20Tom%C3%A9/part=0.parquet")
    {'dt': '2026-11-19', 'country': 'São Tomé'}
    """
    value_by_key: dict[str, str] = {}
    for folder_name in path.split("/")[:-1]:
        key, equals, value = folder_name.partition("=")
        if not (key and equals):
            continue
        if unquote(key) in value_by_key:
            raise InputError(f"{printable(path)}: two folders in the path have the key {unquote(key)!r}; move the files")
        value_by_key[unquote(key)] = unquote(value)
    return value_by_key


def _with_partition_types(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """Return the sources with the types of their hive keys. Raise InputError if two files have different keys."""
    first_source = sources[0]
    first_keys = set(first_source.partition_values)
    for source in sources:
        if set(source.partition_values) != first_keys:
            raise InputError(
                f"{source.name}: its folders have the keys {sorted(source.partition_values)}, but {sorted(first_keys)} in "
                f"{first_source.name}; use the same keys for every file"
            )
    type_by_key = {
        key: narrowest_type(
            [source.partition_values[key] for source in sources if source.partition_values[key] != NULL_KEY_VALUE]
        )
        for key in first_source.partition_values
    }
    return tuple(replace(source, partition_types=type_by_key) for source in sources)


def narrowest_type(values: Sequence[str]) -> pa.DataType:
    """Return the narrowest type of all `values` of a hive key: int64, date32 or string.

    >>> narrowest_type(["1", "02"]), narrowest_type(["2026-11-19"]), narrowest_type(["1", "x"])
    (DataType(int64), DataType(date32[day]), DataType(string))
    """
    for data_type, text_pattern in ((pa.int64(), r"-?[0-9]+"), (pa.date32(), r"[0-9]{4}-[0-9]{2}-[0-9]{2}")):
        if all(re.fullmatch(text_pattern, value) for value in values):
            try:
                pa.array(values, pa.string()).cast(data_type)
            except pa.ArrowInvalid:  # beyond int64, or 31 February
                continue
            return data_type
    return pa.string()
