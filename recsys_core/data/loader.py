"""Batches for the towers: vectorised from the memory maps, a function of (seed, epoch, rank, batch), read ahead of the trainer.

Shapes: B queries, N extra candidates, K = B + N samples of the KeyedJaggedTensor.
"""

import queue
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_core.data.batch import Batch, keyed_jagged
from recsys_core.data.events import EvaluationSplit, EventStore, Rows
from recsys_core.data.features.store import FeatureStore
from recsys_core.data.lists import Lists
from recsys_core.data.shuffle import shuffled

READ_AHEAD = 4


class TrainLoader:
    """Training batches of one rank.

    Every epoch is a new global shuffle of which rank r takes every world_size-th example. The few examples (fewer than
    world_size) that would make the ranks uneven are left out of that epoch: every rank has as many batches of the same sizes.

    Args:
        batch_size: queries per rank and step; the last batch of an epoch may be smaller.
        features: query features in order (see models.two_tower.query_features).
        uniform_negatives: extra candidates per batch, drawn uniformly from the catalogue.
        feature_store: features that ride along: those of users and events with the B queries, those of items with all K
            candidates, as `user.<name>`, `context.<name>` and `item.<name>`.
    """

    def __init__(
        self,
        store: EventStore,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        max_history: int,
        features: Sequence[str],
        uniform_negatives: int,
        feature_store: FeatureStore | None = None,
    ) -> None:
        self._feature_store = feature_store
        self._store, self._batch_size, self._features = store, batch_size, tuple(features)
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self._max_history, self._negatives = max_history, uniform_negatives
        self._first_example = store.first_example
        self.epoch_samples = store.train_events // world_size

    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""
        return -(-self.epoch_samples // self._batch_size)

    def batch_samples(self, batch: int) -> int:
        """Queries in batch number `batch` of an epoch."""
        return min(self._batch_size, self.epoch_samples - batch * self._batch_size)

    def epoch(self, epoch: int, *, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of `epoch` from `start_batch` on, made by a thread of its own while the caller trains."""
        ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=READ_AHEAD)
        closed = threading.Event()

        def put(item: Batch | BaseException | None) -> bool:
            while not closed.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def read_ahead() -> None:
            try:
                for batch in range(start_batch, len(self)):
                    if not put(self.make(epoch, batch)):
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
                yield item
        finally:
            closed.set()
            thread.join()  # a thread that is inside numpy or torch while the interpreter ends takes the process down with it

    def make(self, epoch: int, batch: int) -> Batch:
        """Batch number `batch` of `epoch`: a function of its arguments and the seed."""
        store = self._store
        index = np.arange(batch * self._batch_size, batch * self._batch_size + self.batch_samples(batch), dtype=np.int64)
        example = shuffled(index * self._world_size + self._rank, n=store.train_events, key=(self._seed, epoch))
        user = store.train_user[example].astype(np.int64)
        position = store.user_offset[user] + example - self._first_example[user]
        rng = np.random.default_rng([self._seed, epoch, batch, self._rank])
        negative = rng.integers(0, len(store.item_count), self._negatives)
        item = np.concatenate([store.event_item[position].astype(np.int64), negative])
        # A history that no tower reads would be a tenth of the work for the quickest of them.
        history = self._history(position, user) if self._max_history else Lists.empty(len(user))
        features = query_values(self._features, user=user, history=history) | {"item": single(item)}
        weighted = None
        if self._feature_store is not None:
            plain, lists, weight_T = self._feature_store.of_batch(user=user, position=position, item=item)
            features |= plain
            weighted = keyed_jagged(lists, samples=len(item), weight_T=weight_T) if lists else None
        return Batch(
            sparse=keyed_jagged(features, samples=len(item)),
            batch_size=len(user),
            item_rows=torch.from_numpy(item),
            weighted=weighted,
            weight=None if store.event_weight is None else torch.from_numpy(store.event_weight[position]),
        )

    def _history(self, position: Rows, user: Rows) -> Lists:
        return self._store.histories(position, user, max_history=self._max_history)


def query_values(features: Sequence[str], *, user: Rows, history: Lists) -> dict[str, Lists]:
    """The query features of B users: their rows, their histories, and the last item of each history that has one."""
    values = {"user": single(user), "history": history}
    if "last_item" in features:
        present = history.length_N > 0
        values["last_item"] = Lists.of_lengths(present, history.row_T[history.offset[1:][present] - 1])
    return {name: values[name] for name in features}


def single(row: Rows) -> Lists:
    """One row per sample."""
    return Lists(np.arange(len(row) + 1), row)


def query_batch(
    store: EventStore, user: Rows, split: EvaluationSplit, *, features: Sequence[str], max_history: int
) -> KeyedJaggedTensor:
    """Query features of `user` as they stood before `split`; `item` is empty."""
    history = store.before(user, split, last=max_history)
    values = query_values(features, user=user, history=history)
    return keyed_jagged(values | {"item": Lists.empty(0)}, samples=len(user))


def item_batch(item: Rows, *, features: Sequence[str]) -> KeyedJaggedTensor:
    """`item` alone; all query features are empty."""
    return keyed_jagged(dict.fromkeys(features, Lists.empty(0)) | {"item": single(item)}, samples=len(item))
