"""Parquet footers, checked for consistency before any data is read.

Each footer is parsed twice. pyarrow provides the schema and reads the data later. DuckDB provides counts and offsets.
nightjar must not read counts and offsets with pyarrow: FileMetaData.row_group(i).column(j) aborts the process if a level
histogram contradicts the schema, because a C++ exception is not caught (seen with 25.0.1, cf. apache/arrow#45283).
"""

import hashlib
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.errors import InputError, first_line, shown
from recsys_core.parquet.locations import Location, retrying

logger = logging.getLogger(__name__)
_LOG_INTERVAL_S = 5.0
_MAGIC = b"PAR1"
_TAIL_BYTES = 64 * 1024
"""Number of bytes at the end of a file that are read at once. Most footers are shorter."""
_MIN_FILE_BYTES = 12
"""Two magic numbers and the length of the footer."""
_CHUNK_COLUMNS_SQL = (
    "row_group_id, row_group_num_rows, row_group_bytes, column_id, num_values, total_compressed_size, total_uncompressed_size, "
    "data_page_offset, coalesce(dictionary_page_offset, 0) AS dictionary_page_offset"
)


@dataclass(frozen=True)
class Leaf:
    """A leaf column of the parquet schema; a nested column has several leaves."""

    column_path: str
    physical_type: str
    value_bytes: int | None
    """Bytes of a value of a type with a fixed length; None for other types."""
    is_repeated: bool


@dataclass(frozen=True, eq=False)
class Footer:
    """A checked footer, and the sha256 of its bytes. Two-dimensional arrays have the shape [row groups, leaves]."""

    metadata: pq.FileMetaData
    schema: pa.Schema
    sha256: str
    leaves: tuple[Leaf, ...]
    num_group_rows: NDArray[np.int64]
    """Number of rows in each row group."""
    num_values: NDArray[np.int64]
    """Number of values of each leaf in each row group, nulls included."""
    compressed_bytes: NDArray[np.int64]
    """Size of the compressed pages of each column chunk."""
    uncompressed_bytes: NDArray[np.int64]
    """Size of the decompressed pages of each column chunk, before the values are decoded."""
    first_page_offset: NDArray[np.int64]
    """Offset of the first page of each column chunk in the file."""

    def leaf_indices_of(self, columns: Sequence[str]) -> list[int]:
        """Return the indices of the leaves of `columns`: one leaf for a plain column, several leaves for a nested column."""
        column_names = set(columns)
        return [index for index, leaf in enumerate(self.leaves) if _is_leaf_of(leaf.column_path, column_names)]


def read_footers(locations: Sequence[Location]) -> list[Footer]:
    """Read and check the footers, with at most three reads of each file and none of its data.

    Raises:
        InputError: a file is not parquet, is truncated or encrypted, or its footer contradicts itself or the size of the file.
    """
    raw_footers = []
    for location in _with_progress_log(locations, "read"):
        with _explain_errors(location):
            raw_footers.append(retrying(lambda location=location: _read_footer_bytes(location)))  # type: ignore[misc]
    footers = []
    with tempfile.TemporaryDirectory(prefix="nightjar-footers-") as folder, _footer_database().cursor() as connection:
        for index, (location, raw_footer) in enumerate(zip(_with_progress_log(locations, "checked"), raw_footers, strict=True)):
            # The footer between two magic numbers is a valid parquet file without data. DuckDB and pyarrow parse this file, so
            # they parse the same bytes that are hashed.
            footer_file_content = _MAGIC + raw_footer + len(raw_footer).to_bytes(4, "little") + _MAGIC
            footer_path = Path(folder) / f"{index}.parquet"
            footer_path.write_bytes(footer_file_content)
            sha256, data_end = hashlib.sha256(raw_footer).hexdigest(), location.num_bytes - len(raw_footer) - 8
            with _explain_errors(location):
                footers.append(_parse_footer(footer_file_content, footer_path, sha256, connection, data_end=data_end))
            footer_path.unlink()
    return footers


@cache
def _footer_database() -> duckdb.DuckDBPyConnection:
    """Return an in-memory database that all calls in a process share, because opening one takes about 12 ms."""
    return duckdb.connect(config={"threads": 1})


def _with_progress_log(locations: Sequence[Location], verb: str) -> Iterator[Location]:
    """Yield the locations. Log the progress every few seconds, because tens of thousands of files take minutes.

    verb: what the caller does with a location, for the log line, such as "read".
    """
    next_log_s = time.monotonic() + _LOG_INTERVAL_S
    for index, location in enumerate(locations):
        if time.monotonic() >= next_log_s:
            logger.info("%s the footers of %s of %s parquet files", verb, f"{index:,}", f"{len(locations):,}")
            next_log_s = time.monotonic() + _LOG_INTERVAL_S
        yield location


