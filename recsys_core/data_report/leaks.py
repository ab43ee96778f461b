"""What the event store holds, read back as training reads it: events per day, repetitions, and leaks across the split.

Shapes: I items, U users of a chunk, T their events. Part 0 of the split is training, 1 validation, 2 test.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from recsys_core.data.events import EventStore
from recsys_core.data.interactions.config import Split
from recsys_core.manifests import InteractionsManifest
from recsys_core.units import DAY_US, INT64_MAX

CHUNK_EVENTS = 2_000_000
"""Events looked at together; bounds the memory to about 250 MB however long the log is."""
_NEVER = INT64_MAX

Ints = NDArray[np.int64]


@dataclass
class SplitFacts:
    """Counts over the whole store; those that need times stay 0 without them."""

    events_I: Ints
    test_events_I: Ints
    days: dict[int, Ints] = field(default_factory=dict)
    """Day since 1970 -> events of each part."""
    duplicates: int = 0
    """Events that repeat another one of the same part: user, item and time."""
    repeated_train_pairs: int = 0
    """Training events of an item that the user had in training before."""
    repeated_test_pairs: int = 0
    """Test events of an item that the user had in training."""
    leaked: int = 0
    """Validation and test events with a copy (user, item, time) in an earlier part."""
    future: int = 0
    """Training events later than their own user's first test event."""
    misplaced: int = 0
    """Events that break what the kind of split promises."""
    unordered: int = 0
    """Events stored behind a later one of the same user and part: a history would hold the future."""


def read_split(interactions: InteractionsManifest, *, split: Split, chunk_events: int = CHUNK_EVENTS) -> SplitFacts:
    """One pass over the store, a chunk of users at a time. What `misplaced` counts:

    time: training events after the first validation or test event, and validation events after the first test event.
    leave_last_out: test and validation events of a user beyond the first, and any that is earlier than the user's part before.
    files: nothing; what the user held out is the user's to know.
    """
    store = EventStore.open(interactions)
    timed = "event_time.npy" in interactions.files
    time = np.load(interactions.path("event_time.npy"), mmap_mode="r") if timed else None
    cuts = _first_times(store, time) if time is not None and split.kind == "time" else (_NEVER, _NEVER)
    facts = SplitFacts(*np.zeros((2, interactions.items), np.int64))
    for first, last in _user_chunks(store.user_offset, events=chunk_events):
        start, stop = int(store.user_offset[first]), int(store.user_offset[last])
        if start == stop:  # users of earlier nights, without an event tonight
            continue
        ends_U3 = np.stack(
            [store.train_end[first:last], store.validation_end[first:last], store.user_offset[first + 1 : last + 1]], axis=1
        )
        starts_U3 = np.column_stack([store.user_offset[first:last], ends_U3[:, :2]])
        chunk = _Chunk(
            length_U3=ends_U3 - starts_U3,
            item_T=store.event_item[start:stop].astype(np.int64),
            time_T=None if time is None else np.asarray(time[start:stop]),
        )
        facts.events_I += np.bincount(chunk.item_T, minlength=interactions.items)
        facts.test_events_I += np.bincount(chunk.item_T[chunk.part_T == 2], minlength=interactions.items)
        _count_repetitions(chunk, facts, items=interactions.items)
        if split.kind == "leave_last_out":
            facts.misplaced += int(np.maximum(chunk.length_U3[:, 1:] - 1, 0).sum())
        if chunk.time_T is not None:
            _count_times(chunk, chunk.time_T, facts, split=split, cuts=cuts)
    return facts


@dataclass
class _Chunk:
    """Events of consecutive users: by user, part, time."""

    length_U3: Ints
    item_T: Ints
    time_T: Ints | None

    @cached_property
    def segment_T(self) -> Ints:
        """3 * user + part, users counted from 0 in the chunk."""
        return np.repeat(np.arange(self.length_U3.size), self.length_U3.ravel())

    @cached_property
    def part_T(self) -> Ints:
        """0 training, 1 validation, 2 test."""
        return self.segment_T % 3

    def edges_U3(self, values_T: Ints, *, last: bool, empty: int) -> Ints:
        """First (or last) value of each user's part; `empty` where it has no events."""
        end_U3 = np.cumsum(self.length_U3.ravel()).reshape(-1, 3)
        place_U3 = end_U3 - 1 if last else end_U3 - self.length_U3
        return np.where(self.length_U3 > 0, values_T[np.clip(place_U3, 0, len(values_T) - 1)], empty)


