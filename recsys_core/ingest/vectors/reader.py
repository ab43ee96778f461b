"""Parallel reader of vectors from parquet files into one memory-mapped matrix.

Each thread reads a few row groups or columns at a time.

There are two layouts: a list column, and one column per dimension. The content of the matrix in a faulty row is undefined.

Shapes: R rows of an entry (see row_faults.py), N rows of a batch, X selected rows of a batch, D width of a vector.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.dataset.layout import allocate_npy
from recsys_core.errors import InputError
from recsys_core.ingest.vectors.row_faults import Fault, FaultCodes, mark_faults
from recsys_core.ingest.vectors.vector_schema import VectorFiles
from recsys_core.parquet.local_copies import decode_ahead, read_batches
from recsys_core.parquet.sources import Source

COLUMNS_AT_A_TIME = 8
"""Number of columns that a thread reads at a time. A parquet reader holds a page (often 1 MiB) and the dictionary of each
column in memory, which would take gigabytes for thousands of columns.
"""
BATCH_BYTES = 8 * 2**20
MIN_BATCH_ROWS = 64
ROWS_AT_A_TIME = 131_072
TRANSPOSED_ROWS = 1_024
"""Number of rows that are transposed at a time. A block with this number of rows fits into the cache of the processor."""
MAX_DIM = 65_536
WorkItem = TypeVar("WorkItem")


def read_vectors(entry: VectorFiles, *, paths: Sequence[Path], matrix_path: Path, fault_code_R: FaultCodes) -> int:
    """Write the vectors of all rows to `matrix_path`, float32 [R, D]. Mark the faulty rows, and return D.

    Args:
        paths: a local file for each of entry.sources.

    Raises:
        InputError: a file is damaged, or the matrix does not fit on the disk.
    """
    config = entry.config
    dim = entry.source_dim or _first_vector_dim(entry, paths)
    if dim > MAX_DIM:
        raise InputError(
            f"{entry.sources[0].name}: column {entry.columns[0]!r}: vectors of {dim:,} numbers; at most {MAX_DIM:,} are "
            "supported"
        )
    matrix_RD = allocate_npy(matrix_path, dtype=np.float32, shape=(entry.num_rows, dim))
    num_threads = config.threads or len(os.sched_getaffinity(0))
    normalise = config.normalise and config.pca_dim is None  # projected vectors are normalised after the projection
    batch_rows = min(config.batch_rows, max(MIN_BATCH_ROWS, BATCH_BYTES // (4 * min(dim, COLUMNS_AT_A_TIME * 8))))
    if config.vector_column is not None:
        list_batch_rows = min(batch_rows, max(MIN_BATCH_ROWS, BATCH_BYTES // (4 * dim)))

        def read_slice(file_slice: _FileSlice) -> None:
            _read_lists(file_slice, matrix_RD, fault_code_R, batch_rows=list_batch_rows, normalise=normalise)

        _run_in_threads(num_threads, read_slice, _file_slices(entry, paths, num_columns_at_a_time=1))
        return dim

    def read_columns(file_slice: _FileSlice) -> None:
        _read_columns(file_slice, matrix_RD, fault_code_R, batch_rows=batch_rows)

    def check_batch(batch_start: int) -> None:
        batch_slice = slice(batch_start, batch_start + batch_rows)
        fault_code_N = fault_code_R[batch_slice]
        check_and_normalise(matrix_RD[batch_slice], fault_code_N, is_faulty_N=fault_code_N != 0, normalise=normalise)

    _run_in_threads(num_threads, read_columns, _file_slices(entry, paths, num_columns_at_a_time=COLUMNS_AT_A_TIME))
    _run_in_threads(num_threads, check_batch, range(0, entry.num_rows, batch_rows))
    return dim


@dataclass(frozen=True)
class _FileSlice:
    """The part of a file that one thread reads: adjacent row groups, with all or some of the vector columns."""

    source: Source
    path: Path
    row_groups: tuple[int, ...]
    first_row: int
    """Index of the first row of the slice in the entry."""
    first_column: int
    """Index of the first of `columns` among the vector columns of the entry."""
    columns: tuple[str, ...]

    def batches(self, *, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the batches of the slice."""
        return read_batches(self.source, self.path, columns=self.columns, batch_rows=batch_rows, row_groups=self.row_groups)


