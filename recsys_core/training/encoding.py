"""Vectors of the sharded model: every rank encodes a range of rows and writes it where all ranks read.

Shapes: I items, H width of an item in a history, O output width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from recsys_core.data.assembly import Assembler
from recsys_core.data.events import EvaluationSplit, EventStore, Rows
from recsys_core.data.loader import query_batch
from recsys_core.errors import StageError
from recsys_core.models.task import RetrievalTask
from recsys_core.training.process import Process

ENCODE_ROWS = 8192


@dataclass(frozen=True)
class Encoder:
    """A trained task and what its features are read from. Encoding is collective: every rank calls it as often."""

    task: RetrievalTask
    store: EventStore
    assembler: Assembler
    process: Process

    def items(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """(what stands for the items in a history [n, H], candidate vectors [n, O])."""
        return self.task.encode_items(self.assembler.items(rows).to(self.process.device))

    def queries(self, users: Rows, *, split: EvaluationSplit) -> Tensor:
        """Query vectors [n, O] of `users` as they stood before `split`."""
        length = self.task.head.spec.config.history.length
        batch = query_batch(self.store, users, split, assembler=self.assembler, max_history=length)
        return self.task.encode_queries(batch.to(self.process.device))


class RankWriter:
    """Shared .npy files of which each rank fills a contiguous range of rows."""

    def __init__(self, process: Process, *, alive: Path) -> None:
        self._process, self._alive = process, alive

    def create(self, path: Path, *, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Collective. The file as a writable map, made once by rank 0."""
        if self._process.leads:
            np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape).flush()
        dist.barrier()
        return np.lib.format.open_memmap(path, mode="r+") if shape[0] else np.empty(shape, np.float32)

    def write(
        self, targets: list[NDArray[Any]], *, encode: Callable[[NDArray[np.int64]], tuple[Tensor, ...]], what: str
    ) -> None:
        """Collective. Fills this rank's rows of each target with what encode(rows) gives for it, in batches."""
        for rows, is_ours in self.batches(len(targets[0])):
            for target, vectors in zip(targets, encode(rows), strict=True):
                found = vectors.cpu().numpy()
                if not np.isfinite(found).all():
                    raise StageError(
                        f"{what}: the trained model gives vectors that are not finite (near row {rows[0]}); lower the learning "
                        "rates of training.table_optimizer or training.dense_optimizer"
                    )
                if is_ours:
                    target[rows] = found
            self._alive.touch()

    def batches(self, count: int) -> Iterator[tuple[NDArray[np.int64], bool]]:
        """The same number of batches on every rank, since encoding is collective; a rank without rows repeats row 0."""
        if count == 0:
            return
        ranges = np.array_split(np.arange(count), self._process.world_size)
        batches = -(-len(ranges[0]) // ENCODE_ROWS)
        for rows in np.array_split(ranges[self._process.rank], batches):
            yield (rows, True) if len(rows) else (np.zeros(1, np.int64), False)