def _user_chunks(user_offset: Ints, *, events: int) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) user of each chunk: as many as have `events` events together, at least one."""
    users, first = len(user_offset) - 1, 0
    while first < users:
        last = int(np.searchsorted(user_offset, user_offset[first] + events, side="right")) - 1
        last = min(max(last, first + 1), users)
        yield first, last
        first = last


def _first_times(store: EventStore, time: Ints) -> tuple[int, int]:
    """When the first validation event and the first test event happened."""
    firsts = []
    for start, end in ((store.train_end, store.validation_end), (store.validation_end, store.user_offset[1:])):
        heads = start[end > start]
        firsts.append(int(time[heads].min()) if len(heads) else _NEVER)
    return firsts[0], firsts[1]


def _count_repetitions(chunk: _Chunk, facts: SplitFacts, *, items: int) -> None:
    key_T = chunk.segment_T // 3 * items + chunk.item_T
    order = np.argsort(key_T, kind="stable")  # the events of a user and item stay by part and time
    key_T, part_T = key_T[order], chunk.part_T[order]
    same_T = np.concatenate([[False], key_T[1:] == key_T[:-1]])
    first_part_T = part_T[np.maximum.accumulate(np.where(same_T, 0, np.arange(len(key_T))))]
    facts.repeated_train_pairs += int(np.sum(same_T & (part_T == 0)))
    facts.repeated_test_pairs += int(np.sum((part_T == 2) & (first_part_T == 0)))
    if chunk.time_T is None:
        return
    time_T = chunk.time_T[order]
    copy_T = np.concatenate([[False], (time_T[1:] == time_T[:-1]) & (part_T[1:] == part_T[:-1])])
    facts.duplicates += int(np.sum(same_T & copy_T))
    # Copies in different parts are not neighbours yet: of the pairs that several parts have, by time.
    spread = np.isin(key_T, key_T[part_T != first_part_T])
    key_T, part_T, time_T = key_T[spread], part_T[spread], time_T[spread]
    order = np.lexsort((part_T, time_T, key_T))
    key_T, part_T, time_T = key_T[order], part_T[order], time_T[order]
    new_T = np.concatenate([[True], (key_T[1:] != key_T[:-1]) | (time_T[1:] != time_T[:-1])])[: len(key_T)]
    first_part_T = part_T[np.maximum.accumulate(np.where(new_T, np.arange(len(key_T)), 0))]
    facts.leaked += int(np.sum(part_T > first_part_T))


def _count_times(chunk: _Chunk, time_T: Ints, facts: SplitFacts, *, split: Split, cuts: tuple[int, int]) -> None:
    day_D, count_D = np.unique(time_T // DAY_US * 3 + chunk.part_T, return_counts=True)
    for day, part, count in zip((day_D // 3).tolist(), (day_D % 3).tolist(), count_D.tolist(), strict=True):
        facts.days.setdefault(day, np.zeros(3, np.int64))[part] += count
    neighbours = chunk.segment_T[1:] == chunk.segment_T[:-1]
    facts.unordered += int(np.sum(neighbours & (time_T[1:] < time_T[:-1])))
    first_U3 = chunk.edges_U3(time_T, last=False, empty=_NEVER)
    last_U3 = chunk.edges_U3(time_T, last=True, empty=-_NEVER)
    facts.future += int(np.sum((chunk.part_T == 0) & (time_T > first_U3[chunk.segment_T // 3, 2])))
    if split.kind == "time":
        validation, test = cuts
        facts.misplaced += int(np.sum((chunk.part_T == 0) & (time_T > min(validation, test))))
        facts.misplaced += int(np.sum((chunk.part_T == 1) & (time_T > test)))
    if split.kind == "leave_last_out":
        facts.misplaced += int(np.sum(first_U3[:, 1] < last_U3[:, 0]))
        facts.misplaced += int(np.sum(first_U3[:, 2] < np.maximum(last_U3[:, 0], last_U3[:, 1])))