def _file_slices(entry: VectorFiles, paths: Sequence[Path], *, num_columns_at_a_time: int) -> Iterator[_FileSlice]:
    """Yield the slices of all files. A slice with more than ROWS_AT_A_TIME rows has a single row group."""
    first_row = 0
    for source, path in zip(entry.sources, paths, strict=True):
        with pq.ParquetFile(path) as file:
            num_rows_by_group = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
        start_group = 0
        while start_group < len(num_rows_by_group):
            stop_group, num_rows = start_group, 0
            while stop_group < len(num_rows_by_group) and num_rows + num_rows_by_group[stop_group] <= max(
                ROWS_AT_A_TIME, num_rows_by_group[start_group]
            ):
                num_rows, stop_group = num_rows + num_rows_by_group[stop_group], stop_group + 1
            for first_column in range(0, len(entry.columns), num_columns_at_a_time):
                columns = entry.columns[first_column : first_column + num_columns_at_a_time]
                yield _FileSlice(source, path, tuple(range(start_group, stop_group)), first_row, first_column, columns)
            start_group, first_row = stop_group, first_row + num_rows


def _run_in_threads(num_threads: int, process_item: Callable[[WorkItem], None], work_items: Iterable[WorkItem]) -> None:
    """Call `process_item` for each work item. After the first error, no further item is started."""
    with ThreadPoolExecutor(num_threads, thread_name_prefix="vectors") as pool:
        for _ in pool.map(process_item, work_items):
            pass


def _read_lists(
    file_slice: _FileSlice, matrix_RD: NDArray[np.float32], fault_code_R: FaultCodes, *, batch_rows: int, normalise: bool
) -> None:
    """Write the lists of a slice into the matrix, and mark its faulty rows."""
    dim, batch_start = matrix_RD.shape[1], file_slice.first_row
    for batch in decode_ahead(file_slice.batches(batch_rows=batch_rows)):
        batch_slice = slice(batch_start, batch_start + batch.num_rows)
        batch_start += batch.num_rows
        block_ND, fault_code_N = matrix_RD[batch_slice], fault_code_R[batch_slice]
        list_array = batch.column(0)
        length_N = np.from_dlpack(pc.fill_null(pc.list_value_length(list_array), -1)).astype(np.int64)
        is_faulty_N = length_N != dim
        has_right_length_N = ~is_faulty_N
        all_have_right_length = bool(has_right_length_N.all())
        if not all_have_right_length:
            mark_faults(fault_code_N, length_N < 0, Fault.NULL_VECTOR)
            mark_faults(fault_code_N, is_faulty_N & (length_N >= 0), Fault.WRONG_LENGTH)
            list_array = list_array.filter(pa.array(has_right_length_N))
        flat_values = list_array.flatten()
        if flat_values.null_count:
            is_null_XD = flat_values.is_null().to_numpy(zero_copy_only=False).reshape(-1, dim)
            is_faulty_N[has_right_length_N] = is_null_XD.any(axis=1)
            mark_faults(fault_code_N, is_faulty_N & has_right_length_N, Fault.NULL_ELEMENT)
            flat_values = flat_values.fill_null(0.0)
        with np.errstate(over="ignore"):  # a number too large for float32 becomes inf, which check_and_normalise finds
            vector_XD = np.from_dlpack(flat_values).astype(np.float32, copy=False).reshape(-1, dim)
        if all_have_right_length:
            block_ND[:] = vector_XD
        else:
            block_ND[has_right_length_N] = vector_XD
        check_and_normalise(block_ND, fault_code_N, is_faulty_N=is_faulty_N, normalise=normalise)


