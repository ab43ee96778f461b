"""The event store (histories, targets, counts and chunks) compared with plain Python over the same events."""

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import JaggedArray, ragged_ranges
from recsys_core.dataset.layout import SHARDED_ARRAYS, EventArrays, ShardArrays
from tests.recsys_core.ingest.interaction_logs import ingest, write_log

NUM_ITEMS = 31
Log = list[tuple[list[int], list[int], list[int]]]
"""Training, validation and test items of each user."""
num_store_shards = 1
"""Number of shards of the stores of `store_of`. The fixture `num_shards` sets it."""
held_out_items = st.lists(st.integers(0, NUM_ITEMS - 1), max_size=5)
logs = st.lists(
    st.tuples(st.lists(st.integers(0, NUM_ITEMS - 1), min_size=1, max_size=8), held_out_items, held_out_items),
    min_size=1,
    max_size=6,
)

pytestmark = pytest.mark.usefixtures("num_shards")  # each test runs with several numbers of shards


def store_of(log: Log, *, is_ordered: bool = True, event_weights: list[float] | None = None) -> EventStore:
    """Return a store with `num_store_shards` shards. `event_weights` has the weights of the events, user by user."""
    weights_by_user: list[list[float]] | None = None
    if event_weights is not None:
        remaining_weights = iter(event_weights)
        weights_by_user = [[next(remaining_weights) for split_items in user_events for _ in split_items] for user_events in log]
    shards = [
        arrays_of(log[user_slice], event_weights=weights_by_user and list(chain.from_iterable(weights_by_user[user_slice])))
        for user_slice in user_slices_by_shard()
    ]
    return EventStore(in_shards(arrays_of(log, event_weights=event_weights), shards), is_ordered=is_ordered)


def user_slices_by_shard() -> list[slice]:
    """Return a slice for each shard that selects its users among all users."""
    return [slice(shard, None, num_store_shards) for shard in range(num_store_shards)]


def in_shards(arrays: EventArrays, shards: Sequence[EventArrays]) -> EventArrays:
    """Return `arrays` with its users and events replaced by the arrays of `shards`."""
    if len(shards) == 1:
        return arrays
    first_example_U = np.searchsorted(arrays.train_user, np.arange(len(arrays.train_end)))
    event_offsets = [
        shard.user_offset[:-1] - first_example_U[user_slice]
        for shard, user_slice in zip(shards, user_slices_by_shard(), strict=True)
    ]
    stored_names = [name for name in SHARDED_ARRAYS if getattr(arrays, name) is not None]
    shard_arrays_by_name = {name: ShardArrays.of(*(getattr(shard, name) for shard in shards)) for name in stored_names}
    return replace(arrays, **shard_arrays_by_name, event_offset=ShardArrays.of(*event_offsets))


def arrays_of(log: Log, *, event_weights: list[float] | None = None) -> EventArrays:
    """Return the arrays of a store with one shard."""
    num_events = [[len(split_items) for split_items in user_events] for user_events in log]
    num_events_U3 = np.array(num_events, np.int64).reshape(-1, 3)
    user_offset = np.concatenate([[0], np.cumsum(num_events_U3.sum(axis=1))])
    all_train_items = np.array([item for train_items, _, _ in log for item in train_items], np.int64)
    return EventArrays(
        user_offset=user_offset,
        train_end=user_offset[:-1] + num_events_U3[:, 0],
        validation_end=user_offset[:-1] + num_events_U3[:, 0] + num_events_U3[:, 1],
        event_item=np.array([item for user_events in log for split_items in user_events for item in split_items], np.int32),
        train_user=np.repeat(np.arange(len(log), dtype=np.int32), num_events_U3[:, 0]),
        item_count=np.bincount(all_train_items, minlength=NUM_ITEMS),
        vector_row=np.full(NUM_ITEMS, -1),
        event_weight=None if event_weights is None else np.array(event_weights, np.float32),
    )


def lists_of(jagged: JaggedArray) -> list[list[int]]:
    """Return the lists of a jagged array."""
    assert jagged.offset[-1] == len(jagged.values_L) and jagged.values_L.dtype == np.int64
    return [jagged.values_L[start:stop].tolist() for start, stop in pairwise(jagged.offset)]


def training_events_and_users(store: EventStore) -> tuple[np.ndarray, np.ndarray]:
    """Return the event index and the user of every training event."""
    user_E, event_index_E = store.training_events(np.arange(store.num_train_events))
    return event_index_E, user_E


