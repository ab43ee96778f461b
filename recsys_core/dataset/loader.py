"""Training and query batches, built from the memory-mapped event store and prefetched by a background thread.

A training batch is a function of (seed, epoch, rank, batch index), so a run can resume at any batch. The background thread
builds several consecutive batches at a time, which form a chunk. If it built one small batch at a time, switching between the
threads would take longer than building the batches.

Shapes: B queries, N negatives that all queries share, K known negatives of a query, C candidates, U users, I items, P batches
of a chunk, E events of a chunk, L known negatives.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.batch import Assembler, Batch
from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import Int64Array, JaggedArray
from recsys_core.dataset.shuffle import shuffled
from recsys_core.errors import InputError
from recsys_core.seeds import negatives_key

CHUNK_CANDIDATES = 20_000
"""Largest number of candidates in a chunk of several batches. A batch with more candidates is a chunk of its own."""
PREFETCHED_CHUNKS = 3
PHILOX_VALUES_PER_INCREMENT = 4
"""Number of values that numpy's Philox generator returns for each increment of its counter."""

T = TypeVar("T")
_NO_VALUE: Any = object()


@dataclass(frozen=True)
class ExampleSource:
    """The log, and the settings by which a batch is built from its events.

    Args:
        max_history: longest history, in items; 0: no histories.
        include_target: whether the history of an event starts with the event's own item; used only for an unordered log.
        max_known_negatives: number of known negatives among the candidates of each query. A query with fewer known negatives
            has copies of its positive in their place.
        user_exponent: exponent of a user's number of training events in the weights of the user's examples.
    """

    store: EventStore
    assembler: Assembler
    max_history: int
    include_target: bool = False
    max_known_negatives: int = 0
    user_exponent: float = 0.0


class RankShare(NamedTuple):
    """The rank whose share of the examples is loaded.

    Attributes:
        num_planned_ranks: number of ranks in the original sharding plan, a multiple of world_size; None: world_size. A retry
            may have fewer ranks than the plan. With proportionally larger batches, the retry has as many examples and batches
            per epoch as the first attempt.
    """

    rank: int
    world_size: int
    num_planned_ranks: int | None = None