def _read_columns(file_slice: _FileSlice, matrix_RD: NDArray[np.float32], fault_code_R: FaultCodes, *, batch_rows: int) -> None:
    """Write the columns of a slice into the matrix, and mark the rows with a null, which becomes 0 in the matrix.

    Arrow transposes TRANSPOSED_ROWS rows at a time.
    """
    batch_start, first_column = file_slice.first_row, file_slice.first_column
    for batch in file_slice.batches(batch_rows=batch_rows):
        arrays = []
        for column in file_slice.columns:
            array = batch.column(column)
            if array.null_count:
                is_null_N = array.is_null().to_numpy(zero_copy_only=False)
                mark_faults(fault_code_R[batch_start : batch_start + batch.num_rows], is_null_N, Fault.NULL_ELEMENT)
                array = array.fill_null(0.0)
            arrays.append(array if pa.types.is_float32(array.type) else array.cast(pa.float32(), safe=False))
        float32_batch = pa.record_batch(arrays, names=list(file_slice.columns))
        block_ND = matrix_RD[batch_start : batch_start + batch.num_rows, first_column : first_column + len(arrays)]
        for chunk_start in range(0, batch.num_rows, TRANSPOSED_ROWS):
            transposed_batch = float32_batch.slice(chunk_start, TRANSPOSED_ROWS).to_tensor(row_major=True)
            block_ND[chunk_start : chunk_start + TRANSPOSED_ROWS] = transposed_batch.to_numpy()
        batch_start += batch.num_rows


def check_and_normalise(
    block_ND: NDArray[np.float32], fault_code_N: FaultCodes, *, is_faulty_N: NDArray[np.bool_], normalise: bool
) -> None:
    """Mark the rows whose vector has only zeros or a number that is not finite.

    With `normalise`, also scale all vectors in place to the norm 1.

    Args:
        is_faulty_N: whether a row's vector already has a fault, so that it is not checked again.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        squared_norm_N = np.vecdot(block_ND, block_ND)
    # The squared norm is a fast first check. It also overflows or underflows for some valid vectors, so a second check looks at
    # each number of a suspect vector.
    is_suspect_N = ~(np.isfinite(squared_norm_N) & (squared_norm_N > np.finfo(np.float32).tiny)) & ~is_faulty_N
    norm_N = np.sqrt(squared_norm_N, dtype=np.float64)
    has_suspects = bool(is_suspect_N.any())
    if has_suspects:
        suspect_index_X = np.flatnonzero(is_suspect_N)
        suspect_XD = block_ND[suspect_index_X]
        with np.errstate(over="ignore", invalid="ignore"):
            norm_N[suspect_index_X] = np.linalg.norm(suspect_XD.astype(np.float64), axis=1)
        suspect_code_X = fault_code_N[suspect_index_X]
        mark_faults(suspect_code_X, np.any(~np.isfinite(suspect_XD), axis=1), Fault.NOT_FINITE)
        mark_faults(suspect_code_X, np.all(suspect_XD == 0, axis=1), Fault.ALL_ZERO)
        fault_code_N[suspect_index_X] = suspect_code_X
    if normalise:
        with np.errstate(all="ignore"):  # a faulty row may have norm 0
            # A norm outside the range of float32 needs float64, which is slower.
            block_ND /= norm_N[:, None] if has_suspects else norm_N[:, None].astype(np.float32)


def _first_vector_dim(entry: VectorFiles, paths: Sequence[Path]) -> int:
    """Return the width of the first vector that is neither null nor empty. All other vectors must have the same width."""
    (column,) = entry.columns
    for source, path in zip(entry.sources, paths, strict=True):
        for batch in read_batches(source, path, columns=[column], batch_rows=64):
            lengths = pc.list_value_length(batch.column(column))
            positive_lengths = lengths.filter(pc.fill_null(pc.greater(lengths, 0), False))
            if len(positive_lengths):
                return int(positive_lengths[0].as_py())
    raise InputError(f"{entry.sources[0].name}: column {column!r}: no row has a vector; check the job that writes this table")
