"""Parquet footers, checked for consistency before any data is read.

Each footer is parsed twice. pyarrow provides the schema and reads the data later. DuckDB provides counts and offsets, because
pyarrow's FileMetaData.row_group(i).column(j) aborts the process if a level histogram contradicts the schema (seen with 25.0.1,
cf. apache/arrow#45283: the C++ exception is not caught). nightjar must not call it on input files.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.errors import InputError, first_line, shown
from recsys_core.parquet.locations import Location, retrying

_MAGIC = b"PAR1"
_TAIL_BYTES = 64 * 1024
_CHUNK_COLUMNS = (
    "row_group_id, row_group_num_rows, row_group_bytes, column_id, num_values, total_compressed_size, total_uncompressed_size, "
    "data_page_offset, coalesce(dictionary_page_offset, 0) AS dictionary_page_offset"
)


@dataclass(frozen=True)
class Leaf:
    """A leaf column of the parquet schema; a nested column has several."""

    path: str
    physical_type: str
    width: int | None
    """Bytes of a value, if all values have the same length."""
    repeated: bool


@dataclass(frozen=True, eq=False)
class Footer:
    """A checked footer, and the sha256 of its bytes. Two-dimensional arrays have the shape [row groups, leaves]."""

    metadata: pq.FileMetaData
    schema: pa.Schema
    sha256: str
    leaves: tuple[Leaf, ...]
    group_rows: NDArray[np.int64]
    """Rows of each row group."""
    num_values: NDArray[np.int64]
    """Values of each leaf in each row group, nulls included."""
    compressed_bytes: NDArray[np.int64]
    """Bytes of the pages in the file."""
    uncompressed_bytes: NDArray[np.int64]
    """Bytes of the decompressed pages, before the values are decoded."""
    page_start: NDArray[np.int64]
    """Offset of the first page in the file."""

    def leaves_of(self, columns: Sequence[str]) -> list[int]:
        """Return the indices of the leaves of `columns`: one for a plain column, several for a nested one."""
        names = set(columns)
        return [index for index, leaf in enumerate(self.leaves) if _belongs_to(leaf.path, names)]


def read_footers(locations: Sequence[Location]) -> list[Footer]:
    """Read and check the footers, with at most three reads of each file and none of its data.

    Raises:
        InputError: a file is not parquet, is truncated or encrypted, or its footer contradicts itself or the size of the file.
    """
    raw_footers = []
    for location in locations:
        with _explain_errors(location):
            raw_footers.append(retrying(lambda location=location: _read(location)))  # type: ignore[misc]
    footers = []
    with tempfile.TemporaryDirectory(prefix="nightjar-footers-") as folder, duckdb.connect(config={"threads": 1}) as connection:
        for index, (location, raw) in enumerate(zip(locations, raw_footers, strict=True)):
            # A footer between two magic numbers is a parquet file, so both libraries parse exactly the bytes that are hashed.
            content = _MAGIC + raw + len(raw).to_bytes(4, "little") + _MAGIC
            path = Path(folder) / f"{index}.parquet"
            path.write_bytes(content)
            digest, data_end = hashlib.sha256(raw).hexdigest(), location.bytes - len(raw) - 8
            with _explain_errors(location):
                footers.append(_parse(content, path, digest, connection, data_end=data_end))
            path.unlink()
    return footers


class _InvalidFooterError(Exception):
    """A footer cannot be read, or contradicts itself."""


@contextmanager
def _explain_errors(location: Location) -> Iterator[None]:
    try:
        yield
    except (_InvalidFooterError, pa.ArrowException, OSError, UnicodeError, MemoryError) as error:
        why = first_line(error)
        raise InputError(f"{location.name}: not a readable parquet file ({location.bytes:,} bytes): {why}") from error


def _belongs_to(leaf_path: str, columns: set[str]) -> bool:
    """Whether a leaf is part of one of `columns`; a dot separates levels, but may also be part of a column's name."""
    return leaf_path in columns or any(leaf_path[:end] in columns for end, char in enumerate(leaf_path) if char == ".")


def _read(location: Location) -> bytes:
    with location.filesystem.open_input_file(location.path) as file:
        size = file.size()
        if size != location.bytes:
            raise _InvalidFooterError(f"it has {size:,} bytes by now; it is still being written")
        if size == 0:
            raise _InvalidFooterError("it is empty; write it again")
        tail = file.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
        if tail[-4:] == b"PARE":
            raise _InvalidFooterError("its footer is encrypted; write it without encryption")
        if size < 12 or tail[-4:] != _MAGIC:
            starts_as_parquet = size >= 4 and file.read_at(4, 0) == _MAGIC
            raise _InvalidFooterError(
                "it begins as parquet, but its end is missing: truncated; copy or write it again"
                if starts_as_parquet
                else "it has no parquet footer; name parquet files only"
            )
        length = int.from_bytes(tail[-8:-4], "little")
        if length > size - 12:
            raise _InvalidFooterError(
                f"its footer claims {length:,} bytes, more than fit into the file: truncated or damaged; copy or write it again"
            )
        end = tail if length + 8 <= len(tail) else file.read_at(length + 8, size - 8 - length)
        return bytes(end[-8 - length : -8])


