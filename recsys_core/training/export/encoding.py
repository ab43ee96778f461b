"""Encoding by the sharded model: all ranks together encode vectors, and each rank writes a part of each array.

On network storage, hosts that write one file through memory maps silently overwrite each other's pages. Here each rank appends
records to a file of its own, its *part*. All ranks sync and close their parts before a barrier, and read parts only after the
barrier.

Shapes: B rows of a batch, D width of a vector, R rows and C columns of a rectangle of an array.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray
from torch import Tensor
from torch import distributed as dist

from recsys_core.dataset.batch import Assembler
from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import Int64Array
from recsys_core.dataset.layout import allocate_npy
from recsys_core.dataset.loader import query_batch
from recsys_core.disk import explain_disk_full
from recsys_core.errors import StageError
from recsys_core.launching.rank import Process
from recsys_core.models.spec import ModelSpec
from recsys_core.models.task import RetrievalTask
from recsys_core.training.export.item_columns import EncodedRows, rows_of_rank

Region = tuple[slice, slice]
ENCODE_BATCH_ROWS = 8192
MAX_RECORD_VALUES = 2**22
"""Largest number of values of a record. A reader holds one record in memory."""
HEADER_BYTES = 4 * 8


@dataclass(frozen=True)
class Encoder:
    """A trained model and the data that it encodes. Encoding is collective: all ranks encode the same number of batches."""

    task: RetrievalTask
    store: EventStore
    assembler: Assembler
    process: Process

    @property
    def spec(self) -> ModelSpec:
        """The spec of the model."""
        return self.task.head.spec

    def encode_items(self, rows: Int64Array) -> tuple[Tensor, Tensor]:
        """Collective. Return the vectors that represent B items in histories, and their candidate vectors."""
        return self.task.encode_items(self.assembler.item_batch(rows).to(self.process.device))

    def encode_queries(self, users: Int64Array, *, split: EvaluationSplit) -> Tensor:
        """Collective. Return query vectors [B, D] of `users`, from their events before `split`."""
        max_history = self.spec.history_length
        batch = query_batch(self.store, users, split, assembler=self.assembler, max_history=max_history)
        return self.task.encode_queries(batch.to(self.process.device))


class Part:
    """The records of one rank. A record has a header of four int64 (first row, first column, rows, columns) and the values.

    Floating-point values are stored as float32, integers in their own type.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def add(self, first_row: int, first_column: int, values_RC: Tensor) -> None:
        """Append a rectangle of the array. first_row, first_column: position of the rectangle in the array."""
        num_rows, num_columns = values_RC.shape
        rows_per_record = max(1, MAX_RECORD_VALUES // max(1, num_columns))
        for record_start in range(0, num_rows, rows_per_record):
            tensor_RC = values_RC[record_start : record_start + rows_per_record].detach().cpu()
            record_RC = (tensor_RC.float() if tensor_RC.is_floating_point() else tensor_RC).numpy()
            self._file.write(np.array([first_row + record_start, first_column, *record_RC.shape], np.int64).tobytes())
            self._file.write(np.ascontiguousarray(record_RC).data)


class RankWriter:
    """Writer of arrays for one rank. Each rank has a contiguous range of rows, and the parts of all ranks make up the array.

    Args:
        heartbeat_path: file to touch after each batch and each record.
    """

    def __init__(self, process: Process, *, heartbeat_path: Path) -> None:
        self._process, self._heartbeat_path = process, heartbeat_path

    @contextmanager
    def part(self, path: Path) -> Iterator[Part]:
        """Collective. Yield this rank's part of the array `path`; after the block every rank can read all parts."""
        with explain_disk_full(path.parent), _part_path(path, self._process.rank).open("wb") as file:
            yield Part(file)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()

    def batches(self, num_rows: int) -> Iterator[tuple[NDArray[np.int64], bool]]:
        """Yield (row numbers, whether the rows are in this rank's range) for each batch of this rank.

        Encoding is collective, so every rank needs the same number of batches. A rank without rows gets the
        batch ([0], False): the caller encodes row 0 and discards the vector.
        """
        if num_rows == 0:
            return
        rank_rows, max_num_rows = rows_of_rank(num_rows, self._process), -(-num_rows // self._process.world_size)
        num_batches = -(-max_num_rows // ENCODE_BATCH_ROWS)
        for rows in np.array_split(np.arange(rank_rows.start, rank_rows.stop), num_batches):
            yield (rows, True) if len(rows) else (np.zeros(1, np.int64), False)

    def write(
        self,
        parts: Sequence[Part | EncodedRows],
        *,
        num_rows: int,
        encode: Callable[[Int64Array], tuple[Tensor, ...]],
        array_name: str,
    ) -> None:
        """Collective. Encode this rank's range of `num_rows` rows, and append the vectors to `parts`.

        Args:
            parts: this rank's parts of one or more arrays, in files or in memory.
            encode: function of row numbers that returns, for each of `parts`, the vectors of these rows.
            array_name: name of the array, for the error message.

        Raises StageError if a vector is not finite.
        """
        for rows, is_in_range in self.batches(num_rows):
            for part, vectors in zip(parts, encode(rows), strict=True):
                if not vectors.isfinite().all():
                    raise StageError(
                        f"{array_name}: vectors of the trained model are not finite (near row {rows[0]}); lower the learning "
                        "rates of training.table_optimizer or training.dense_optimizer"
                    )
                if is_in_range:
                    part.add(int(rows[0]), 0, vectors)
            self.touch_heartbeat()

    def build(self, path: Path, *, shape: tuple[int, ...], dtype: DTypeLike = np.float32, accumulate: bool = False) -> None:
        """On rank 0, write the .npy file `path` from the parts of all ranks, and remove the parts.

        accumulate: add up overlapping records. By default, each value must be in exactly one record.

        Raises StageError if the parts do not make up an array of this shape, and InputError if the disk is full.
        """
        if not self._process.is_main:
            return
        if 0 in shape:
            np.save(path, np.empty(shape, dtype))
        else:
            array = allocate_npy(path, dtype=dtype, shape=shape)
            self.fill(array, path=path, accumulate=accumulate)
            assert isinstance(array, np.memmap)
            array.flush()
        for rank in range(self._process.world_size):
            _part_path(path, rank).unlink()

    def fill(self, array: NDArray[Any], *, path: Path, accumulate: bool = False) -> None:
        """Copy the parts of all ranks, in rank order, into `array`, which holds zeros. accumulate: see `build`."""
        array_RC, world_size = array if array.ndim == 2 else array[:, None], self._process.world_size
        num_written_values = 0
        for rank in range(world_size):
            for region, values_RC in _read_records(_part_path(path, rank), shape=array_RC.shape, dtype=array.dtype):
                if accumulate:
                    array_RC[region] += values_RC
                else:
                    array_RC[region] = values_RC
                num_written_values += values_RC.size
                self.touch_heartbeat()
        if not accumulate and num_written_values != array.size:
            raise StageError(
                f"{path}: the {world_size} ranks wrote {num_written_values:,} values, but the array has {array.size:,}; mount "
                "the same storage under this path on all hosts"
            )

    def remove_part(self, path: Path) -> None:
        """Collective. Remove this rank's part after all ranks have read it."""
        dist.barrier()
        _part_path(path, self._process.rank).unlink()

    def touch_heartbeat(self) -> None:
        """Show the launching process that this rank is working."""
        self._heartbeat_path.touch()


def _part_path(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank-{rank}")


def _read_records(part_path: Path, *, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[tuple[Region, NDArray[Any]]]:
    try:
        file = part_path.open("rb")
    except FileNotFoundError:
        raise StageError(
            f"{part_path}: this file of another rank is not visible here; mount the same storage under this path on all hosts"
        ) from None
    with file:
        while raw_header := file.read(HEADER_BYTES):
            # The padding makes a number of a truncated header negative, so the check below fails.
            header = np.frombuffer(raw_header.ljust(HEADER_BYTES, b"\xff"), np.int64).tolist()
            first_row, first_column, num_rows, num_columns = header
            end_row, end_column = first_row + num_rows, first_column + num_columns
            is_inside = min(header) >= 0 and end_row <= shape[0] and end_column <= shape[1]
            num_bytes = num_rows * num_columns * dtype.itemsize
            raw_values = file.read(num_bytes) if is_inside else b""
            if not is_inside or len(raw_values) != num_bytes:
                raise StageError(
                    f"{part_path}: a record of {num_rows} x {num_columns} values at row {first_row}, column {first_column} "
                    f"is cut off or does not fit into an array of {shape[0]} x {shape[1]}; mount the same, intact storage "
                    "under this path on all hosts"
                )
            values_RC = np.frombuffer(raw_values, dtype).reshape(num_rows, num_columns)
            yield (slice(first_row, end_row), slice(first_column, end_column)), values_RC