def event_indices(log: Log) -> Log:
    """Return `log` with the index of each event in the store instead of its item."""
    index_counter = iter(range(10_000))
    indices_by_user = {
        user: tuple([next(index_counter) for _ in split_items] for split_items in log[user])
        for user in users_in_store_order(log)
    }
    return [indices_by_user[user] for user in range(len(log))]


def users_in_store_order(log: Log) -> list[int]:
    """Return the rows of the users in the order in which the store has their events."""
    return [user for user_slice in user_slices_by_shard() for user in range(len(log))[user_slice]]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6))))
def test_ragged_ranges_count_up_from_every_start(starts_and_lengths: list[tuple[int, int]]) -> None:
    starts, lengths = np.array(starts_and_lengths, np.int64).reshape(-1, 2).T
    expected_numbers = [number for start, length in starts_and_lengths for number in range(start, start + length)]
    assert ragged_ranges(starts, lengths).tolist() == expected_numbers


@given(log=logs, max_history=st.integers(0, 6))
def test_an_ordered_history_has_only_earlier_training_events(log: Log, max_history: int) -> None:
    """In `index_store`, the item of an event is the index of the event, so a history is a list of event indices."""

    def expected_histories(log: Log) -> list[list[int]]:
        return [items[max(0, index - max_history) : index] for items, _, _ in log for index in range(len(items))]

    index_store, store = store_of(event_indices(log)), store_of(log)
    event_index_E, user_E = training_events_and_users(store)
    index_histories = lists_of(index_store.histories(event_index_E, user_E, max_history=max_history))
    assert index_histories == expected_histories(event_indices(log))
    for event_index, history in zip(event_index_E.tolist(), index_histories, strict=True):
        assert all(earlier_index < event_index for earlier_index in history)
    assert lists_of(store.histories(event_index_E, user_E, max_history=max_history)) == expected_histories(log)


@given(log=logs, max_history=st.integers(0, 10))
def test_an_unordered_history_has_other_training_events_of_the_user_once_each(log: Log, max_history: int) -> None:
    index_store = store_of(event_indices(log), is_ordered=False)
    event_index_E, user_E = training_events_and_users(index_store)
    histories = lists_of(index_store.histories(event_index_E, user_E, max_history=max_history))
    for event_index, user, history in zip(event_index_E.tolist(), user_E.tolist(), histories, strict=True):
        other_events = set(event_indices(log)[user][0]) - {event_index}
        assert set(history) <= other_events
        assert len(history) == len(set(history)) == min(len(other_events), max_history)


@given(log=logs, max_history=st.integers(1, 4))
def test_all_training_events_of_a_user_are_in_equally_many_unordered_histories(log: Log, max_history: int) -> None:
    index_store = store_of(event_indices(log), is_ordered=False)
    event_index_E, user_E = training_events_and_users(index_store)
    histories = index_store.histories(event_index_E, user_E, max_history=max_history)
    num_histories_E = np.bincount(histories.values_L, minlength=int(index_store.event_count_U.sum()))
    for train_indices, _, _ in event_indices(log):
        assert len(set(num_histories_E[train_indices].tolist())) == 1


@given(log=logs, split=st.sampled_from(["validation", "test"]), max_items=st.none() | st.integers(0, 6), data=st.data())
def test_targets_and_histories_equal_the_results_of_plain_python(
    log: Log, split: EvaluationSplit, max_items: int | None, data: st.DataObject
) -> None:
    store = store_of(log)
    users = data.draw(st.lists(st.integers(0, len(log) - 1), max_size=8))
    user_B = np.array(users, np.int64)
    split_index = {"validation": 1, "test": 2}[split]
    assert lists_of(store.targets(user_B, split)) == [log[user][split_index] for user in users]
    items_before_split = [[item for items in log[user][:split_index] for item in items] for user in users]
    expected_histories = [
        items if max_items is None else items[max(0, len(items) - max_items) :] for items in items_before_split
    ]
    assert lists_of(store.items_before(user_B, split, max_items=max_items)) == expected_histories
    assert store.users_with_targets(split).tolist() == [
        user for user, items_by_split in enumerate(log) if items_by_split[split_index]
    ]


