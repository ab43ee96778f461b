"""The footer of a parquet file, and whether it can be true: looked at before any of the data is.

Footers are parsed twice. pyarrow gives the schema and later reads the data; the counts and offsets come from DuckDB, since
pyarrow's FileMetaData.row_group(i).column(j) ends the process where a level histogram contradicts the schema (seen with 25.0.1,
cf. apache/arrow#45283: the C++ exception is not caught). So nothing here or elsewhere calls it on a file that is not our own.
"""

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.errors import InputError, first_line, shown
from recsys_core.parquet.locations import Location
from recsys_core.parquet.retries import retrying

_MAGIC = b"PAR1"
_TAIL_BYTES = 64 * 1024
_FACTS = (
    "row_group_id, row_group_num_rows, row_group_bytes, column_id, num_values, total_compressed_size, total_uncompressed_size, "
    "data_page_offset, coalesce(dictionary_page_offset, 0) AS dictionary_page_offset"
)


@dataclass(frozen=True)
class Leaf:
    """A column of the file's own schema; a nested column has several."""

    path: str
    physical_type: str
    width: int | None
    """Bytes of a value of fixed length."""
    repeated: bool


@dataclass(frozen=True, eq=False)
class Footer:
    """What a file says of itself, checked, and the sha256 of those bytes."""

    metadata: pq.FileMetaData
    schema: pa.Schema
    sha256: str
    leaves: tuple[Leaf, ...]
    group_rows_G: NDArray[np.int64]
    """Rows of each row group."""
    values_GL: NDArray[np.int64]
    """Values, nulls included, of each leaf in each row group."""
    compressed_GL: NDArray[np.int64]
    """Bytes."""
    uncompressed_GL: NDArray[np.int64]
    """Bytes of the pages before the values are decoded."""
    start_GL: NDArray[np.int64]
    """Where the first page lies."""

    def leaves_of(self, columns: Sequence[str]) -> list[int]:
        """Positions of the leaves that `columns` are made of: one for a plain column, more for a nested one."""
        wanted = set(columns)
        return [index for index, leaf in enumerate(self.leaves) if _belongs(leaf.path, wanted)]


def read_footers(locations: Sequence[Location]) -> list[Footer]:
    """The footers of the files; at most three reads of each file, none of its data.

    Raises:
        InputError: a file is no parquet file, cut off, encrypted, or its footer contradicts itself or the file's size.
    """
    raw = [_told(location, lambda location=location: retrying(lambda: _read(location))) for location in locations]
    # Between two magics the bytes of a footer are a whole file, so what is hashed is what both parse.
    whole = [_MAGIC + footer + len(footer).to_bytes(4, "little") + _MAGIC for footer in raw]
    with tempfile.TemporaryDirectory(prefix="nightjar-footers-") as folder, duckdb.connect(config={"threads": 1}) as connection:
        footers = []
        for index, (location, content) in enumerate(zip(locations, whole, strict=True)):
            path = Path(folder) / f"{index}.parquet"
            path.write_bytes(content)
            digest = hashlib.sha256(raw[index]).hexdigest()
            end = location.bytes - len(raw[index]) - 8
            footers.append(_told(location, lambda c=content, p=path, d=digest, e=end: _parse(c, p, d, connection, data_end=e)))
            path.unlink()
    return footers


class _UntrueError(Exception):
    """What a footer says cannot be."""


def _told(location: Location, step: Any) -> Any:
    try:
        return step()
    except (_UntrueError, pa.ArrowException, OSError, UnicodeError, MemoryError) as error:
        why = first_line(error)
        raise InputError(f"{location.name}: not a readable parquet file ({location.bytes:,} bytes): {why}") from error


def _belongs(path: str, columns: set[str]) -> bool:
    """The column's name ends at a dot of the leaf's path, but may hold dots itself."""
    return path in columns or any(path[:end] in columns for end, char in enumerate(path) if char == ".")


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


