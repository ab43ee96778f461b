"""Batches for the towers: vectorised from the memory maps, a function of (seed, epoch, rank, batch), read ahead of the trainer.

Shapes: B queries, N drawn candidates, I items.
"""

import queue
import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from recsys_core.data.assembly import Assembler
from recsys_core.data.batch import Batch
from recsys_core.data.events import EvaluationSplit, EventStore, Rows
from recsys_core.data.jagged import JaggedArray
from recsys_core.data.shuffle import shuffled
from recsys_core.seeds import negatives_key

ROWS_AT_ONCE = 20_000
"""Events and drawn candidates of the batches that are made in one go, if it is more than one batch: waking a thread, and
finding its caches cold, costs more than a small batch."""
READ_AHEAD = 2
"""Such goes that lie ready."""
PHILOX_NUMBERS = 4
"""Numbers that the generator gives for one count."""


class TrainLoader:
    """Training batches of one rank.

    Every epoch is a new global shuffle of which rank r takes every world_size-th example. The few examples (fewer than
    world_size) that would make the ranks uneven are left out of that epoch: every rank has as many batches of the same sizes.

    Args:
        batch_size: queries per rank and step; the last batch of an epoch may be smaller.
        assembler: makes the batches; knows which features ride along.
        max_history: items of a history at most; 0: none.
        include_target: logs without order: the event's own item may be in its history.
        negatives: candidates drawn per batch beside the positives.
        negative_share_I: float64 [items], how likely each item is to be drawn.
        planned_ranks: a multiple of world_size: epochs then have the examples and batches that so many ranks would have made of
            batches smaller in proportion.
    """

    def __init__(
        self,
        store: EventStore,
        *,
        assembler: Assembler,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        max_history: int,
        include_target: bool = False,
        negatives: int = 0,
        negative_share_I: NDArray[np.float64] | None = None,
        planned_ranks: int | None = None,
    ) -> None:
        if negatives and negative_share_I is None:
            raise ValueError(f"negatives is {negatives}, but negative_share_I does not say which items to draw")
        self._store, self._assembler, self._batch_size = store, assembler, batch_size
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self._max_history, self._include_target = max_history, include_target
        self._negatives = negatives
        self._negative_cdf_I = np.zeros(0) if negative_share_I is None else np.cumsum(negative_share_I)
        # What leads from the number of a user's example to its place in the log.
        self._ahead_U = store.user_offset[:-1] - store.first_example
        self._mean_weight = store.mean_weight()
        planned = planned_ranks or world_size
        self.epoch_samples = store.train_events // planned * planned // world_size

    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""
        return -(-self.epoch_samples // self._batch_size)

    def batch_samples(self, batch: int) -> int:
        """Queries in batch number `batch` of an epoch."""
        return min(self._batch_size, self.epoch_samples - batch * self._batch_size)

    def epoch(self, epoch: int, *, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of `epoch` from `start_batch` on, made by a thread of its own while the caller trains."""
        ready: queue.Queue[list[Batch] | BaseException | None] = queue.Queue(maxsize=READ_AHEAD)
        closed = threading.Event()

        def put(item: list[Batch] | BaseException | None) -> bool:
            while not closed.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def read_ahead() -> None:
            try:
                for batches in self._batches(epoch, start=start_batch):
                    if not put(batches):
                        return
                put(None)
            except BaseException as error:  # handed to the trainer, which raises it
                put(error)

        thread = threading.Thread(target=read_ahead, name="loader", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield from item
        finally:
            closed.set()
            thread.join()  # a thread that is inside numpy or torch while the interpreter ends takes the process down with it

    def make(self, epoch: int, batch: int) -> Batch:
        """Batch number `batch` of `epoch`: a function of these two, the seed and the rank."""
        return self._make(epoch, batch, batch + 1)[0]

    def _batches(self, epoch: int, *, start: int) -> Iterator[list[Batch]]:
        several = max(1, ROWS_AT_ONCE // (self._batch_size + self._negatives))
        for first in range(start, len(self), several):
            yield self._make(epoch, first, min(first + several, len(self)))

    def _make(self, epoch: int, first: int, stop: int) -> list[Batch]:
        """The batches from `first` to before `stop`."""
        user, position = self._events(epoch, first, stop)
        drawn_bN = self._drawn(epoch, first, stop)
        parts = [slice(start, start + self._batch_size) for start in range(0, len(user), self._batch_size)]
        return [self._batch(user[part], position[part], drawn_N) for part, drawn_N in zip(parts, drawn_bN, strict=True)]

    def _events(self, epoch: int, first: int, stop: int) -> tuple[Rows, Rows]:
        """User and position of each example of these batches."""
        index = np.arange(first * self._batch_size, min(stop * self._batch_size, self.epoch_samples), dtype=np.int64)
        example = shuffled(index * self._world_size + self._rank, n=self._store.train_events, key=(self._seed, epoch))
        user = self._store.train_user[example].astype(np.int64)
        return user, example + self._ahead_U[user]

    def _drawn(self, epoch: int, first: int, stop: int) -> Rows:
        """[batches, N]: the candidates drawn for each of these batches."""
        # Numbers that are found by counting: those of a batch are the same wherever the drawing begins.
        counts = -(-self._negatives // PHILOX_NUMBERS)
        key = negatives_key(self._seed, epoch=epoch, rank=self._rank)
        generator = np.random.Generator(np.random.Philox(key=key, counter=first * counts))
        number_bN = generator.random((stop - first, counts * PHILOX_NUMBERS))[:, : self._negatives]
        return np.searchsorted(self._negative_cdf_I, number_bN * self._total_share, side="right")

    def _batch(self, user: Rows, position: Rows, drawn_N: Rows) -> Batch:
        store = self._store
        return self._assembler.batch(
            user=user,
            position=position,
            history=self._history(position, user) if self._max_history else JaggedArray.empty(len(user)),
            candidate=np.concatenate([store.event_item[position].astype(np.int64), drawn_N]),
            weight=None if store.event_weight is None else store.event_weight[position] / self._mean_weight,
        )

    @property
    def _total_share(self) -> float:
        """What the shares add up to: one, but for rounding, and a number drawn must not lie beyond it."""
        return float(self._negative_cdf_I[-1]) if len(self._negative_cdf_I) else 0.0

    def _history(self, position: Rows, user: Rows) -> JaggedArray:
        return self._store.histories(position, user, max_history=self._max_history, include_target=self._include_target)


def query_batch(store: EventStore, user: Rows, split: EvaluationSplit, *, assembler: Assembler, max_history: int) -> Batch:
    """`user` as they stood before `split`, at the moment of their first event in it; no candidates."""
    return assembler.batch(
        user=user,
        position=store.first_of(user, split),
        history=store.before(user, split, last=max_history),
        candidate=np.zeros(0, np.int64),
    )