class TrainLoader:
    """Training batches of one rank.

    The candidates of a batch are the positives, then the negatives that all queries share, then the known negatives of each
    query. Every epoch is a new global shuffle. Rank r takes the examples at indices r, r + world_size, r + 2 * world_size and
    so on. Up to num_planned_ranks - 1 examples are left out of each epoch, so that all ranks have the same batch sizes.

    Args:
        batch_size: queries per rank and step; the last batch of an epoch may be smaller.
        num_negatives: number of items sampled for each batch, in addition to the positives.
        negative_share_I: float64 [I], probability of each item in one draw; the sum is 1.
        catalogue_row_N: item rows that all queries of every batch share as negatives; None: `num_negatives` sampled rows.
    """

    def __init__(
        self,
        examples: ExampleSource,
        *,
        batch_size: int,
        rank_share: RankShare,
        seed: int,
        num_negatives: int = 0,
        negative_share_I: NDArray[np.float64] | None = None,
        catalogue_row_N: Int64Array | None = None,
    ) -> None:
        if num_negatives and negative_share_I is None:
            raise ValueError(f"num_negatives is {num_negatives}, but negative_share_I is missing")
        if examples.max_known_negatives:
            _require_known_negatives(examples)
        self._examples, self._batch_size, self._rank_share, self._seed = examples, batch_size, rank_share, seed
        self._num_negatives, self._catalogue_row_N = num_negatives, catalogue_row_N
        self._negative_cdf_I = np.zeros(0) if negative_share_I is None else np.cumsum(negative_share_I)
        num_batch_negatives = num_negatives if catalogue_row_N is None else len(catalogue_row_N)
        num_batch_negatives += batch_size * examples.max_known_negatives
        self._batches_per_chunk = max(1, CHUNK_CANDIDATES // (batch_size + num_batch_negatives))
        self._mean_weight = examples.store.mean_weight(user_exponent=examples.user_exponent)
        num_planned_ranks = rank_share.num_planned_ranks or rank_share.world_size
        num_examples = examples.store.num_train_events // num_planned_ranks * num_planned_ranks
        self.num_epoch_queries = num_examples // rank_share.world_size

    def __len__(self) -> int:
        """Number of batches per epoch, the same on every rank."""
        return -(-self.num_epoch_queries // self._batch_size)

    def num_batch_queries(self, batch_index: int) -> int:
        """Return the number of queries in the batch with this index in an epoch."""
        return min(self._batch_size, self.num_epoch_queries - batch_index * self._batch_size)

    def epoch(self, epoch: int, *, start_batch: int = 0) -> Iterator[Batch]:
        """Yield the batches of `epoch` from index `start_batch` on; a background thread builds them."""
        chunk_starts = range(start_batch, len(self), self._batches_per_chunk)
        chunks = (self._build_chunk(epoch, start, min(start + self._batches_per_chunk, len(self))) for start in chunk_starts)
        with closing(prefetch(chunks, depth=PREFETCHED_CHUNKS)) as ready_chunks:
            for chunk in ready_chunks:
                yield from chunk

    def batch(self, epoch: int, batch_index: int) -> Batch:
        """Build the batch with this index in `epoch`."""
        return self._build_chunk(epoch, batch_index, batch_index + 1)[0]

    def _build_chunk(self, epoch: int, first_batch: int, stop_batch: int) -> list[Batch]:
        """Build the batches with the indices first_batch, ..., stop_batch - 1."""
        user_E, event_index_E = self._training_events(epoch, first_batch, stop_batch)
        negative_PN = self._shared_negatives(epoch, first_batch, stop_batch)
        known_negative_EK = self._known_negatives(epoch, first_batch, stop_batch, user_E=user_E, event_index_E=event_index_E)
        batches = []
        for start, negative_N in zip(range(0, len(user_E), self._batch_size), negative_PN, strict=True):
            events_of_batch = slice(start, start + self._batch_size)
            negatives = (negative_N, known_negative_EK[events_of_batch].ravel())
            batches.append(self._assemble(user_E[events_of_batch], event_index_E[events_of_batch], negatives))
        return batches

    def _training_events(self, epoch: int, first_batch: int, stop_batch: int) -> tuple[Int64Array, Int64Array]:
        """Return the user and the index in the log of each training event of these batches."""
        start, end = first_batch * self._batch_size, min(stop_batch * self._batch_size, self.num_epoch_queries)
        index_in_epoch_E = np.arange(start, end, dtype=np.int64) * self._rank_share.world_size + self._rank_share.rank
        store = self._examples.store
        return store.training_events(shuffled(index_in_epoch_E, n=store.num_train_events, key=(self._seed, epoch)))

    def _shared_negatives(self, epoch: int, first_batch: int, stop_batch: int) -> Int64Array:
        """Return the negatives that all queries of a batch share, [P, N]: drawn items, or `catalogue_row_N` for each batch."""
        if self._catalogue_row_N is not None:
            return np.broadcast_to(self._catalogue_row_N, (stop_batch - first_batch, len(self._catalogue_row_N)))
        philox_key = negatives_key(self._seed, epoch=epoch, rank=self._rank_share.rank)
        uniform_PN = _uniform_values(philox_key, first_batch, stop_batch, num_values=self._num_negatives)
        # Rounding may leave the last value of the CDF slightly below 1. The random numbers are scaled by this value, because a
        # larger number would select no item.
        total_share = float(self._negative_cdf_I[-1]) if len(self._negative_cdf_I) else 0.0
        return np.searchsorted(self._negative_cdf_I, uniform_PN * total_share, side="right")

    def _known_negatives(
        self, epoch: int, first_batch: int, stop_batch: int, *, user_E: Int64Array, event_index_E: Int64Array
    ) -> Int64Array:
        """Return K known negatives of each event, [E, K]. If an event has fewer, the event's item fills the row."""
        store, max_known_negatives = self._examples.store, self._examples.max_known_negatives
        if max_known_negatives == 0:
            return np.zeros((len(user_E), 0), np.int64)
        assert store.known_negatives is not None  # the constructor requires them
        philox_key = negatives_key(self._seed, epoch=epoch, rank=self._rank_share.rank, for_known=True)
        draw_PB = _uniform_values(philox_key, first_batch, stop_batch, num_values=self._batch_size)
        known_negatives = store.known_negatives.at_events(
            event_index_E, user_E, max_items=max_known_negatives, draw_B=draw_PB.ravel()[: len(user_E)]
        )
        item_row_EK = np.repeat(store.items_at(event_index_E)[:, None], max_known_negatives, axis=1)
        item_row_EK[np.arange(max_known_negatives) < known_negatives.lengths[:, None]] = known_negatives.values_L
        return item_row_EK

    def _assemble(self, user_B: Int64Array, event_index_B: Int64Array, negatives: tuple[Int64Array, Int64Array]) -> Batch:
        examples, store = self._examples, self._examples.store
        history = JaggedArray.empty(len(user_B))
        if examples.max_history:
            history = store.histories(
                event_index_B, user_B, max_history=examples.max_history, include_target=examples.include_target
            )
        weight_B = store.example_weights(event_index_B, user_B, user_exponent=examples.user_exponent)
        return examples.assembler.batch(
            user_row_B=user_B,
            event_index_B=event_index_B,
            history=history,
            candidate_row_C=np.concatenate([store.items_at(event_index_B), *negatives]),
            loss_weight_B=None if weight_B is None else weight_B / self._mean_weight,
        )


def _require_known_negatives(examples: ExampleSource) -> None:
    """Raise InputError if no user has a known negative before the validation period."""
    setting_text = f"loss.explicit_negatives is {examples.max_known_negatives}"
    known_negatives = examples.store.known_negatives
    if known_negatives is None:
        raise InputError(
            f"{setting_text}, but the ingest did not keep the events below interactions.label_threshold; set "
            "interactions.explicit_negatives to true, or loss.explicit_negatives to 0"
        )
    if not known_negatives.num_train_negatives_U.any():
        raise InputError(
            f"{setting_text}, but 0 known negatives are before the validation period, and {len(known_negatives.item_L):,} are "
            "after its start; check interactions.label_column and label_threshold, or set loss.explicit_negatives to 0"
        )


def _uniform_values(
    philox_key: NDArray[np.uint64], first_batch: int, stop_batch: int, *, num_values: int
) -> NDArray[np.float64]:
    """Return `num_values` random numbers from 0 to 1 for each of these batches.

    Philox is counter-based: the numbers of a batch do not depend on earlier batches.
    """
    increments_per_batch = -(-num_values // PHILOX_VALUES_PER_INCREMENT)
    generator = np.random.Generator(np.random.Philox(key=philox_key, counter=first_batch * increments_per_batch))
    return generator.random((stop_batch - first_batch, increments_per_batch * PHILOX_VALUES_PER_INCREMENT))[:, :num_values]


def prefetch(values: Iterable[T], *, depth: int) -> Generator[T, None, None]:
    """Yield `values`; a background thread computes up to `depth` values ahead.

    If computing a value raises an exception, the generator yields the values before it and then raises the exception. Closing
    the generator ends the thread.
    """
    iterator = iter(values)
    pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
    try:
        pending_results = deque(pool.submit(next, iterator, _NO_VALUE) for _ in range(depth))
        while (value := pending_results.popleft().result()) is not _NO_VALUE:
            pending_results.append(pool.submit(next, iterator, _NO_VALUE))
            yield value
    finally:
        # Wait for the thread, because a thread that runs numpy or torch code at interpreter shutdown crashes the process.
        pool.shutdown(cancel_futures=True)


def query_batch(
    store: EventStore, user_B: Int64Array, split: EvaluationSplit, *, assembler: Assembler, max_history: int
) -> Batch:
    """Build the users' queries at the start of `split`, without candidates.

    A query consists of the user's history before `split` and the context of the user's first event in `split`.
    """
    return assembler.batch(
        user_row_B=user_B,
        event_index_B=store.first_event_index(user_B, split),
        history=store.items_before(user_B, split, max_items=max_history),
        candidate_row_C=np.zeros(0, np.int64),
    )
