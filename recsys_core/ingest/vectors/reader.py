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

from recsys_core.dataset.layout import allocate_npy
from recsys_core.errors import InputError
from recsys_core.ingest.vectors.batches import read_batches
from recsys_core.ingest.vectors.layouts import ColumnsReader, ListReader, ReadTask, check_and_normalise
from recsys_core.ingest.vectors.row_faults import FaultyRows, RowFaults
from recsys_core.ingest.vectors.vector_schema import VectorFiles

COLUMNS_AT_A_TIME = 8
"""Number of columns that a task reads. A parquet reader holds a page (often 1 MiB) and the dictionary of each of its columns in
memory. For thousands of columns, the pages and dictionaries would take gigabytes.
"""
BATCH_BYTES = 8 * 2**20
MIN_BATCH_ROWS = 64
TASK_ROWS = 131_072
MAX_DIM = 65_536
Task = TypeVar("Task")


def read_vectors(files: VectorFiles, *, paths: Sequence[Path], matrix_path: Path, stop_event: threading.Event) -> RowFaults:
    """Write the vectors of all rows to `matrix_path`, a float32 matrix [rows, dim]; return the faulty rows.

    Args:
        paths: a local file for each of files.sources.
        stop_event: event that another thread sets to end the reading early; the result is then incomplete.

    Raises:
        InputError: a file is damaged, or the matrix does not fit on the disk.
    """
    config = files.config
    dim = files.source_dim or _first_vector_length(files, paths)
    if dim > MAX_DIM:
        raise InputError(
            f"{files.sources[0].name}: column {files.columns[0]!r}: vectors of {dim:,} numbers; at most {MAX_DIM:,} are "
            "supported"
        )
    matrix_RD = allocate_npy(matrix_path, dtype=np.float32, shape=(files.num_rows, dim))
    num_threads = config.threads or len(os.sched_getaffinity(0))
    normalise = config.normalise and config.pca_dim is None  # projected vectors are normalised after the projection
    batch_rows = min(config.batch_rows, max(MIN_BATCH_ROWS, BATCH_BYTES // (4 * min(dim, COLUMNS_AT_A_TIME * 8))))
    if config.vector_column is not None:
        list_batch_rows = min(batch_rows, max(MIN_BATCH_ROWS, BATCH_BYTES // (4 * dim)))
        list_reader = ListReader(config.vector_column, matrix_RD, list_batch_rows, normalise)
        tasks = _read_tasks(files, paths, column_slices=[slice(0, 1)])
        return RowFaults.collect(files.num_rows, _run_in_threads(num_threads, list_reader.read, tasks, stop_event=stop_event))

    column_slices = [slice(start, min(start + COLUMNS_AT_A_TIME, dim)) for start in range(0, dim, COLUMNS_AT_A_TIME)]
    columns_reader = ColumnsReader(files.columns, matrix_RD, batch_rows)
    tasks = _read_tasks(files, paths, column_slices=column_slices)
    null_faults = RowFaults.collect(
        files.num_rows, _run_in_threads(num_threads, columns_reader.read, tasks, stop_event=stop_event)
    )

    def check_batch(start: int) -> list[FaultyRows]:
        row_slice = slice(start, start + batch_rows)
        has_null_N = null_faults.fault_code_R[row_slice] != 0
        return check_and_normalise(matrix_RD[row_slice], start, has_null_N, columns=files.columns, normalise=normalise)

    batch_starts = range(0, files.num_rows, batch_rows)
    return null_faults.merge(
        RowFaults.collect(files.num_rows, _run_in_threads(num_threads, check_batch, batch_starts, stop_event=stop_event))
    )


def _run_in_threads(
    num_threads: int, run_task: Callable[[Task], list[FaultyRows]], tasks: Iterable[Task], *, stop_event: threading.Event
) -> Iterator[list[FaultyRows]]:
    """Yield the faulty rows of each task. After the first error, or once `stop_event` is set, no task starts."""

    def run_unless_stopped(task: Task) -> list[FaultyRows]:
        return [] if stop_event.is_set() else run_task(task)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="vectors") as pool:
        yield from pool.map(run_unless_stopped, tasks)


def _read_tasks(files: VectorFiles, paths: Sequence[Path], *, column_slices: Sequence[slice]) -> Iterator[ReadTask]:
    """Yield one task for each sequence of row groups and each slice of columns.

    A sequence has at most TASK_ROWS rows, or one row group with more rows.
    """
    first_row = 0
    for source, path in zip(files.sources, paths, strict=True):
        with pq.ParquetFile(path) as file:
            num_rows_by_group = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
        start_group = 0
        while start_group < len(num_rows_by_group):
            stop_group, num_rows = start_group, 0
            while stop_group < len(num_rows_by_group) and num_rows + num_rows_by_group[stop_group] <= max(
                TASK_ROWS, num_rows_by_group[start_group]
            ):
                num_rows, stop_group = num_rows + num_rows_by_group[stop_group], stop_group + 1
            for column_slice in column_slices:
                yield ReadTask(source, path, tuple(range(start_group, stop_group)), first_row, column_slice)
            start_group, first_row = stop_group, first_row + num_rows


def _first_vector_length(files: VectorFiles, paths: Sequence[Path]) -> int:
    """Return the length of the first vector that is neither null nor empty; all others have to have this length."""
    (column,) = files.columns
    for source, path in zip(files.sources, paths, strict=True):
        for batch in read_batches(source, path, columns=[column], batch_rows=64):
            lengths = pc.list_value_length(batch.column(column))
            positive_lengths = lengths.filter(pc.fill_null(pc.greater(lengths, 0), False))
            if len(positive_lengths):
                return int(positive_lengths[0].as_py())
    raise InputError(f"{files.sources[0].name}: column {column!r}: no row has a vector; check the job that writes this table")
