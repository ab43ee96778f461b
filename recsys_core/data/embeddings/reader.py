"""Parallel reader of vectors: parquet files into one memory-mapped matrix, by row groups and groups of columns."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys_core.data.embeddings.batches import read_batches
from recsys_core.data.embeddings.layouts import ColumnsReader, ListReader, Unit, check_vectors
from recsys_core.data.embeddings.row_faults import FaultyRows, RowFaults
from recsys_core.data.embeddings.schema import VectorFiles
from recsys_core.disk import allocate_npy
from recsys_core.errors import InputError

COLUMNS_AT_A_TIME = 8
"""A parquet reader holds a page of each column, often 1 MiB, and its dictionary; for a wide file that would be gigabytes."""
BATCH_BYTES = 8 * 2**20
MIN_BATCH_ROWS = 64
UNIT_ROWS = 131_072
LONGEST_VECTOR = 65_536
Part = TypeVar("Part")


def read_vectors(files: VectorFiles, *, paths: Sequence[Path], out: Path, stop: threading.Event) -> RowFaults:
    """Write the vectors of all rows to `out`, a float32 matrix [rows, dim]; return the faulty rows.

    Args:
        paths: a local file for each of files.sources.
        stop: once it is set, reading ends early, and the result is incomplete.

    Raises:
        InputError: a file is damaged, or the matrix does not fit on the disk.
    """
    config = files.config
    dim = files.source_dim or _first_length(files, paths)
    if dim > LONGEST_VECTOR:
        raise InputError(
            f"{files.sources[0].name}: column {files.columns[0]!r}: vectors of {dim:,} numbers; at most {LONGEST_VECTOR:,} are "
            "supported"
        )
    matrix_RD = allocate_npy(out, dtype=np.float32, shape=(files.rows, dim))
    threads = config.threads or len(os.sched_getaffinity(0))
    normalise = config.normalise and config.pca_dim is None  # after a projection it is done there
    batch_rows = min(config.batch_rows, max(MIN_BATCH_ROWS, BATCH_BYTES // (4 * min(dim, COLUMNS_AT_A_TIME * 8))))
    if config.vector_column is not None:
        list_batch_rows = min(batch_rows, max(MIN_BATCH_ROWS, BATCH_BYTES // (4 * dim)))
        list_reader = ListReader(config.vector_column, matrix_RD, list_batch_rows, normalise)
        units = _units(files, paths, column_groups=[slice(0, 1)])
        return RowFaults.collect(files.rows, _in_threads(threads, list_reader.read, units, stop=stop))

    column_groups = [slice(start, min(start + COLUMNS_AT_A_TIME, dim)) for start in range(0, dim, COLUMNS_AT_A_TIME)]
    columns_reader = ColumnsReader(files.columns, matrix_RD, batch_rows)
    units = _units(files, paths, column_groups=column_groups)
    null_faults = RowFaults.collect(files.rows, _in_threads(threads, columns_reader.read, units, stop=stop))

    def check(start: int) -> list[FaultyRows]:
        rows = slice(start, start + batch_rows)
        has_null_N = null_faults.code_R[rows] != 0
        return check_vectors(matrix_RD[rows], start, has_null_N, columns=files.columns, normalise=normalise)

    starts = range(0, files.rows, batch_rows)
    return null_faults.over(RowFaults.collect(files.rows, _in_threads(threads, check, starts, stop=stop)))


def _in_threads(
    threads: int, read: Callable[[Part], list[FaultyRows]], parts: Iterable[Part], *, stop: threading.Event
) -> Iterator[list[FaultyRows]]:
    """Yield the faulty rows of each part. The first error, or `stop`, skips all parts that have not started."""

    def read_unless_stopped(part: Part) -> list[FaultyRows]:
        return [] if stop.is_set() else read(part)

    with ThreadPoolExecutor(threads, thread_name_prefix="vectors") as pool:
        yield from pool.map(read_unless_stopped, parts)


def _units(files: VectorFiles, paths: Sequence[Path], *, column_groups: Sequence[slice]) -> Iterator[Unit]:
    """Yield units of at least one row group and at most UNIT_ROWS rows, for each group of columns."""
    position = 0
    for source, path in zip(files.sources, paths, strict=True):
        with pq.ParquetFile(path) as file:
            sizes = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
        start = 0
        while start < len(sizes):
            stop, num_rows = start, 0
            while stop < len(sizes) and num_rows + sizes[stop] <= max(UNIT_ROWS, sizes[start]):
                num_rows, stop = num_rows + sizes[stop], stop + 1
            for columns in column_groups:
                yield Unit(source, path, tuple(range(start, stop)), position, columns)
            start, position = stop, position + num_rows


def _first_length(files: VectorFiles, paths: Sequence[Path]) -> int:
    """Return the length of the first vector that is neither null nor empty; all others have to have this length."""
    (column,) = files.columns
    for source, path in zip(files.sources, paths, strict=True):
        for batch in read_batches(source, path, columns=[column], batch_rows=64):
            lengths = pc.list_value_length(batch.column(column))
            positive = lengths.filter(pc.fill_null(pc.greater(lengths, 0), False))
            if len(positive):
                return int(positive[0].as_py())
    raise InputError(f"{files.sources[0].name}: column {column!r}: no row has a vector; check the job that writes this table")