class _InvalidFooterError(Exception):
    """A footer that cannot be read, or that contradicts itself."""


@contextmanager
def _explain_errors(location: Location) -> Iterator[None]:
    """Replace an error about a footer by an InputError that names the file."""
    try:
        yield
    except (_InvalidFooterError, pa.ArrowException, OSError, UnicodeError, MemoryError) as error:
        reason = first_line(error)
        raise InputError(f"{location.name}: not a readable parquet file ({location.num_bytes:,} bytes): {reason}") from error


def _is_leaf_of(column_path: str, columns: set[str]) -> bool:
    """Return whether a leaf is part of one of `columns`. A dot separates levels, but a column name may also contain dots."""
    return column_path in columns or any(
        column_path[:index] in columns for index, char in enumerate(column_path) if char == "."
    )


def _read_footer_bytes(location: Location) -> bytes:
    with location.filesystem.open_input_file(location.path) as file:
        num_file_bytes = file.size()
        if num_file_bytes != location.num_bytes:
            raise _InvalidFooterError(f"it now has {num_file_bytes:,} bytes; it is still being written")
        if num_file_bytes == 0:
            raise _InvalidFooterError("it is empty; write it again")
        tail_bytes = file.read_at(min(num_file_bytes, _TAIL_BYTES), max(0, num_file_bytes - _TAIL_BYTES))
        if tail_bytes[-4:] == b"PARE":
            raise _InvalidFooterError("its footer is encrypted; write it without encryption")
        if num_file_bytes < _MIN_FILE_BYTES or tail_bytes[-4:] != _MAGIC:
            starts_as_parquet = num_file_bytes >= 4 and file.read_at(4, 0) == _MAGIC
            raise _InvalidFooterError(
                "it begins as parquet, but its end is missing, so it is truncated; copy or write it again"
                if starts_as_parquet
                else "it has no parquet footer; list only parquet files"
            )
        num_footer_bytes = int.from_bytes(tail_bytes[-8:-4], "little")
        if num_footer_bytes > num_file_bytes - _MIN_FILE_BYTES:
            raise _InvalidFooterError(
                f"its footer claims {num_footer_bytes:,} bytes, more than fit into the file: truncated or damaged; "
                "copy or write it again"
            )
        if num_footer_bytes + 8 > len(tail_bytes):
            tail_bytes = file.read_at(num_footer_bytes + 8, num_file_bytes - 8 - num_footer_bytes)
        return bytes(tail_bytes[-8 - num_footer_bytes : -8])


def _parse_footer(
    footer_file_content: bytes, footer_path: Path, sha256: str, connection: duckdb.DuckDBPyConnection, *, data_end: int
) -> Footer:
    """Parse and check a footer, which is given as a parquet file without data.

    Args:
        footer_file_content: content of the parquet file without data.
        footer_path: path of the same file.
        data_end: offset in the input file at which the data ends and the footer starts.
    """
    query_sql = f"SELECT {_CHUNK_COLUMNS_SQL} FROM parquet_metadata(?) ORDER BY row_group_id, column_id"
    try:
        values_by_field: dict[str, Any] = connection.execute(query_sql, [str(footer_path)]).fetchnumpy()
    except duckdb.ConversionException as error:  # DuckDB cannot represent a timestamp in the statistics
        raise _InvalidFooterError(_explain_timestamp(footer_file_content)) from error
    except duckdb.Error as error:
        _footer_database.cache_clear()  # after an internal error, DuckDB rejects all queries of this database
        # The message contains the path of the temporary file.
        reason = str(error).splitlines()[0].rpartition(f'"{footer_path}": ')[2]
        raise _InvalidFooterError(f"{reason}; copy or write it again") from error
    with pq.ParquetFile(pa.BufferReader(footer_file_content)) as file:
        metadata, schema = file.metadata, file.schema_arrow
        leaves = tuple(_leaf(file.schema.column(index)) for index in range(len(file.schema)))
    shape = (metadata.num_row_groups, len(leaves))
    num_chunks = len(values_by_field["column_id"])
    if num_chunks != shape[0] * shape[1]:
        raise _InvalidFooterError(
            f"its footer lists {num_chunks} column chunks, but {shape[0]} row groups of {shape[1]} columns have "
            f"{shape[0] * shape[1]}; write it again"
        )
    if any(np.ma.getmaskarray(field_values).any() for field_values in values_by_field.values()):
        raise _InvalidFooterError("its footer leaves out counts or offsets; write it again")
    matrix_by_field = {
        field_name: np.asarray(field_values, np.int64).reshape(shape) for field_name, field_values in values_by_field.items()
    }
    data_start, dictionary_start = matrix_by_field["data_page_offset"], matrix_by_field.pop("dictionary_page_offset")
    # Some writers store the dictionary offset 0 for a chunk without a dictionary.
    matrix_by_field["start"] = np.where(dictionary_start != 0, np.minimum(data_start, dictionary_start), data_start)
    _check_counts_and_offsets(matrix_by_field, metadata.num_rows, leaves, data_end=data_end)
    return Footer(
        metadata,
        schema,
        sha256,
        leaves,
        num_group_rows=matrix_by_field["row_group_num_rows"][:, 0] if leaves else np.zeros(shape[0], np.int64),
        num_values=matrix_by_field["num_values"],
        compressed_bytes=matrix_by_field["total_compressed_size"],
        uncompressed_bytes=matrix_by_field["total_uncompressed_size"],
        first_page_offset=matrix_by_field["start"],
    )