def _parse(content: bytes, path: Path, sha256: str, connection: duckdb.DuckDBPyConnection, *, data_end: int) -> Footer:
    query = f"SELECT {_CHUNK_COLUMNS} FROM parquet_metadata(?) ORDER BY row_group_id, column_id"
    try:
        chunks: dict[str, Any] = connection.execute(query, [str(path)]).fetchnumpy()
    except duckdb.ConversionException as error:  # a timestamp in the statistics
        raise _InvalidFooterError(_explain_timestamp(content)) from error
    except duckdb.Error as error:  # the message names the temporary file
        reason = str(error).splitlines()[0].rpartition(f'"{path}": ')[2]
        raise _InvalidFooterError(f"{reason}; copy or write it again") from error
    with pq.ParquetFile(pa.BufferReader(content)) as file:
        metadata, schema = file.metadata, file.schema_arrow
        leaves = tuple(_leaf(file.schema.column(index)) for index in range(len(file.schema)))
    shape = (metadata.num_row_groups, len(leaves))
    num_chunks = len(chunks["column_id"])
    if num_chunks != shape[0] * shape[1]:
        raise _InvalidFooterError(f"{shape[0]} row groups of {shape[1]} columns have {num_chunks} chunks; write it again")
    if any(np.ma.getmaskarray(column).any() for column in chunks.values()):
        raise _InvalidFooterError("its footer leaves out counts or offsets; write it again")
    chunk_facts = {name: np.asarray(column, np.int64).reshape(shape) for name, column in chunks.items()}
    data_start, dictionary_start = chunk_facts["data_page_offset"], chunk_facts.pop("dictionary_page_offset")
    # Some writers store the dictionary offset 0 for a chunk without a dictionary.
    chunk_facts["start"] = np.where(dictionary_start != 0, np.minimum(data_start, dictionary_start), data_start)
    _check(chunk_facts, metadata.num_rows, leaves, data_end=data_end)
    return Footer(
        metadata,
        schema,
        sha256,
        leaves,
        group_rows=chunk_facts["row_group_num_rows"][:, 0] if leaves else np.zeros(shape[0], np.int64),
        num_values=chunk_facts["num_values"],
        compressed_bytes=chunk_facts["total_compressed_size"],
        uncompressed_bytes=chunk_facts["total_uncompressed_size"],
        page_start=chunk_facts["start"],
    )


def _leaf(column: pq.ColumnSchema) -> Leaf:
    width = column.length if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else None
    return Leaf(column.path, column.physical_type, width, column.max_repetition_level > 0)


def _explain_timestamp(content: bytes) -> str:
    with pq.ParquetFile(pa.BufferReader(content)) as file:
        columns = [field.name for field in file.schema_arrow if pa.types.is_timestamp(field.type)]
    names = " or ".join(shown(name) for name in columns[:5]) or "one"
    return f"the times of column {names} reach beyond the year 290,000, which cannot be valid; fix the job that writes them"


def _check(chunk_facts: dict[str, NDArray[np.int64]], num_rows: int, leaves: Sequence[Leaf], *, data_end: int) -> None:
    """Raise _InvalidFooterError unless all counts agree and all offsets are inside the file."""
    group_rows, num_values = chunk_facts["row_group_num_rows"], chunk_facts["num_values"]
    size, page_start = chunk_facts["total_compressed_size"], chunk_facts["start"]

    def reject(invalid: NDArray[np.bool_], claim: str) -> None:
        if invalid.any():
            group, leaf = (int(index) for index in np.argwhere(invalid)[0])
            numbers = {name: int(array[group, leaf]) for name, array in chunk_facts.items()}
            numbers["end"] = numbers["start"] + numbers["total_compressed_size"]
            place = f"row group {group}, column {shown(leaves[leaf].path)} claims "
            raise _InvalidFooterError(place + claim.format(**numbers, data_end=data_end))

    if num_rows < 0:
        raise _InvalidFooterError(f"its footer claims {num_rows:,} rows; write it again")
    reject(group_rows < 0, "{row_group_num_rows:,} rows; write it again")
    negative = (num_values < 0) | (size < 0) | (chunk_facts["total_uncompressed_size"] < 0) | (page_start < 0)
    reject(
        negative | (chunk_facts["row_group_bytes"] < 0),
        "{num_values:,} values in {total_compressed_size:,} bytes ({total_uncompressed_size:,} decompressed, "
        "{row_group_bytes:,} in the row group) at {start:,}; write it again",
    )
    is_flat = np.array([not leaf.repeated for leaf in leaves], np.bool_)
    differs = (num_values < group_rows) | (is_flat & (num_values != group_rows))
    reject(differs, "{num_values:,} values for {row_group_num_rows:,} rows; write it again")
    # The sum start + size of two corrupt values may overflow, so it is not computed.
    outside = (page_start < 4) | (page_start > data_end) | (size > data_end - np.minimum(page_start, data_end))
    reject(
        (num_values > 0) & outside,
        "bytes {start:,} to {end:,}, but the data ends at {data_end:,}: truncated or damaged; copy or write it again",
    )
    # Python integers do not overflow.
    rows_of_groups = sum(int(count) for count in group_rows[:, 0]) if leaves else 0
    if rows_of_groups != num_rows:
        raise _InvalidFooterError(f"its footer claims {num_rows:,} rows, its row groups {rows_of_groups:,}; write it again")
