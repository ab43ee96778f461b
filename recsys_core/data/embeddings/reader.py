"""Vectors from parquet into one memory-mapped matrix: row groups and groups of columns side by side, batch by batch.

Shapes: N rows of a batch, D numbers of a vector, R rows of all files.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.data.embeddings.row_problems import Findings, Flaw
from recsys_core.data.embeddings.schema import VectorFiles
from recsys_core.disk import allocate_npy
from recsys_core.errors import InputError, first_line
from recsys_core.parquet.duckdb_session import quoted, scan
from recsys_core.parquet.sources import Source

PAGE_BUFFER_BYTES = 256 * 1024
COLUMNS_AT_A_TIME = 8
"""A reader holds a page, often 1 MiB, of each column and its dictionary: all columns of a wide file at once are gigabytes."""
BATCH_BYTES = 8 * 2**20
TRANSPOSED_ROWS = 1_024
"""Rows that are put together at a time from single columns, so that they stay in the processor's cache."""
UNIT_ROWS = 131_072
LONGEST_VECTOR = 65_536
Part = TypeVar("Part")


@dataclass(frozen=True)
class _Unit:
    """What one thread reads: neighbouring row groups of a file, all columns or some of them."""

    source: Source
    path: Path
    row_groups: tuple[int, ...]
    position: int
    rows: int
    columns: slice


