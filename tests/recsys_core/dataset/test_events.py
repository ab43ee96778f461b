"""Histories compared with plain Python over the same events."""

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import JaggedArray, ragged_ranges
from recsys_core.dataset.layout import SHARDED_ARRAYS, EventArrays, ShardArrays
from tests.recsys_core.ingest.interaction_logs import ingest, write_log

Nested = list[list[int]]
few = st.lists(st.integers(0, 30), max_size=5)
users = st.lists(st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=8), few, few), min_size=1, max_size=6)
Users = list[tuple[list[int], list[int], list[int]]]
"""Train, validation and test items of each user."""
num_test_shards = 1
"""Number of shards of the stores of `store_of`; the tests of this folder set each of SHARDS in turn."""


pytestmark = pytest.mark.usefixtures("shards")


def store_of(log: Users, *, ordered: bool = True, weight: list[float] | None = None) -> EventStore:
    """Return a store with the number of shards of the test (see conftest.py)."""
    events = iter(weight or [])
    weights = [[next(events) for part in user for _ in part] for user in log] if weight is not None else None
    arrays = arrays_of(log, weight=weight)
    return EventStore(
        in_shards(
            arrays,
            [
                arrays_of(log[users], weight=None if weights is None else [number for own in weights[users] for number in own])
                for users in users_by_shard()
            ],
        ),
        is_ordered=ordered,
    )


def users_by_shard() -> list[slice]:
    """Return the users of each shard, for the number of shards of the test."""
    return [slice(shard, None, num_test_shards) for shard in range(num_test_shards)]


def in_shards(arrays: EventArrays, shards: Sequence[EventArrays]) -> EventArrays:
    """Return `arrays` with the users and the events of these shards."""
    if len(shards) == 1:
        return arrays
    first_example = np.searchsorted(arrays.train_user, np.arange(len(arrays.train_end)))
    offsets = [shard.user_offset[:-1] - first_example[users] for shard, users in zip(shards, users_by_shard(), strict=True)]
    stored_names = [name for name in SHARDED_ARRAYS if getattr(arrays, name) is not None]
    parts = {name: ShardArrays.of(*(getattr(shard, name) for shard in shards)) for name in stored_names}
    return replace(arrays, **parts, event_offset=ShardArrays.of(*offsets))


def arrays_of(log: Users, *, weight: list[float] | None = None) -> EventArrays:
    lengths = np.array([[len(part) for part in user] for user in log], np.int64).reshape(-1, 3)
    offset = np.concatenate([[0], np.cumsum(lengths.sum(axis=1))])
    train = [item for user in log for item in user[0]]
    return EventArrays(
        user_offset=offset,
        train_end=offset[:-1] + lengths[:, 0],
        validation_end=offset[:-1] + lengths[:, 0] + lengths[:, 1],
        event_item=np.array([item for user in log for part in user for item in part], np.int32),
        train_user=np.repeat(np.arange(len(log), dtype=np.int32), lengths[:, 0]),
        item_count=np.bincount(np.array(train, np.int64), minlength=31),
        vector_row=np.full(31, -1),
        event_weight=None if weight is None else np.array(weight, np.float32),
    )


def lists_of(ragged: JaggedArray) -> Nested:
    assert ragged.offset[-1] == len(ragged.values_L) and ragged.values_L.dtype == np.int64
    return [ragged.values_L[start:stop].tolist() for start, stop in pairwise(ragged.offset)]


def train_positions(store: EventStore) -> tuple[np.ndarray, np.ndarray]:
    """Return position and user of every training event."""
    user, position = store.training_events(np.arange(store.num_train_events))
    return position, user


def places(log: Users) -> Users:
    """Return `log` with the position of each event instead of its item."""
    counter = iter(range(10_000))
    places_by_user = {row: tuple([next(counter) for _ in part] for part in log[row]) for row in rows_in_log_order(log)}
    return [places_by_user[row] for row in range(len(log))]


def rows_in_log_order(log: Users) -> list[int]:
    """Return the rows of the users in the order of their events."""
    return [row for users in users_by_shard() for row in range(len(log))[users]]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6))))
def test_ragged_ranges_count_up_from_every_start(pairs: list[tuple[int, int]]) -> None:
    starts, lengths = np.array(pairs, np.int64).reshape(-1, 2).T
    expected = [number for start, length in pairs for number in range(start, start + length)]
    assert ragged_ranges(starts, lengths).tolist() == expected


@given(log=users, max_history=st.integers(0, 6))
def test_an_ordered_history_holds_the_preceding_events_but_not_the_event_itself(log: Users, max_history: int) -> None:
    where = store_of(places(log))
    position, user = train_positions(where)
    histories = lists_of(where.histories(position, user, max_history=max_history))
    expected_positions = [train[max(0, at - max_history) : at] for train, _, _ in places(log) for at in range(len(train))]
    assert histories == expected_positions
    assert all(before < event for event, history in zip(position.tolist(), histories, strict=True) for before in history)
    items = store_of(log)
    expected_items = [train[max(0, at - max_history) : at] for train, _, _ in log for at in range(len(train))]
    assert lists_of(items.histories(position, user, max_history=max_history)) == expected_items


@given(log=users, max_history=st.integers(0, 10))
def test_an_unordered_history_is_other_training_events_of_the_user_each_once(log: Users, max_history: int) -> None:
    where = store_of(places(log), ordered=False)
    position, user = train_positions(where)
    histories = lists_of(where.histories(position, user, max_history=max_history))
    for event, owner, history in zip(position.tolist(), user.tolist(), histories, strict=True):
        other_events = set(places(log)[owner][0]) - {event}
        assert set(history) <= other_events
        assert len(history) == len(set(history)) == min(len(other_events), max_history)


