"""Sharded arrays compared with one array, and an event store with more than 2^31 users and items."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.dataset.batch import Assembler
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import UNPOOLED
from recsys_core.dataset.layout import EventArrays, ShardArrays, allocate_npy, array_files, num_users_by_shard, row_dtype
from recsys_core.dataset.loader import ExampleSource, RankShare, TrainLoader, query_batch
from recsys_core.dataset.shards import ShardedEventArray, ShardedEventIndices, ShardedUserArray
from recsys_core.manifests import EventShard

NUM_IDS = 2**31 + 10
"""Number of users and number of items of a store. Its last rows do not fit into 32 bits."""
lists_by_shard = st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=9)


@given(values_by_shard=lists_by_shard, data=st.data())
def test_an_event_array_is_the_concatenation_of_its_shards(values_by_shard: list[list[int]], data: st.DataObject) -> None:
    array = ShardedEventArray(ShardArrays.of(*(np.array(shard_values, np.int32) for shard_values in values_by_shard)))
    expected_values = np.concatenate([np.array(shard_values, np.int32) for shard_values in values_by_shard])
    assert len(array) == len(expected_values)
    start, stop = (data.draw(st.integers(0, len(expected_values))) for _ in range(2))
    assert array[start:stop].tolist() == expected_values[start:stop].tolist()
    indices = np.array(data.draw(st.lists(st.integers(0, len(expected_values) - 1))) if len(expected_values) else [], np.int64)
    assert (array[indices].tolist(), array[indices].dtype) == (expected_values[indices].tolist(), expected_values.dtype)


@given(numbers=st.lists(st.integers(0, 99), max_size=20), num_shards=st.integers(1, 9), data=st.data())
def test_a_user_array_takes_its_users_from_the_shards_in_turn(numbers: list[int], num_shards: int, data: st.DataObject) -> None:
    values_U, start_S = np.array(numbers, np.int64), 1_000 * np.arange(num_shards)
    # As in an offset array, the last entry of each shard belongs to no user.
    shard_arrays = ShardArrays.of(*(np.append(values_U[shard::num_shards], -1) for shard in range(num_shards)))
    array = ShardedUserArray(shard_arrays, num_users=len(values_U), index_start_S=start_S)
    expected_U = values_U + start_S[np.arange(len(values_U)) % num_shards]
    assert array[:].tolist() == expected_U.tolist() and len(array) == len(numbers)
    user_B = np.array(data.draw(st.lists(st.integers(0, len(numbers) - 1))) if numbers else [], np.int64)
    assert array[user_B].tolist() == expected_U[user_B].tolist()
    assert [shard_array[:-1].tolist() for shard_array in shard_arrays] == [
        values_U[shard::num_shards].tolist() for shard in range(num_shards)
    ]
    assert num_users_by_shard(len(numbers), num_shards=num_shards).tolist() == [
        len(shard_array) - 1 for shard_array in shard_arrays
    ]
    for shard in range(min(num_shards, len(numbers))):
        users = slice(shard, len(numbers), num_shards)
        assert array[users].tolist() == expected_U[users].tolist()


@given(num_events_S=st.lists(st.integers(0, 6), min_size=1, max_size=6), data=st.data())
def test_searchsorted_counts_earlier_shards_and_searches_in_the_shard_of_the_event(
    num_events_S: list[int], data: st.DataObject
) -> None:
    start_S = np.cumsum(num_events_S) - num_events_S
    indices_by_shard = [sorted(data.draw(st.lists(st.integers(0, num_events), max_size=5))) for num_events in num_events_S]
    array = ShardedEventIndices(
        ShardArrays.of(*(np.array(shard_indices, np.int64) for shard_indices in indices_by_shard)), event_start_S=start_S
    )
    for shard, (num_events, start) in enumerate(zip(num_events_S, start_S.tolist(), strict=True)):
        for event in range(num_events):
            num_earlier_indices = sum(len(shard_indices) for shard_indices in indices_by_shard[:shard])
            expected_position = num_earlier_indices + sum(event_index <= event for event_index in indices_by_shard[shard])
            assert array.searchsorted(np.array([start + event]), side="right").tolist() == [expected_position]


def test_rows_have_64_bits_from_2_to_the_31_on() -> None:
    assert (row_dtype(0), row_dtype(2**31), row_dtype(NUM_IDS)) == (np.int32, np.int32, np.int64)


@pytest.fixture
def large_store(tmp_path: Path, num_shards: int) -> EventStore:
    """Return a store of NUM_IDS users and items in sparse files. Only the last 12 users have events.

    User u has the training items u % 5, u and u - 1, the validation item u - 2, and the test item u - 3.
    """
    users = np.arange(NUM_IDS - 12, NUM_IDS)
    items_U5 = np.stack([users % 5, users, users - 1, users - 2, users - 3], axis=1)
    first_example_U = 3 * np.arange(12)
    num_users_S = num_users_by_shard(NUM_IDS, num_shards=num_shards).tolist()
    paths = {
        name: [tmp_path / file_name for file_name in array_files(name, num_shards=num_shards)]
        for name in ("user_offset", "train_end", "validation_end", "event_offset", "event_item")
    }
    num_events_S = []
    for shard, num_users in enumerate(num_users_S):
        shard_users = np.flatnonzero(users % num_shards == shard)
        list_ends = 5 * np.arange(1, len(shard_users) + 1)
        _write_sparse_array(paths["user_offset"][shard], num_users + 1, last_values=list_ends)
        _write_sparse_array(paths["train_end"][shard], num_users, last_values=list_ends - 2)
        _write_sparse_array(paths["validation_end"][shard], num_users, last_values=list_ends - 1)
        _write_sparse_array(paths["event_offset"][shard], num_users, last_values=list_ends - 5 - first_example_U[shard_users])
        np.save(paths["event_item"][shard], items_U5[shard_users].ravel())
        num_events_S.append(5 * len(shard_users))
    np.save(tmp_path / "train_user.npy", np.repeat(users, 3))
    for name in ("item_count", "vector_row"):
        _write_sparse_array(tmp_path / f"{name}.npy", NUM_IDS, last_values=np.ones(12, np.int64))
    manifest = SimpleNamespace(
        num_shards=num_shards,
        num_users=NUM_IDS,
        shards=[EventShard(num_events=num_events) for num_events in num_events_S],
        files={path.name for path in tmp_path.iterdir()},
        path=lambda file_name: tmp_path / file_name,
    )
    return EventStore(EventArrays.open(manifest), is_ordered=True)  # type: ignore[arg-type]


def _write_sparse_array(path: Path, length: int, *, last_values: np.ndarray) -> None:
    """Write an int64 array of zeros that ends in `last_values`. The zeros take no disk space."""
    allocate_npy(path, dtype=np.int64, shape=(0,))
    with path.open("r+b") as file:
        header = {"descr": "<i8", "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 8 * length)
    np.load(path, mmap_mode="r+")[length - len(last_values) :] = last_values


def test_batches_have_users_and_items_above_2_to_the_31(large_store: EventStore, num_shards: int) -> None:
    assert (large_store.num_users, large_store.num_items, large_store.num_train_events) == (NUM_IDS, NUM_IDS, 36)
    user_B = np.array([NUM_IDS - 1, NUM_IDS - 7, NUM_IDS - 12])
    assert large_store.targets(user_B, "test").values_L.tolist() == (user_B - 3).tolist()
    assert large_store.items_before(user_B, "test", max_items=2).values_L.tolist() == [
        item for user in user_B.tolist() for item in (user - 1, user - 2)
    ]
    assembler = Assembler(user_batch_key=UNPOOLED)
    queries = query_batch(large_store, user_B, "test", assembler=assembler, max_history=2)
    assert queries.sparse[UNPOOLED]["user"].values().tolist() == user_B.tolist()
    assert sorted(queries.item_row_V.tolist()) == sorted({item for user in user_B.tolist() for item in (user - 1, user - 2)})
    if num_shards == 1:  # the training batches would need an array of all users, which is too large for a test
        return
    loader = TrainLoader(ExampleSource(large_store, assembler, max_history=2), batch_size=5, rank_share=RankShare(0, 1), seed=1)
    loaded_examples = []
    for batch in loader.epoch(0):
        users = batch.sparse[UNPOOLED]["user"].values().tolist()
        positives = batch.item_row_V[batch.candidate_index_C].tolist()[: batch.batch_size]
        for query_index, (user, item) in enumerate(zip(users, positives, strict=True)):
            history_index = batch.history_index_H[batch.history_offset[query_index] : batch.history_offset[query_index + 1]]
            loaded_examples.append((user, item, *batch.item_row_V[history_index].tolist()))
    assert sorted(loaded_examples) == sorted(
        example
        for user in range(NUM_IDS - 12, NUM_IDS)
        for example in ((user, user % 5), (user, user, user % 5), (user, user - 1, user % 5, user))
    )