@pytest.mark.parametrize("has_times", [True, False])
def test_the_store_has_the_events_of_an_ingested_log(tmp_path: Path, has_times: bool) -> None:
    train_path = write_log(tmp_path / "train.parquet", [("ann", 10 + time, time) for time in range(6)] + [("bob", 11, 1)])
    test_path = write_log(tmp_path / "test.parquet", [("ann", 99, 50)])
    time_settings = {} if has_times else {"timestamp_column": None}
    split = {"kind": "files", "test_paths": test_path}
    store = EventStore.open(ingest(tmp_path / "stage", train_path, split=split, **time_settings))
    assert (store.is_ordered, store.has_times, store.num_train_events) == (has_times, has_times, 7)
    row_of_most_frequent_item = 0  # item 11, the only one with two events
    assert store.items_at(np.arange(8))[-1] == row_of_most_frequent_item
    assert store.users_with_targets("test").tolist() == [0]
    event_index_E, user_E = training_events_and_users(store)
    history_lengths = store.histories(event_index_E, user_E, max_history=3).lengths.tolist()
    assert history_lengths == ([0, 1, 2, 3, 3, 3, 0] if has_times else [3] * 6 + [0])


def test_events_are_counted_without_a_copy_of_the_log() -> None:
    num_users, num_events_per_user, num_items = 40_000, 100, 50
    event_item = np.tile(np.arange(num_items, dtype=np.int32), num_users * num_events_per_user // num_items)
    offset = np.arange(num_users + 1) * num_events_per_user
    num_events_before = {"validation": num_events_per_user - 20, "test": num_events_per_user - 10}
    arrays = replace(
        arrays_of([([0], [], [])]),
        user_offset=offset,
        train_end=offset[:-1] + num_events_before["validation"],
        validation_end=offset[:-1] + num_events_before["test"],
        event_item=event_item,
        item_count=np.zeros(num_items, np.int64),
    )
    store = EventStore(arrays, is_ordered=True)
    tracemalloc.start()
    try:
        count_I_by_split = {split: store.item_counts_before(split) for split in num_events_before}
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < event_item.nbytes, f"{peak_bytes:,} bytes for a log of {event_item.nbytes:,}"
    for split, num_events in num_events_before.items():
        earlier_items = event_item.reshape(num_users, num_events_per_user)[:, :num_events].ravel()
        np.testing.assert_array_equal(count_I_by_split[split], np.bincount(earlier_items, minlength=num_items))
    np.testing.assert_array_equal(store.event_count_I(), np.bincount(event_item, minlength=num_items))


@given(log=logs, max_events=st.integers(1, 30))
def test_user_chunks_have_every_event_once_with_its_user_and_split(log: Log, max_events: int) -> None:
    expected_events = [
        (user, split, item) for user in users_in_store_order(log) for split, items in enumerate(log[user]) for item in items
    ]
    events: list[tuple[int, int, int]] = []
    for chunk in store_of(log).user_chunks(max_events=max_events):
        assert len(chunk.item_E) <= max_events or len(chunk.num_events_U3) == 1
        assert chunk.events.start == len(events)
        columns = (chunk.user_row_U[chunk.user_E].tolist(), chunk.split_E.tolist(), chunk.item_E.tolist())
        events += list(zip(*columns, strict=True))
        assert chunk.events.stop == len(events)
    assert events == expected_events


@given(log=logs, data=st.data())
def test_training_events_are_recognised_in_any_range_of_the_log(log: Log, data: st.DataObject) -> None:
    is_training_E = [split == 0 for user in users_in_store_order(log) for split, items in enumerate(log[user]) for _ in items]
    start = data.draw(st.integers(0, len(is_training_E) - 1))
    stop = data.draw(st.integers(start + 1, len(is_training_E)))
    assert store_of(log).is_training(slice(start, stop)).tolist() == is_training_E[start:stop]


@given(log=logs, data=st.data())
def test_held_out_events_leave_out_skipped_validation_events(log: Log, data: st.DataObject) -> None:
    skip_validation_U = np.array(data.draw(st.lists(st.booleans(), min_size=len(log), max_size=len(log))))
    store = store_of(log)
    user_E, event_index_E = store.held_out_events(skip_validation_U=skip_validation_U)
    expected_events = [
        (user, item)
        for user, (_, validation_items, test_items) in enumerate(log)
        for item in ([] if skip_validation_U[user] else validation_items) + test_items
    ]
    assert list(zip(user_E.tolist(), store.items_at(event_index_E).tolist(), strict=True)) == expected_events