def _leaf(column: pq.ColumnSchema) -> Leaf:
    value_bytes = column.length if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else None
    return Leaf(column.path, column.physical_type, value_bytes, column.max_repetition_level > 0)


def _explain_timestamp(footer_file_content: bytes) -> str:
    """Return the message about a timestamp that is too large for DuckDB, with the columns that may contain it."""
    with pq.ParquetFile(pa.BufferReader(footer_file_content)) as file:
        timestamp_columns = [field.name for field in file.schema_arrow if pa.types.is_timestamp(field.type)]
    shown_columns = " or ".join(shown(name) for name in timestamp_columns[:5])
    subject = f"the times of column {shown_columns}" if timestamp_columns else "the times of a column"
    return f"{subject} reach beyond the year 290,000, which cannot be valid; fix the job that writes them"


def _check_counts_and_offsets(
    matrix_by_field: dict[str, NDArray[np.int64]], num_rows: int, leaves: Sequence[Leaf], *, data_end: int
) -> None:
    """Raise _InvalidFooterError unless all counts agree and all offsets are inside the file.

    matrix_by_field: value of each field of the footer in each column chunk, [row groups, leaves].
    """
    num_group_rows, num_values = matrix_by_field["row_group_num_rows"], matrix_by_field["num_values"]
    compressed_bytes, first_page_offset = matrix_by_field["total_compressed_size"], matrix_by_field["start"]

    def reject(is_invalid: NDArray[np.bool_], claim_template: str) -> None:
        if is_invalid.any():
            group_index, leaf_index = (int(index) for index in np.argwhere(is_invalid)[0])
            value_by_field = {
                field_name: int(matrix[group_index, leaf_index]) for field_name, matrix in matrix_by_field.items()
            }
            value_by_field["end"] = value_by_field["start"] + value_by_field["total_compressed_size"]
            subject = f"row group {group_index}, column {shown(leaves[leaf_index].column_path)} claims "
            raise _InvalidFooterError(subject + claim_template.format(**value_by_field, data_end=data_end))

    if num_rows < 0:
        raise _InvalidFooterError(f"its footer claims {num_rows:,} rows; write it again")
    reject(num_group_rows < 0, "{row_group_num_rows:,} rows; write it again")
    is_negative = (
        (num_values < 0) | (compressed_bytes < 0) | (matrix_by_field["total_uncompressed_size"] < 0) | (first_page_offset < 0)
    )
    reject(
        is_negative | (matrix_by_field["row_group_bytes"] < 0),
        "{num_values:,} values in {total_compressed_size:,} bytes ({total_uncompressed_size:,} decompressed, "
        "{row_group_bytes:,} in the row group) at {start:,}; a count, size or offset is negative; write it again",
    )
    is_flat = np.array([not leaf.is_repeated for leaf in leaves], np.bool_)
    contradicts_rows = (num_values < num_group_rows) | (is_flat & (num_values != num_group_rows))
    reject(contradicts_rows, "{num_values:,} values for {row_group_num_rows:,} rows; write it again")
    # The sum first_page_offset + compressed_bytes is not computed, because it may overflow if both values are corrupt.
    bytes_until_end = data_end - np.minimum(first_page_offset, data_end)
    is_outside = (first_page_offset < 4) | (first_page_offset > data_end) | (compressed_bytes > bytes_until_end)
    reject(
        (num_values > 0) & is_outside,
        "bytes {start:,} to {end:,}, but the data ends at {data_end:,}: truncated or damaged; copy or write it again",
    )
    # Python integers do not overflow, unlike a numpy sum of corrupt counts.
    total_group_rows = sum(int(num_rows_of_group) for num_rows_of_group in num_group_rows[:, 0]) if leaves else 0
    if total_group_rows != num_rows:
        raise _InvalidFooterError(
            f"its footer claims {num_rows:,} rows, but its row groups have {total_group_rows:,}; write it again"
        )