@given(log=users, max_history=st.integers(1, 4))
def test_in_unordered_histories_no_event_of_a_user_is_favoured(log: Users, max_history: int) -> None:
    where = store_of(places(log), ordered=False)
    position, user = train_positions(where)
    count_by_event = np.bincount(
        where.histories(position, user, max_history=max_history).values_L, minlength=int(where.event_count_U.sum())
    )
    for train, _, _ in places(log):
        assert len(set(count_by_event[train].tolist())) == 1


@settings(deadline=None)
@given(log=users, split=st.sampled_from(["validation", "test"]), last=st.none() | st.integers(0, 6), data=st.data())
def test_targets_and_histories_equal_those_of_plain_python(
    log: Users, split: EvaluationSplit, last: int | None, data: st.DataObject
) -> None:
    store = store_of(log)
    chosen = data.draw(st.lists(st.integers(0, len(log) - 1), max_size=8))
    user = np.array(chosen, np.int64)
    part = {"validation": 1, "test": 2}[split]
    assert lists_of(store.targets(user, split)) == [log[user_row][part] for user_row in chosen]
    before = [[item for items in log[user_row][:part] for item in items] for user_row in chosen]
    expected = before if last is None else [items[max(0, len(items) - last) :] for items in before]
    assert lists_of(store.items_before(user, split, max_items=last)) == expected
    assert store.users_with_targets(split).tolist() == [row for row, user_row in enumerate(log) if user_row[part]]


@pytest.mark.parametrize("timed", [True, False])
def test_the_store_opens_what_the_ingest_wrote(tmp_path: Path, timed: bool) -> None:
    train = write_log(tmp_path / "a.parquet", [("ann", 10 + at, at) for at in range(6)] + [("bob", 11, 1)])
    test = write_log(tmp_path / "b.parquet", [("ann", 99, 50)])
    manifest = ingest(
        tmp_path / "stage", train, split={"kind": "files", "test_paths": test}, **({} if timed else {"timestamp_column": None})
    )
    store = EventStore.open(manifest)
    assert (store.is_ordered, store.has_times, store.num_train_events) == (timed, timed, 7)
    assert store.items_at(np.arange(8))[-1] == 0
    assert store.users_with_targets("test").tolist() == [0]
    position, user = train_positions(store)
    lengths = store.histories(position, user, max_history=3).lengths.tolist()
    assert lengths == ([0, 1, 2, 3, 3, 3, 0] if timed else [3] * 6 + [0])


def test_events_are_counted_without_a_copy_of_the_log() -> None:
    users, events_per_user, items = 40_000, 100, 50
    event_item = np.tile(np.arange(items, dtype=np.int32), users * events_per_user // items)
    offset = np.arange(users + 1) * events_per_user
    ends = {"train_end": offset[:-1] + events_per_user - 20, "validation_end": offset[:-1] + events_per_user - 10}
    arrays = replace(
        arrays_of([([0], [], [])]), user_offset=offset, event_item=event_item, item_count=np.zeros(items, np.int64), **ends
    )
    store = EventStore(arrays, is_ordered=True)
    tracemalloc.start()
    try:
        counts = {split: store.item_counts_before(split) for split in ("validation", "test")}
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < event_item.nbytes, f"{peak:,} bytes for a log of {event_item.nbytes:,}"
    for split, length in (("validation", events_per_user - 20), ("test", events_per_user - 10)):
        expected = np.bincount(event_item.reshape(users, events_per_user)[:, :length].ravel(), minlength=items)
        np.testing.assert_array_equal(counts[split], expected)
    np.testing.assert_array_equal(store.event_count_I(), np.bincount(event_item, minlength=items))


@given(log=users, max_events=st.integers(1, 30))
def test_user_chunks_hold_every_event_once_with_its_user_and_split(log: Users, max_events: int) -> None:
    expected = [(user, split, item) for user in rows_in_log_order(log) for split, part in enumerate(log[user]) for item in part]
    store, events = store_of(log), []
    for chunk in store.user_chunks(max_events=max_events):
        assert len(chunk.item_E) <= max_events or len(chunk.num_events_U3) == 1
        assert chunk.events.start == len(events)
        columns = (chunk.user_row_U[chunk.user_E].tolist(), chunk.split_E.tolist(), chunk.item_E.tolist())
        events += list(zip(*columns, strict=True))
        assert chunk.events.stop == len(events)
    assert events == expected


@given(log=users, data=st.data())
def test_training_events_are_recognised_in_any_range_of_the_log(log: Users, data: st.DataObject) -> None:
    in_training = [split == 0 for user in rows_in_log_order(log) for split, part in enumerate(log[user]) for _ in part]
    start = data.draw(st.integers(0, len(in_training) - 1))
    stop = data.draw(st.integers(start + 1, len(in_training)))
    assert store_of(log).is_training(slice(start, stop)).tolist() == in_training[start:stop]


@given(log=users, data=st.data())
def test_held_out_events_are_those_after_training(log: Users, data: st.DataObject) -> None:
    skips = np.array(data.draw(st.lists(st.booleans(), min_size=len(log), max_size=len(log))))
    store = store_of(log)
    user, event = store.held_out_events(skip_validation_U=skips)
    expected = [(row, item) for row, parts in enumerate(log) for item in ([] if skips[row] else parts[1]) + parts[2]]
    assert list(zip(user.tolist(), store.items_at(event).tolist(), strict=True)) == expected