def _parse(content: bytes, path: Path, sha256: str, connection: duckdb.DuckDBPyConnection, *, data_end: int) -> Footer:
    query = f"SELECT {_FACTS} FROM parquet_metadata(?) ORDER BY row_group_id, column_id"
    try:
        facts: dict[str, Any] = connection.execute(query, [str(path)]).fetchnumpy()
    except duckdb.ConversionException as error:  # a time in the statistics
        raise _UntrueError(_wild_time(content)) from error
    except duckdb.Error as error:  # names a file that the user never saw
        raise _UntrueError(str(error).splitlines()[0].rpartition(f'"{path}": ')[2] + "; copy or write it anew") from error
    with pq.ParquetFile(pa.BufferReader(content)) as file:
        metadata, schema, columns = file.metadata, file.schema_arrow, file.schema
        leaves = tuple(
            Leaf(
                column.path,
                column.physical_type,
                column.length if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else None,
                column.max_repetition_level > 0,
            )
            for column in (columns.column(index) for index in range(len(columns)))
        )
    shape = (metadata.num_row_groups, len(leaves))
    if len(facts["column_id"]) != shape[0] * shape[1]:
        raise _UntrueError(f"{shape[0]} row groups of {shape[1]} columns have {len(facts['column_id'])} chunks; write it anew")
    if any(np.ma.getmaskarray(column).any() for column in facts.values()):
        raise _UntrueError("its footer leaves out counts or offsets; write it anew")
    facts_GL = {name: np.asarray(column, np.int64).reshape(shape) for name, column in facts.items()}
    first_GL, dictionary_GL = facts_GL["data_page_offset"], facts_GL.pop("dictionary_page_offset")
    # Some writers put 0 where there is no dictionary.
    facts_GL["start"] = np.where(dictionary_GL != 0, np.minimum(first_GL, dictionary_GL), first_GL)
    _check(facts_GL, metadata.num_rows, leaves, data_end=data_end)
    rows_G = facts_GL["row_group_num_rows"][:, 0] if leaves else np.zeros(shape[0], np.int64)
    return Footer(
        metadata,
        schema,
        sha256,
        leaves,
        rows_G,
        values_GL=facts_GL["num_values"],
        compressed_GL=facts_GL["total_compressed_size"],
        uncompressed_GL=facts_GL["total_uncompressed_size"],
        start_GL=facts_GL["start"],
    )


def _wild_time(content: bytes) -> str:
    with pq.ParquetFile(pa.BufferReader(content)) as file:
        times = [field.name for field in file.schema_arrow if pa.types.is_timestamp(field.type)]
    names = " or ".join(f"{name[:80]!r}" for name in times[:5]) or "one"
    return f"the times of column {names} reach beyond the year 290,000, which no clock says; mend what writes them"


def _check(facts_GL: dict[str, NDArray[np.int64]], rows: int, leaves: Sequence[Leaf], *, data_end: int) -> None:
    """Counts agree, and all that is pointed to lies in the file."""
    group_rows_GL, values_GL = facts_GL["row_group_num_rows"], facts_GL["num_values"]
    size_GL, start_GL = facts_GL["total_compressed_size"], facts_GL["start"]

    def refuse(wrong_GL: NDArray[np.bool_], told: str) -> None:
        if wrong_GL.any():
            group, leaf = (int(index) for index in np.argwhere(wrong_GL)[0])
            numbers = {name: int(array[group, leaf]) for name, array in facts_GL.items()}
            numbers["end"] = numbers["start"] + numbers["total_compressed_size"]
            place = f"row group {group}, column {shown(leaves[leaf].path)} claims "
            raise _UntrueError(place + told.format(**numbers, data_end=data_end))

    if rows < 0:
        raise _UntrueError(f"its footer claims {rows:,} rows; write it anew")
    refuse(group_rows_GL < 0, "{row_group_num_rows:,} rows; write it anew")
    negative_GL = (values_GL < 0) | (size_GL < 0) | (facts_GL["total_uncompressed_size"] < 0) | (start_GL < 0)
    refuse(
        negative_GL | (facts_GL["row_group_bytes"] < 0),
        "{num_values:,} values in {total_compressed_size:,} bytes ({total_uncompressed_size:,} decompressed, "
        "{row_group_bytes:,} in the row group) at {start:,}; write it anew",
    )
    flat_L = np.array([not leaf.repeated for leaf in leaves], np.bool_)
    differs_GL = (values_GL < group_rows_GL) | (flat_L & (values_GL != group_rows_GL))
    refuse(differs_GL, "{num_values:,} values for {row_group_num_rows:,} rows; write it anew")
    # In this order, since the sum of two lies may overflow.
    beyond_GL = (start_GL < 4) | (start_GL > data_end) | (size_GL > data_end - np.minimum(start_GL, data_end))
    refuse(
        (values_GL > 0) & beyond_GL,
        "bytes {start:,} to {end:,}, but the data ends at {data_end:,}: truncated or damaged; copy or write it anew",
    )
    held = sum(int(count) for count in group_rows_GL[:, 0]) if leaves else 0  # of any size in Python
    if held != rows:
        raise _UntrueError(f"its footer claims {rows:,} rows, its row groups {held:,}; write it anew")
