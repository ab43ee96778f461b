"""The footer of a parquet file, and whether it can be true: looked at before any of the data is."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.data.locations import Location
from recsys_core.data.network import retrying
from recsys_core.data.patterns import printable
from recsys_core.errors import InputError

_MAGIC = b"PAR1"
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, eq=False)
class Footer:
    """What a file says of itself, and the sha256 of those bytes."""

    metadata: pq.FileMetaData
    schema: pa.Schema
    sha256: str


def read_footer(location: Location) -> Footer:
    """The footer of the file; at most two reads of it, none beyond the footer.

    Raises:
        InputError: the file is no parquet file, cut off, encrypted, or its footer contradicts itself or the file's size.
    """
    try:
        raw = retrying(lambda: _read(location))
        # Between two magics the bytes of the footer are a whole file, so what is hashed is what is parsed.
        with pq.ParquetFile(pa.BufferReader(_MAGIC + raw + len(raw).to_bytes(4, "little") + _MAGIC)) as file:
            footer = Footer(file.metadata, file.schema_arrow, hashlib.sha256(raw).hexdigest())
            _check(footer.metadata, file.schema, data_end=location.bytes - len(raw) - 8)
    except (_UntrueError, pa.ArrowException, OSError, UnicodeError) as error:
        why = printable(str(error).splitlines()[0]) if str(error) else type(error).__name__
        raise InputError(f"{location.name}: not a readable parquet file ({location.bytes:,} bytes): {why}") from error
    return footer


def leaves_of(metadata: pq.FileMetaData, columns: Sequence[str]) -> list[int]:
    """Positions of the leaves that `columns` are made of: one for a plain column, more for a nested one."""
    wanted = set(columns)
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    return [index for index, path in enumerate(paths) if _belongs(path, wanted)]


def _belongs(path: str, columns: set[str]) -> bool:
    """The column's name ends at a dot of the leaf's path, but may hold dots itself."""
    return path in columns or any(path[:end] in columns for end, char in enumerate(path) if char == ".")


class _UntrueError(Exception):
    """What a footer says cannot be."""


def _read(location: Location) -> bytes:
    with location.filesystem.open_input_file(location.path) as file:
        size = file.size()
        if size != location.bytes:
            raise _UntrueError(f"it has {size:,} bytes by now; it is still being written")
        if size == 0:
            raise _UntrueError("it is empty; write it anew")
        tail = file.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
        if tail[-4:] == b"PARE":
            raise _UntrueError("its footer is encrypted; write it without encryption")
        if size < 12 or tail[-4:] != _MAGIC:
            begun = size >= 4 and file.read_at(4, 0) == _MAGIC
            raise _UntrueError(
                "it begins as parquet, but its end is missing: truncated; copy or write it anew"
                if begun
                else "it has no parquet footer; name parquet files only"
            )
        length = int.from_bytes(tail[-8:-4], "little")
        if length > size - 12:
            raise _UntrueError(
                f"its footer claims {length:,} bytes, more than fit into the file: truncated or damaged; copy or write it anew"
            )
        whole = tail if length + 8 <= len(tail) else file.read_at(length + 8, size - 8 - length)
        return bytes(whole[-8 - length : -8])


def _check(metadata: pq.FileMetaData, schema: pq.ParquetSchema, *, data_end: int) -> None:
    """Counts agree, and all that is pointed to lies in the file."""
    if metadata.num_rows < 0:
        raise _UntrueError(f"its footer claims {metadata.num_rows} rows; write it anew")
    flat = [schema.column(index).max_repetition_level == 0 for index in range(len(schema))]
    rows = 0
    for group in range(metadata.num_row_groups):
        found = metadata.row_group(group)
        where = f"row group {group}"
        if found.num_rows < 0 or found.total_byte_size < 0:
            raise _UntrueError(f"{where} claims {found.num_rows} rows in {found.total_byte_size} bytes; write it anew")
        if found.num_columns != len(flat):
            raise _UntrueError(f"{where} has {found.num_columns} columns, but the schema {len(flat)}; write it anew")
        rows += found.num_rows
        for index, is_flat in enumerate(flat):
            chunk = found.column(index)
            values, size, decoded = chunk.num_values, chunk.total_compressed_size, chunk.total_uncompressed_size
            start = chunk.data_page_offset
            if chunk.dictionary_page_offset:  # some writers put 0 where there is none
                start = min(start, chunk.dictionary_page_offset)
            place = f"{where}, column {printable(chunk.path_in_schema)[:80]!r}"
            if chunk.file_path:
                raise _UntrueError(f"{place}: its data lies in another file; name the files that hold the data")
            if values < 0 or size < 0 or decoded < 0 or start < 0:
                raise _UntrueError(
                    f"{place} claims {values:,} values in {size:,} bytes ({decoded:,} decoded) at {start:,}; write it anew"
                )
            if values < found.num_rows or (is_flat and values != found.num_rows):
                raise _UntrueError(f"{place} claims {values:,} values for {found.num_rows:,} rows; write it anew")
            if values and (start < 4 or start + size > data_end):
                raise _UntrueError(
                    f"{place} claims bytes {start:,} to {start + size:,}, but the data ends at {data_end:,}: "
                    "truncated or damaged; copy or write it anew"
                )
    if rows != metadata.num_rows:
        raise _UntrueError(f"its footer claims {metadata.num_rows:,} rows, its row groups {rows:,}; write it anew")
