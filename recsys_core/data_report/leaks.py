"""Counts of leaked, repeated and misplaced events, computed by threads in one pass over the event store.

Shapes: I items, U users of a chunk, E events of a chunk. The parts of a split are numbered: 0 training, 1 validation, 2 test.
"""

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.events import EventStore, UserChunk
from recsys_core.dataset.jagged import is_in_sorted
from recsys_core.ingest.log.split_config import Split
from recsys_core.manifests import InteractionsManifest
from recsys_core.units import DAY_US, INT64_MAX

MAX_CHUNK_EVENTS = 2**18
"""Largest number of events in a chunk. It bounds the memory of a thread to about 35 MB for a log of any length."""

Ints = NDArray[np.int64]


@dataclass
class SplitCounts:
    """Numbers of events of some or all users. In a store without timestamps, counts that depend on time are 0."""

    num_events_by_day_and_part: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Number of events by day, counted from 1970-01-01, and part."""
    num_unseen_item_events: int = 0
    """Test events whose item has no training event."""
    num_duplicates: int = 0
    """Events that repeat another event of the same part: same user, item and time."""
    num_repeated_train_pairs: int = 0
    """Training events whose user and item already occurred in an earlier training event."""
    num_repeated_test_pairs: int = 0
    """Test events whose user and item occur in training."""
    num_leaked_events: int = 0
    """Validation and test events with a copy (user, item, time) in an earlier part."""
    num_future_events: int = 0
    """Training events that are later than the first test event of the same user."""
    num_misplaced_events: int = 0
    """Events that belong to another part by the definition of the split; see `count_split_events`."""
    num_unordered_events: int = 0
    """Events that are stored directly after an event with a later time of the same user and part."""

    def __add__(self, other: "SplitCounts") -> "SplitCounts":
        """Return the sum of each count."""
        return SplitCounts(
            *(count + other_count for count, other_count in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    @property
    def days(self) -> list[int]:
        """Days with an event, ascending, counted from 1970-01-01."""
        return sorted({day for day, _ in self.num_events_by_day_and_part})


def count_split_events(
    interactions: InteractionsManifest, *, split: Split, max_chunk_events: int = MAX_CHUNK_EVENTS
) -> SplitCounts:
    """Count the events of the event store, which is read once, in chunks of users. All cores count chunks.

    What counts as a misplaced event (`num_misplaced_events`) depends on split.kind:

    - time: training events after the first validation or test event, and validation events after the first test event.
    - leave_last_out: each user's validation events beyond the first, and each user's test events beyond the first. One more
      event is counted if a user's first validation event is earlier than the last training event. One more event is counted
      if the first test event is earlier than the last training or validation event.
    - files: no events, because the config lists the files of each part.
    """
    store = EventStore.open(interactions)
    first_held_out_times = (INT64_MAX, INT64_MAX)
    if store.has_times and split.kind == "time":
        first_held_out_times = store.first_time("validation"), store.first_time("test")
    count_chunk = partial(_count_chunk, store, split=split, first_held_out_times=first_held_out_times)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="data report") as pool:
        return sum(pool.map(count_chunk, store.user_slices(max_events=max_chunk_events)), SplitCounts())


def _count_chunk(store: EventStore, users: slice, *, split: Split, first_held_out_times: tuple[int, int]) -> SplitCounts:
    """Return the counts of the events of some users."""
    chunk, counts = store.user_chunk(users), SplitCounts()
    counts.num_unseen_item_events = int(np.sum(store.train_count_I[chunk.item_E[chunk.split_E == 2]] == 0))
    _count_repetitions(chunk, counts, num_items=store.num_items)
    if split.kind == "leave_last_out":
        counts.num_misplaced_events = int(np.maximum(chunk.num_events_U3[:, 1:] - 1, 0).sum())
    if chunk.time_E is not None:
        _count_by_time(chunk, chunk.time_E, counts, split=split, first_held_out_times=first_held_out_times)
    return counts


def _values_at(chunk: UserChunk, index_U3: Ints, value_E: Ints, *, default: int) -> Ints:
    """Return the value at each index, [U, 3]; `default` where a user has no event in a part."""
    return np.where(chunk.num_events_U3 > 0, value_E[np.clip(index_U3, 0, len(value_E) - 1)], default)


def _count_repetitions(chunk: UserChunk, counts: SplitCounts, *, num_items: int) -> None:
    """Add the repeated pairs, the duplicates and the leaked events of a chunk to `counts`."""
    # Sort by pair (user, item). The sort is stable, so the events of a pair stay ordered by part and time.
    pair_E = chunk.user_E * num_items + chunk.item_E
    order_E = np.argsort(pair_E, kind="stable")
    pair_E, part_E = pair_E[order_E], chunk.split_E[order_E]
    is_repeated_E = np.concatenate([[False], pair_E[1:] == pair_E[:-1]])
    # Part of the first event with the same user and item.
    first_part_E = part_E[np.maximum.accumulate(np.where(is_repeated_E, 0, np.arange(len(pair_E))))]
    counts.num_repeated_train_pairs += int(np.sum(is_repeated_E & (part_E == 0)))
    counts.num_repeated_test_pairs += int(np.sum((part_E == 2) & (first_part_E == 0)))
    if chunk.time_E is None:
        return
    time_E = chunk.time_E[order_E]
    has_same_part_and_time_E = np.concatenate([[False], (time_E[1:] == time_E[:-1]) & (part_E[1:] == part_E[:-1])])
    counts.num_duplicates += int(np.sum(is_repeated_E & has_same_part_and_time_E))

    # Events are now sorted by pair and part, so the copies of an event in different parts are not adjacent. Take the pairs
    # that occur in more than one part, and sort the events of each pair by time.
    spans_parts_E = is_in_sorted(pair_E, pair_E[part_E != first_part_E])
    pair_E, part_E, time_E = pair_E[spans_parts_E], part_E[spans_parts_E], time_E[spans_parts_E]
    order_E = np.lexsort((part_E, time_E, pair_E))
    pair_E, part_E, time_E = pair_E[order_E], part_E[order_E], time_E[order_E]
    is_first_copy_E = np.concatenate([[True], (pair_E[1:] != pair_E[:-1]) | (time_E[1:] != time_E[:-1])])[: len(pair_E)]
    # Part of the first event with the same user, item and time.
    first_copy_part_E = part_E[np.maximum.accumulate(np.where(is_first_copy_E, np.arange(len(pair_E)), 0))]
    counts.num_leaked_events += int(np.sum(part_E > first_copy_part_E))


def _count_by_time(
    chunk: UserChunk, time_E: Ints, counts: SplitCounts, *, split: Split, first_held_out_times: tuple[int, int]
) -> None:
    """Add the time-dependent counts of a chunk to `counts`.

    first_held_out_times: times of the first validation event and of the first test event; used only for a split by time.
    """
    day_part_codes, num_events_by_code = np.unique(time_E // DAY_US * 3 + chunk.split_E, return_counts=True)
    days_and_parts = zip((day_part_codes // 3).tolist(), (day_part_codes % 3).tolist(), strict=True)
    counts.num_events_by_day_and_part.update(dict(zip(days_and_parts, num_events_by_code.tolist(), strict=True)))
    is_same_user_and_part = chunk.segment_E[1:] == chunk.segment_E[:-1]
    counts.num_unordered_events += int(np.sum(is_same_user_and_part & (time_E[1:] < time_E[:-1])))
    end_U3 = np.cumsum(chunk.num_events_U3.ravel()).reshape(-1, 3)
    first_time_U3 = _values_at(chunk, end_U3 - chunk.num_events_U3, time_E, default=INT64_MAX)
    last_time_U3 = _values_at(chunk, end_U3 - 1, time_E, default=-INT64_MAX)
    counts.num_future_events += int(np.sum((chunk.split_E == 0) & (time_E > first_time_U3[chunk.user_E, 2])))
    if split.kind == "time":
        first_validation_time, first_test_time = first_held_out_times
        first_later_time_by_part = np.array([min(first_validation_time, first_test_time), first_test_time, INT64_MAX])
        counts.num_misplaced_events += int(np.sum(time_E > first_later_time_by_part[chunk.split_E]))
    if split.kind == "leave_last_out":
        counts.num_misplaced_events += int(np.sum(first_time_U3[:, 1] < last_time_U3[:, 0]))
        counts.num_misplaced_events += int(np.sum(first_time_U3[:, 2] < np.maximum(last_time_U3[:, 0], last_time_U3[:, 1])))