def read_vectors(
    files: VectorFiles, *, paths: Sequence[Path], findings: Findings, out: Path, stop: threading.Event
) -> NDArray[np.float32]:
    """The vectors of all rows, float32 [R, D], as a map of `out`; what flawed rows hold there means nothing.

    Args:
        paths: a local file for each of files.sources.
        findings: takes what is wrong with vectors.
        stop: once it is set no more is read, and what comes back means nothing.

    Raises InputError for damaged files, and where the matrix does not fit the disk.
    """
    config = files.config
    dim = files.source_dim or _first_length(files, paths)
    if dim > LONGEST_VECTOR:
        raise InputError(
            f"{files.sources[0].name}: column {files.columns[0]!r}: vectors of {dim:,} numbers; at most {LONGEST_VECTOR:,}"
        )
    matrix_RD = allocate_npy(out, dtype=np.float32, shape=(files.rows, dim))
    threads = config.threads or len(os.sched_getaffinity(0))
    normalise = config.normalise and config.pca_dim is None
    rows = min(config.batch_rows, max(64, BATCH_BYTES // (4 * min(dim, COLUMNS_AT_A_TIME * 8))))
    if config.vector_column is not None:
        reader = _ListReader(files, findings, matrix_RD, min(rows, max(64, BATCH_BYTES // (4 * dim))), normalise)
        _in_threads(threads, reader.read, _units(files, paths, columns=[slice(0, 1)]), stop=stop)
        return matrix_RD
    groups = [slice(start, min(start + COLUMNS_AT_A_TIME, dim)) for start in range(0, dim, COLUMNS_AT_A_TIME)]
    wide = _WideReader(files, findings, matrix_RD, rows)
    _in_threads(threads, wide.read, _units(files, paths, columns=groups), stop=stop)

    def check(start: int) -> None:
        _check_rows(matrix_RD[start : start + rows], start, files=files, findings=findings, normalise=normalise)

    _in_threads(threads, check, range(0, files.rows, rows), stop=stop)
    return matrix_RD


def _in_threads(threads: int, work: Callable[[Part], None], parts: Iterable[Part], *, stop: threading.Event) -> None:
    """Does all `parts`; the first error ends it, and so does `stop`: what has not begun is left."""

    def do(part: Part) -> None:
        if not stop.is_set():
            work(part)

    with ThreadPoolExecutor(threads, thread_name_prefix="vectors") as pool:
        try:
            for done in [pool.submit(do, part) for part in parts]:
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def open_parquet(path: Path) -> pq.ParquetFile:
    """Streams pages: the default would hold whole column chunks, which is the whole file where it is one row group."""
    return pq.ParquetFile(path, pre_buffer=False, buffer_size=PAGE_BUFFER_BYTES, page_checksum_verification=True)


def _units(files: VectorFiles, paths: Sequence[Path], *, columns: Sequence[slice]) -> Iterator[_Unit]:
    position = 0
    for source, path in zip(files.sources, paths, strict=True):
        with pq.ParquetFile(path) as file:
            sizes = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
        start = 0
        while start < len(sizes):
            stop, rows = start, 0
            while stop < len(sizes) and rows + sizes[stop] <= max(UNIT_ROWS, sizes[start]):
                rows, stop = rows + sizes[stop], stop + 1
            for part in columns:
                yield _Unit(source, path, tuple(range(start, stop)), position, rows, part)
            start, position = stop, position + rows


def batches_of(
    source: Source, path: Path, *, columns: Sequence[str], rows: int, row_groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """The batches that have rows; InputError where the data behind an intact footer is damaged."""
    try:
        with open_parquet(path) as file:
            groups = range(file.num_row_groups) if row_groups is None else row_groups
            yield from (
                batch
                for batch in file.iter_batches(rows, row_groups=list(groups), columns=list(columns), use_threads=False)
                if batch.num_rows
            )
    except (pa.ArrowException, OSError) as error:
        for column in columns:
            _refuse_null_of_fixed_size(source, path, column)
        raise InputError(f"{source.name}: damaged: {first_line(error)}; write it again") from error


def _one_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same batches, each decoded while the one before is in use: a file of one row group else keeps one core busy."""
    with ThreadPoolExecutor(1, thread_name_prefix="decoder") as decoder:
        coming = decoder.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = decoder.submit(next, batches, None)
            yield batch


def _refuse_null_of_fixed_size(source: Source, path: Path, column: str) -> None:
    """A null among fixed-size lists is what pyarrow cannot read (it counts as a list of size 0); DuckDB finds its row."""
    if not pa.types.is_fixed_size_list(source.schema.field(column).type):
        return
    read = scan(path, options="file_row_number = true")
    query = f"SELECT min(file_row_number), count(*) FROM {read} WHERE {quoted(column)} IS NULL"
    with duckdb.connect() as connection, contextlib.suppress(duckdb.Error):
        first, count = connection.execute(query).fetchall()[0]
        if count:
            raise InputError(
                f"{source.name}: column {column!r}, row {first}: the vector is null; {count:,} such rows of "
                f"{source.record.rows:,}; mend them, or write the column as a list of no fixed size, where they can be dropped"
            )


def _first_length(files: VectorFiles, paths: Sequence[Path]) -> int:
    """Length of the first vector that has one: what all others are held against."""
    (column,) = files.columns
    for source, path in zip(files.sources, paths, strict=True):
        for batch in batches_of(source, path, columns=[column], rows=64):
            lengths = pc.list_value_length(batch.column(column))
            found = lengths.filter(pc.fill_null(pc.greater(lengths, 0), False))
            if len(found):
                return int(found[0].as_py())
    raise InputError(f"{files.sources[0].name}: column {column!r}: no row has a vector; check what writes this table")


class _ListReader:
    """Vectors of a list column: a batch without flaws goes into the map as it comes."""

    def __init__(
        self, files: VectorFiles, findings: Findings, matrix_RD: NDArray[np.float32], batch_rows: int, normalise: bool
    ) -> None:
        self._files, self._findings, self._matrix_RD = files, findings, matrix_RD
        self._batch_rows, self._normalise, self._dim = batch_rows, normalise, matrix_RD.shape[1]
        (self._column,) = files.columns

    def read(self, unit: _Unit) -> None:
        """Reads the vectors of `unit` into the matrix."""
        start = unit.position
        batches = batches_of(unit.source, unit.path, columns=[self._column], rows=self._batch_rows, row_groups=unit.row_groups)
        for batch in _one_ahead(batches):
            column = batch.column(self._column)
            lengths_N = np.from_dlpack(pc.fill_null(pc.list_value_length(column), -1)).astype(np.int64)
            good_N = lengths_N == self._dim
            if not good_N.all():
                self._tell_lengths(lengths_N, start)
                column = column.filter(pa.array(good_N))
            values = column.flatten()
            block_ND = self._dense(values, start + np.flatnonzero(good_N))
            stop = start + len(good_N)
            if good_N.all():
                # In place, and what is wrong with it is told from the map.
                self._matrix_RD[start:stop] = block_ND
            else:
                self._matrix_RD[start:stop][good_N] = block_ND
            _check_rows(
                self._matrix_RD[start:stop], start, files=self._files, findings=self._findings, normalise=self._normalise
            )
            start = stop
        _require_rows(unit, start - unit.position)

    def _tell_lengths(self, lengths_N: NDArray[np.int64], start: int) -> None:
        null_N = lengths_N < 0
        if null_N.any():
            position_N = start + np.flatnonzero(null_N)
            self._findings.add(Flaw.NULL_VECTOR, position_N, column=self._column, what=lambda _: "the vector is null")
        odd_N = (lengths_N != self._dim) & ~null_N
        if odd_N.any():

            def what(position: int) -> str:
                length = lengths_N[position - start]
                return f"the vector has {length} numbers, the first of all has {self._dim}" if length else "the vector is empty"

            self._findings.add(Flaw.WRONG_LENGTH, start + np.flatnonzero(odd_N), column=self._column, what=what)

    def _dense(self, values: pa.Array, position_N: NDArray[np.int64]) -> NDArray[np.float32]:
        if values.null_count:
            null_ND = values.is_null().to_numpy(zero_copy_only=False).reshape(-1, self._dim)

            def what(position: int) -> str:
                return f"number {np.argmax(null_ND[np.searchsorted(position_N, position)])} of the vector is null"

            self._findings.add(Flaw.NULL_ELEMENT, position_N[null_ND.any(axis=1)], column=self._column, what=what)
            values = values.fill_null(0.0)
        with np.errstate(over="ignore"):  # too large for float32: found as inf
            flat: NDArray[np.float32] = np.from_dlpack(values).astype(np.float32, copy=False)
        return flat.reshape(-1, self._dim)


class _WideReader:
    """Vectors of one column per dimension, some columns at a time, which arrow transposes block by block."""

    def __init__(self, files: VectorFiles, findings: Findings, matrix_RD: NDArray[np.float32], batch_rows: int) -> None:
        self._files, self._findings, self._matrix_RD, self._batch_rows = files, findings, matrix_RD, batch_rows

    def read(self, unit: _Unit) -> None:
        """Reads the unit's columns into the same columns of the matrix."""
        names = list(self._files.columns[unit.columns])
        start = unit.position
        batches = batches_of(unit.source, unit.path, columns=names, rows=self._batch_rows, row_groups=unit.row_groups)
        for batch in batches:
            dense = pa.record_batch([self._dense(batch.column(name), name, start) for name in names], names=names)
            target_ND = self._matrix_RD[start : start + batch.num_rows, unit.columns]
            for row in range(0, batch.num_rows, TRANSPOSED_ROWS):
                block = dense.slice(row, TRANSPOSED_ROWS)
                target_ND[row : row + TRANSPOSED_ROWS] = block.to_tensor(row_major=True).to_numpy()
            start += batch.num_rows
        _require_rows(unit, start - unit.position)

    def _dense(self, column: pa.Array, name: str, start: int) -> pa.Array:
        if column.null_count:
            position_N = start + np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
            self._findings.add(Flaw.NULL_ELEMENT, position_N, column=name, what=lambda _: "the number is null")
            column = column.fill_null(0.0)
        return column if pa.types.is_float32(column.type) else column.cast(pa.float32(), safe=False)


def _require_rows(unit: _Unit, rows: int) -> None:
    if rows != unit.rows:
        raise InputError(f"{unit.source.name}: damaged: the footer promises {unit.rows:,} rows, {rows:,} came; write it again")


def _check_rows(block_ND: NDArray[np.float32], start: int, *, files: VectorFiles, findings: Findings, normalise: bool) -> None:
    """Tells which vectors are not finite or all zero, and scales the others to length 1 if asked; in place."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        power_N = np.vecdot(block_ND, block_ND)
    # Squares overflow and vanish before the numbers themselves do: those rows are looked at one number at a time.
    doubtful_N = ~(np.isfinite(power_N) & (power_N > np.finfo(np.float32).tiny))
    length_N = np.sqrt(power_N, dtype=np.float64)
    if doubtful_N.any():
        doubtful_N &= findings.flaw_R[start : start + len(block_ND)] == 0
        row_X = np.flatnonzero(doubtful_N)
        part_XD = block_ND[row_X]
        with np.errstate(over="ignore", invalid="ignore"):
            length_N[row_X] = np.linalg.norm(part_XD.astype(np.float64), axis=1)
        _tell_odd(part_XD, start + row_X, files=files, findings=findings)
    if normalise:
        with np.errstate(all="ignore"):  # flawed rows mean nothing
            # In float64 only where a length may not fit float32.
            block_ND /= length_N[:, None] if doubtful_N.any() else length_N[:, None].astype(np.float32)


def _tell_odd(part_XD: NDArray[np.float32], position_X: NDArray[np.int64], *, files: VectorFiles, findings: Findings) -> None:
    finite_XD = np.isfinite(part_XD)
    infinite_X, zero_X = ~finite_XD.all(axis=1), ~part_XD.any(axis=1)
    if infinite_X.any():
        first = int(np.argmax(infinite_X))
        dimension = int(np.argmin(finite_XD[first]))
        column = files.columns[dimension] if len(files.columns) > 1 else files.columns[0]
        what = f"number {dimension} of the vector is {float(part_XD[first, dimension])} as float32"
        findings.add(Flaw.NOT_FINITE, position_X[infinite_X], column=column, what=lambda _: what)
    if zero_X.any():
        findings.add(
            Flaw.ALL_ZERO,
            position_X[zero_X],
            column=files.columns[0],
            what=lambda _: "all numbers of the vector are 0, so it has no direction and no cosine",
        )
