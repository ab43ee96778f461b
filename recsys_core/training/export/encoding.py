"""Encoding with the sharded model: each rank encodes a range of rows and writes the vectors to its part of an array.

Shapes: B rows of a batch, D width of a vector.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.batch import Assembler
from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import Int64Array
from recsys_core.dataset.loader import query_batch
from recsys_core.errors import StageError
from recsys_core.models.spec import ModelSpec
from recsys_core.models.task import RetrievalTask
from recsys_core.training.export.sharded_array import Part, build_array
from recsys_core.training.job.process_group import Process

ENCODE_BATCH_ROWS = 8192


@dataclass(frozen=True)
class Encoder:
    """A trained model and the data that it encodes. Encoding is collective: all ranks encode the same number of batches."""

    task: RetrievalTask
    store: EventStore
    assembler: Assembler
    process: Process

    @property
    def spec(self) -> ModelSpec:
        """The spec of the task's model."""
        return self.task.head.spec

    def encode_items(self, rows: Int64Array) -> tuple[Tensor, Tensor]:
        """Collective. Return (item representations for histories, candidate vectors). Both have B rows, of different widths."""
        return self.task.encode_items(self.assembler.item_batch(rows).to(self.process.device))

    def encode_queries(self, users: Int64Array, *, split: EvaluationSplit) -> Tensor:
        """Collective. Return query vectors [B, D] of `users`, from their events before `split`."""
        history_length = self.spec.history_length
        batch = query_batch(self.store, users, split, assembler=self.assembler, max_history=history_length)
        return self.task.encode_queries(batch.to(self.process.device))


class RankWriter:
    """Splits the rows of an array into one contiguous range per rank, and writes this rank's range in batches.

    Args:
        heartbeat: file to touch after each batch.
    """

    def __init__(self, process: Process, *, heartbeat: Path) -> None:
        self._process, self._heartbeat = process, heartbeat

    def write(
        self, parts: Sequence[Part], *, num_rows: int, encode: Callable[[Int64Array], tuple[Tensor, ...]], array_name: str
    ) -> None:
        """Collective. Encode this rank's range of `num_rows` rows, and append the vectors to `parts`.

        Args:
            parts: this rank's parts of one or more arrays.
            encode: function of row numbers that returns, for each of `parts`, the vectors of these rows.
            array_name: name of the array, for the error message.

        Raises StageError if a vector is not finite.
        """
        for rows, keep_vectors in self.batches(num_rows):
            for part, vectors in zip(parts, encode(rows), strict=True):
                if not vectors.isfinite().all():
                    raise StageError(
                        f"{array_name}: vectors of the trained model are not finite (near row {rows[0]}); lower the learning "
                        "rates of training.table_optimizer or training.dense_optimizer"
                    )
                if keep_vectors:
                    part.add(int(rows[0]), 0, vectors)
            self.touch_heartbeat()

    def build(self, path: Path, *, shape: tuple[int, ...], accumulate: bool = False) -> None:
        """Build the array from the parts of all ranks, on rank 0.

        accumulate: add up the values where parts overlap. By default parts must not overlap.
        """
        if self._process.is_main:
            build_array(path, shape=shape, process=self._process, accumulate=accumulate, on_record=self.touch_heartbeat)

    def touch_heartbeat(self) -> None:
        """Touch the heartbeat file."""
        self._heartbeat.touch()

    def batches(self, num_rows: int) -> Iterator[tuple[NDArray[np.int64], bool]]:
        """Yield (row numbers, whether to keep their vectors) for each batch of this rank's range.

        Encoding is collective, so every rank needs the same number of batches. A rank with too few rows for this number gets
        the batch ([0], False): the caller encodes row 0 and discards the vector.
        """
        if num_rows == 0:
            return
        rows_by_rank = np.array_split(np.arange(num_rows), self._process.world_size)
        num_batches = -(-len(rows_by_rank[0]) // ENCODE_BATCH_ROWS)
        for rows in np.array_split(rows_by_rank[self._process.rank], num_batches):
            yield (rows, True) if len(rows) else (np.zeros(1, np.int64), False)
