"""Counts of leaked, repeated and misplaced events, computed in one pass over the event store.

Shapes: I items, U users of a chunk, E events of a chunk. The parts of the split: 0 training, 1 validation, 2 test.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.events import EventStore
from recsys_core.ingest.log.config import Split
from recsys_core.manifests import InteractionsManifest
from recsys_core.units import DAY_US, INT64_MAX

MAX_CHUNK_EVENTS = 2_000_000
"""Events per chunk; bounds the memory to about 250 MB for a log of any length."""
_MAX_TIME = INT64_MAX

Ints = NDArray[np.int64]


@dataclass
class SplitCounts:
    """Counts over the whole event store. In a store without timestamps, counts that depend on time are 0."""

    num_events_I: Ints
    """Events of each item, in all parts."""
    num_test_events_I: Ints
    num_events_by_day: dict[int, Ints] = field(default_factory=dict)
    """Days since 1970 -> number of events in each part, int64 [3]."""
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
    """Events that the kind of split would put into another part; see `count_split`."""
    num_unordered_events: int = 0
    """Events that are stored after a later event of the same user and part. Their histories contain later events."""


def count_split(interactions: InteractionsManifest, *, split: Split, max_chunk_events: int = MAX_CHUNK_EVENTS) -> SplitCounts:
    """Read the event store once, in chunks of users.

    `num_misplaced_events` depends on split.kind:

    - time: training events after the first validation or test event, and validation events after the first test event.
    - leave_last_out: each user's validation events beyond the first, and each user's test events beyond the first. If a
      user's validation or test events begin before the events of an earlier part end, one more event is counted.
    - files: no events, because the config lists the files of each part.
    """
    store = EventStore.open(interactions)
    has_times = "event_time.npy" in interactions.files
    event_time = np.load(interactions.path("event_time.npy"), mmap_mode="r") if has_times else None
    counts = SplitCounts(*np.zeros((2, interactions.num_items), np.int64))
    first_held_out_times = (_MAX_TIME, _MAX_TIME)
    if event_time is not None and split.kind == "time":
        first_held_out_times = _first_held_out_times(store, event_time)

    for first_user, end_user in _user_chunks(store.user_offset, max_events=max_chunk_events):
        start_event, end_event = int(store.user_offset[first_user]), int(store.user_offset[end_user])
        if start_event == end_event:  # users of earlier runs without an event in this run
            continue
        end_U3 = np.stack(
            [
                store.train_end[first_user:end_user],
                store.validation_end[first_user:end_user],
                store.user_offset[first_user + 1 : end_user + 1],
            ],
            axis=1,
        )
        start_U3 = np.column_stack([store.user_offset[first_user:end_user], end_U3[:, :2]])
        chunk = _Chunk(
            num_events_U3=end_U3 - start_U3,
            item_E=store.event_item[start_event:end_event].astype(np.int64),
            time_E=None if event_time is None else np.asarray(event_time[start_event:end_event]),
        )
        counts.num_events_I += np.bincount(chunk.item_E, minlength=interactions.num_items)
        counts.num_test_events_I += np.bincount(chunk.item_E[chunk.part_E == 2], minlength=interactions.num_items)
        _count_repetitions(chunk, counts, num_items=interactions.num_items)
        if split.kind == "leave_last_out":
            counts.num_misplaced_events += int(np.maximum(chunk.num_events_U3[:, 1:] - 1, 0).sum())
        if chunk.time_E is not None:
            _count_by_time(chunk, chunk.time_E, counts, split=split, first_held_out_times=first_held_out_times)
    return counts


@dataclass
class _Chunk:
    """Events of consecutive users, sorted by user, part and time."""

    num_events_U3: Ints
    """Number of events of each user in each part."""
    item_E: Ints
    time_E: Ints | None

    @cached_property
    def segment_E(self) -> Ints:
        """The number 3 * user + part for each event. Users are numbered from 0 in the chunk."""
        return np.repeat(np.arange(self.num_events_U3.size), self.num_events_U3.ravel())

    @cached_property
    def user_E(self) -> Ints:
        """User of each event, numbered from 0 in the chunk."""
        return self.segment_E // 3

    @cached_property
    def part_E(self) -> Ints:
        """Part of each event: 0 training, 1 validation, 2 test."""
        return self.segment_E % 3

    def first_value_U3(self, value_E: Ints, *, default: int) -> Ints:
        """Return the value of the first event of each user in each part; `default` for a part without events."""
        end_U3 = np.cumsum(self.num_events_U3.ravel()).reshape(-1, 3)
        return self._value_at(end_U3 - self.num_events_U3, value_E, default=default)

    def last_value_U3(self, value_E: Ints, *, default: int) -> Ints:
        """Return the value of the last event of each user in each part; `default` for a part without events."""
        end_U3 = np.cumsum(self.num_events_U3.ravel()).reshape(-1, 3)
        return self._value_at(end_U3 - 1, value_E, default=default)

    def _value_at(self, index_U3: Ints, value_E: Ints, *, default: int) -> Ints:
        return np.where(self.num_events_U3 > 0, value_E[np.clip(index_U3, 0, len(value_E) - 1)], default)


def _user_chunks(user_offset: Ints, *, max_events: int) -> Iterator[tuple[int, int]]:
    """Yield (first user, end user) of each chunk; end is exclusive. A chunk has at most max_events events, or a single user."""
    num_users, first_user = len(user_offset) - 1, 0
    while first_user < num_users:
        end_user = int(np.searchsorted(user_offset, user_offset[first_user] + max_events, side="right")) - 1
        end_user = min(max(end_user, first_user + 1), num_users)
        yield first_user, end_user
        first_user = end_user


def _first_held_out_times(store: EventStore, event_time: Ints) -> tuple[int, int]:
    """Return the times of the first validation event and of the first test event."""
    first_times = []
    for start_U, end_U in ((store.train_end, store.validation_end), (store.validation_end, store.user_offset[1:])):
        first_event_of_user = start_U[end_U > start_U]
        first_times.append(int(event_time[first_event_of_user].min()) if len(first_event_of_user) else _MAX_TIME)
    return first_times[0], first_times[1]


def _count_repetitions(chunk: _Chunk, counts: SplitCounts, *, num_items: int) -> None:
    # Sort by (user, item). The sort is stable, so the events of a pair stay ordered by part and time.
    pair_E = chunk.user_E * num_items + chunk.item_E
    order_E = np.argsort(pair_E, kind="stable")
    pair_E, part_E = pair_E[order_E], chunk.part_E[order_E]
    is_repeated_E = np.concatenate([[False], pair_E[1:] == pair_E[:-1]])
    first_part_E = part_E[np.maximum.accumulate(np.where(is_repeated_E, 0, np.arange(len(pair_E))))]
    counts.num_repeated_train_pairs += int(np.sum(is_repeated_E & (part_E == 0)))
    counts.num_repeated_test_pairs += int(np.sum((part_E == 2) & (first_part_E == 0)))
    if chunk.time_E is None:
        return
    time_E = chunk.time_E[order_E]
    is_same_time_E = np.concatenate([[False], (time_E[1:] == time_E[:-1]) & (part_E[1:] == part_E[:-1])])
    counts.num_duplicates += int(np.sum(is_repeated_E & is_same_time_E))

    # Events are now sorted by pair and part, so the copies of an event in different parts are not adjacent. Take the pairs
    # that occur in more than one part, and sort the events of each pair by time.
    spans_parts_E = np.isin(pair_E, pair_E[part_E != first_part_E])
    pair_E, part_E, time_E = pair_E[spans_parts_E], part_E[spans_parts_E], time_E[spans_parts_E]
    order_E = np.lexsort((part_E, time_E, pair_E))
    pair_E, part_E, time_E = pair_E[order_E], part_E[order_E], time_E[order_E]
    is_first_copy_E = np.concatenate([[True], (pair_E[1:] != pair_E[:-1]) | (time_E[1:] != time_E[:-1])])[: len(pair_E)]
    first_part_E = part_E[np.maximum.accumulate(np.where(is_first_copy_E, np.arange(len(pair_E)), 0))]
    counts.num_leaked_events += int(np.sum(part_E > first_part_E))


def _count_by_time(
    chunk: _Chunk, time_E: Ints, counts: SplitCounts, *, split: Split, first_held_out_times: tuple[int, int]
) -> None:
    day_part_code, num_events = np.unique(time_E // DAY_US * 3 + chunk.part_E, return_counts=True)
    for day, part, num_day_events in zip(
        (day_part_code // 3).tolist(), (day_part_code % 3).tolist(), num_events.tolist(), strict=True
    ):
        counts.num_events_by_day.setdefault(day, np.zeros(3, np.int64))[part] += num_day_events
    is_same_segment = chunk.segment_E[1:] == chunk.segment_E[:-1]
    counts.num_unordered_events += int(np.sum(is_same_segment & (time_E[1:] < time_E[:-1])))
    first_time_U3 = chunk.first_value_U3(time_E, default=_MAX_TIME)
    last_time_U3 = chunk.last_value_U3(time_E, default=-_MAX_TIME)
    counts.num_future_events += int(np.sum((chunk.part_E == 0) & (time_E > first_time_U3[chunk.user_E, 2])))
    if split.kind == "time":
        first_validation_time, first_test_time = first_held_out_times
        counts.num_misplaced_events += int(np.sum((chunk.part_E == 0) & (time_E > min(first_validation_time, first_test_time))))
        counts.num_misplaced_events += int(np.sum((chunk.part_E == 1) & (time_E > first_test_time)))
    if split.kind == "leave_last_out":
        counts.num_misplaced_events += int(np.sum(first_time_U3[:, 1] < last_time_U3[:, 0]))
        counts.num_misplaced_events += int(np.sum(first_time_U3[:, 2] < np.maximum(last_time_U3[:, 0], last_time_U3[:, 1])))
