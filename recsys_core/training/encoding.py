"""Vectors of the sharded model: every rank encodes a range of rows and writes it into its part of an array.

Shapes: I items, H width of an item in a history, O output width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.data.assembly import Assembler
from recsys_core.data.events import EvaluationSplit, EventStore
from recsys_core.data.jagged import Int64Array
from recsys_core.data.loader import query_batch
from recsys_core.errors import StageError
from recsys_core.models.task import RetrievalTask
from recsys_core.training.process_group import Process
from recsys_core.training.sharded_array import Part, build_array

ENCODE_ROWS = 8192


@dataclass(frozen=True)
class Encoder:
    """A trained task and what its features are read from. Encoding is collective: every rank calls it as often."""

    task: RetrievalTask
    store: EventStore
    assembler: Assembler
    process: Process

    def items(self, rows: Int64Array) -> tuple[Tensor, Tensor]:
        """(what stands for the items in a history [n, H], candidate vectors [n, O])."""
        return self.task.encode_items(self.assembler.items(rows).to(self.process.device))

    def queries(self, users: Int64Array, *, split: EvaluationSplit) -> Tensor:
        """Query vectors [n, O] of `users` as they stood before `split`."""
        length = self.task.head.spec.config.history.length
        batch = query_batch(self.store, users, split, assembler=self.assembler, max_history=length)
        return self.task.encode_queries(batch.to(self.process.device))


class RankWriter:
    """Arrays of which each rank encodes a contiguous range of rows."""

    def __init__(self, process: Process, *, alive: Path) -> None:
        self._process, self._alive = process, alive

    def write(
        self, parts: Sequence[Part], *, count: int, encode: Callable[[Int64Array], tuple[Tensor, ...]], what: str
    ) -> None:
        """Collective. Adds this rank's rows of `count` to each part, as encode(rows) gives them for it, in batches."""
        for rows, is_ours in self.batches(count):
            for part, vectors in zip(parts, encode(rows), strict=True):
                if not vectors.isfinite().all():
                    raise StageError(
                        f"{what}: the trained model gives vectors that are not finite (near row {rows[0]}); lower the learning "
                        "rates of training.table_optimizer or training.dense_optimizer"
                    )
                if is_ours:
                    part.add(int(rows[0]), 0, vectors)
            self.sign()

    def build(self, path: Path, *, shape: tuple[int, ...], adds: bool = False) -> None:
        """Makes the array from its parts, on rank 0."""
        if self._process.is_main:
            build_array(path, shape=shape, process=self._process, adds=adds, on_record=self.sign)

    def sign(self) -> None:
        """Leaves a sign of life."""
        self._alive.touch()

    def batches(self, count: int) -> Iterator[tuple[NDArray[np.int64], bool]]:
        """The same number of batches on every rank, since encoding is collective; a rank without rows repeats row 0."""
        if count == 0:
            return
        ranges = np.array_split(np.arange(count), self._process.world_size)
        batches = -(-len(ranges[0]) // ENCODE_ROWS)
        for rows in np.array_split(ranges[self._process.rank], batches):
            yield (rows, True) if len(rows) else (np.zeros(1, np.int64), False)
