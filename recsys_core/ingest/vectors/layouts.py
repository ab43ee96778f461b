"""Readers of the two layouts of vectors: a list column, or one column per dimension.

A reader writes vectors into the matrix and returns the faulty rows. The content of the matrix in a faulty row is undefined.
An entry is one item of the config list `embeddings`. Its rows are numbered from 0, continuously over all its files.

Shapes: N rows of a batch, X rows of a batch that are faulty or have to be checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys_core.ingest.vectors.batches import decode_ahead, read_batches
from recsys_core.ingest.vectors.row_faults import Fault, FaultyRows
from recsys_core.parquet.sources import Source

TRANSPOSED_ROWS = 1_024
"""Number of rows that are transposed at a time. They fit into the cache of the processor."""


@dataclass(frozen=True)
class ReadTask:
    """The part of a file that one thread reads: adjacent row groups, with all columns or with some of them."""

    source: Source
    path: Path
    row_groups: tuple[int, ...]
    first_row: int
    """Row number of the first row of the task."""
    column_slice: slice


@dataclass(frozen=True)
class ListReader:
    """Reads vectors from a list column."""

    column: str
    matrix_RD: NDArray[np.float32]
    batch_rows: int
    normalise: bool

    def read(self, task: ReadTask) -> list[FaultyRows]:
        """Write the vectors of `task` into the matrix; return its faulty rows."""
        faulty_rows: list[FaultyRows] = []
        dim, first_row = self.matrix_RD.shape[1], task.first_row
        batches = read_batches(
            task.source, task.path, columns=[self.column], batch_rows=self.batch_rows, row_groups=task.row_groups
        )
        for batch in decode_ahead(batches):
            list_array = batch.column(self.column)
            length_N = np.from_dlpack(pc.fill_null(pc.list_value_length(list_array), -1)).astype(np.int64)
            has_right_length_N = length_N == dim
            if not has_right_length_N.all():
                faulty_rows += self._find_wrong_lengths(length_N, first_row)
                list_array = list_array.filter(pa.array(has_right_length_N))
            flat_values = list_array.flatten()
            is_faulty_N = ~has_right_length_N
            if flat_values.null_count:
                null_rows = self._find_null_elements(flat_values, first_row + np.flatnonzero(has_right_length_N))
                faulty_rows.append(null_rows)
                is_faulty_N[null_rows.row_X - first_row] = True
                flat_values = flat_values.fill_null(0.0)
            with np.errstate(over="ignore"):  # a number too large for float32 becomes inf, which check_and_normalise finds
                block_ND = np.from_dlpack(flat_values).astype(np.float32, copy=False).reshape(-1, dim)
            matrix_block_ND = self.matrix_RD[first_row : first_row + len(length_N)]
            if has_right_length_N.all():
                matrix_block_ND[:] = block_ND
            else:
                matrix_block_ND[has_right_length_N] = block_ND
            faulty_rows += check_and_normalise(
                matrix_block_ND, first_row, is_faulty_N, columns=[self.column], normalise=self.normalise
            )
            first_row += len(length_N)
        return faulty_rows

    def _find_wrong_lengths(self, length_N: NDArray[np.int64], first_row: int) -> list[FaultyRows]:
        faulty_rows = []
        null_index_X = np.flatnonzero(length_N < 0)
        if len(null_index_X):
            faulty_rows.append(FaultyRows(Fault.NULL_VECTOR, first_row + null_index_X, self.column, "the vector is null"))
        wrong_index_X = np.flatnonzero((length_N != self.matrix_RD.shape[1]) & (length_N >= 0))
        if len(wrong_index_X):
            length = length_N[wrong_index_X[0]]
            problem = f"the vector has {length} numbers, but the first vector has {self.matrix_RD.shape[1]}"
            if length == 0:
                problem = "the vector is empty"
            faulty_rows.append(FaultyRows(Fault.WRONG_LENGTH, first_row + wrong_index_X, self.column, problem))
        return faulty_rows

    def _find_null_elements(self, flat_values: pa.Array, row_N: NDArray[np.int64]) -> FaultyRows:
        is_null_ND = flat_values.is_null().to_numpy(zero_copy_only=False).reshape(len(row_N), -1)
        has_null_N = is_null_ND.any(axis=1)
        problem = f"number {np.argmax(is_null_ND[np.argmax(has_null_N)])} of the vector is null"
        return FaultyRows(Fault.NULL_ELEMENT, row_N[has_null_N], self.column, problem)


@dataclass(frozen=True)
class ColumnsReader:
    """Reads vectors from one column per dimension. Arrow transposes TRANSPOSED_ROWS rows at a time."""

    columns: Sequence[str]
    matrix_RD: NDArray[np.float32]
    batch_rows: int

    def read(self, task: ReadTask) -> list[FaultyRows]:
        """Write the columns of `task` into the matrix; return the rows with a null. A null becomes 0."""
        faulty_rows: list[FaultyRows] = []
        column_names, first_row = list(self.columns[task.column_slice]), task.first_row
        batches = read_batches(
            task.source, task.path, columns=column_names, batch_rows=self.batch_rows, row_groups=task.row_groups
        )
        for batch in batches:
            arrays = []
            for column in column_names:
                array = batch.column(column)
                if array.null_count:
                    row_X = first_row + np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
                    faulty_rows.append(FaultyRows(Fault.NULL_ELEMENT, row_X, column, "the number is null"))
                    array = array.fill_null(0.0)
                arrays.append(array if pa.types.is_float32(array.type) else array.cast(pa.float32(), safe=False))
            float32_batch = pa.record_batch(arrays, names=column_names)
            matrix_block_ND = self.matrix_RD[first_row : first_row + batch.num_rows, task.column_slice]
            for block_start in range(0, batch.num_rows, TRANSPOSED_ROWS):
                block = float32_batch.slice(block_start, TRANSPOSED_ROWS)
                matrix_block_ND[block_start : block_start + TRANSPOSED_ROWS] = block.to_tensor(row_major=True).to_numpy()
            first_row += batch.num_rows
        return faulty_rows


def check_and_normalise(
    block_ND: NDArray[np.float32], first_row: int, is_faulty_N: NDArray[np.bool_], *, columns: Sequence[str], normalise: bool
) -> list[FaultyRows]:
    """Return the rows whose vector is all zero or has a number that is not finite.

    With `normalise`, also scale all vectors in place to length 1.

    Args:
        first_row: number of the block's first row.
        is_faulty_N: rows that already have a fault, which are not checked again.
        columns: the list column, or the column of each dimension.
    """
    faulty_rows: list[FaultyRows] = []
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        squared_norm_N = np.vecdot(block_ND, block_ND)
    # The squared norm is a fast first check. It overflows or underflows for some valid vectors too, so a second check looks at
    # each number of a suspect vector.
    is_suspect_N = ~(np.isfinite(squared_norm_N) & (squared_norm_N > np.finfo(np.float32).tiny))
    norm_N = np.sqrt(squared_norm_N, dtype=np.float64)
    if is_suspect_N.any():
        is_suspect_N &= ~is_faulty_N
        suspect_index_X = np.flatnonzero(is_suspect_N)
        suspect_XD = block_ND[suspect_index_X]
        with np.errstate(over="ignore", invalid="ignore"):
            norm_N[suspect_index_X] = np.linalg.norm(suspect_XD.astype(np.float64), axis=1)
        faulty_rows = _find_not_finite_or_zero(suspect_XD, first_row + suspect_index_X, columns=columns)
    if normalise:
        with np.errstate(all="ignore"):  # a faulty row may have norm 0
            # A norm outside the range of float32 needs float64, which is slower.
            block_ND /= norm_N[:, None] if is_suspect_N.any() else norm_N[:, None].astype(np.float32)
    return faulty_rows


def _find_not_finite_or_zero(
    vector_XD: NDArray[np.float32], row_X: NDArray[np.int64], *, columns: Sequence[str]
) -> list[FaultyRows]:
    faulty_rows = []
    is_finite_XD = np.isfinite(vector_XD)
    has_non_finite_X, is_zero_X = ~is_finite_XD.all(axis=1), ~vector_XD.any(axis=1)
    if has_non_finite_X.any():
        first_index = int(np.argmax(has_non_finite_X))
        dimension = int(np.argmin(is_finite_XD[first_index]))
        column = columns[dimension] if len(columns) > 1 else columns[0]
        problem = f"number {dimension} of the vector is {float(vector_XD[first_index, dimension])} as float32"
        faulty_rows.append(FaultyRows(Fault.NOT_FINITE, row_X[has_non_finite_X], column, problem))
    if is_zero_X.any():
        problem = "all numbers of the vector are 0, so it has no direction and no cosine"
        faulty_rows.append(FaultyRows(Fault.ALL_ZERO, row_X[is_zero_X], columns[0], problem))
    return faulty_rows
