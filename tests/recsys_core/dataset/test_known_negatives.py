"""Known negatives of events and users compared with plain Python."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.known_negatives import KnownNegatives
from recsys_core.dataset.layout import EventArrays
from tests.recsys_core.dataset import test_events
from tests.recsys_core.dataset.test_events import Log, arrays_of, lists_of, logs, training_events_and_users

NegativeTimes = list[tuple[list[int], list[int], list[int]]]
"""Ascending times of known negatives, by user and split. A time is the number of the user's earlier events in the split."""
FIRST_NEGATIVE_ITEM = 20_000

pytestmark = pytest.mark.usefixtures("num_shards")  # each test runs with several numbers of shards


@st.composite
def logs_with_negatives(draw: st.DrawFn) -> tuple[Log, NegativeTimes]:
    """Draw a log and the times of its known negatives."""
    log = draw(logs)
    negative_times = [
        tuple(sorted(draw(st.lists(st.integers(0, len(split_items)), max_size=6))) for split_items in user_events)
        for user_events in log
    ]
    return log, negative_times


def store_with_negatives(log: Log, negative_times: NegativeTimes, *, is_ordered: bool = True) -> EventStore:
    """Return a store with known negatives at these times. Their items are `negative_items(negative_times)`."""
    items = negative_items(negative_times)
    arrays = arrays_with_negatives(log, negative_times, items, is_ordered=is_ordered)
    shards = [
        arrays_with_negatives(log[user_slice], negative_times[user_slice], items[user_slice], is_ordered=is_ordered)
        for user_slice in test_events.user_slices_by_shard()
    ]
    return EventStore(test_events.in_shards(arrays, shards), is_ordered=is_ordered)


def arrays_with_negatives(
    log: Log, negative_times: NegativeTimes, items: list[list[list[int]]], *, is_ordered: bool
) -> EventArrays:
    """Return the arrays of a store with one shard. If `is_ordered` is false, `negative_event` is None."""
    split_starts = np.concatenate([[0], np.cumsum([len(split_items) for user_events in log for split_items in user_events])])
    times_by_split = [split_times for user_times in negative_times for split_times in user_times]
    negative_offset = np.concatenate([[0], np.cumsum([len(split_times) for split_times in times_by_split])])
    event_indices = [
        start + time for start, split_times in zip(split_starts, times_by_split, strict=False) for time in split_times
    ]
    return replace(
        arrays_of(log),
        negative_offset=negative_offset.astype(np.int64),
        negative_item=np.array([item for user_items in items for split_items in user_items for item in split_items], np.int32),
        negative_event=np.array(event_indices, np.int64) if is_ordered else None,
    )


def negative_items(negative_times: NegativeTimes) -> list[list[list[int]]]:
    """Return the item of each known negative: FIRST_NEGATIVE_ITEM, FIRST_NEGATIVE_ITEM + 1, ..."""
    item_counter = count(FIRST_NEGATIVE_ITEM)
    return [[[next(item_counter) for _ in split_times] for split_times in user_times] for user_times in negative_times]


def negatives_of(store: EventStore) -> KnownNegatives:
    assert store.known_negatives is not None
    return store.known_negatives


@given(log_with_negatives=logs_with_negatives(), max_items=st.integers(1, 5))
def test_an_event_has_the_newest_negatives_of_its_user_before_or_at_the_event(
    log_with_negatives: tuple[Log, NegativeTimes], max_items: int
) -> None:
    log, negative_times = log_with_negatives
    store = store_with_negatives(log, negative_times)
    event_index_B, user_B = training_events_and_users(store)
    draw_B = np.full(len(user_B), 0.5)
    negatives = negatives_of(store).at_events(event_index_B, user_B, max_items=max_items, draw_B=draw_B)
    expected_items = [
        [item for item, time in zip(items_by_split[0], times_by_split[0], strict=True) if time <= train_position][-max_items:]
        for (train_items, _, _), times_by_split, items_by_split in zip(
            log, negative_times, negative_items(negative_times), strict=True
        )
        for train_position in range(len(train_items))
    ]
    assert lists_of(negatives) == expected_items


@given(log_with_negatives=logs_with_negatives())
def test_the_negatives_before_a_split_are_the_negatives_of_the_earlier_splits(
    log_with_negatives: tuple[Log, NegativeTimes],
) -> None:
    log, negative_times = log_with_negatives
    negatives = negatives_of(store_with_negatives(log, negative_times))
    items_by_user = negative_items(negative_times)
    user_B = np.arange(len(items_by_user))[::-1]
    assert lists_of(negatives.before(user_B, "validation")) == [train_items for train_items, _, _ in items_by_user[::-1]]
    assert lists_of(negatives.before(user_B, "test")) == [
        train_items + validation_items for train_items, validation_items, _ in items_by_user[::-1]
    ]
    assert negatives.num_train_negatives_U.tolist() == [len(train_items) for train_items, _, _ in items_by_user]


@given(log_with_negatives=logs_with_negatives(), max_items=st.integers(1, 5), draw=st.floats(0, 0.999))
def test_an_unordered_log_draws_distinct_training_negatives(
    log_with_negatives: tuple[Log, NegativeTimes], max_items: int, draw: float
) -> None:
    log, negative_times = log_with_negatives
    store = store_with_negatives(log, negative_times, is_ordered=False)
    event_index_B, user_B = training_events_and_users(store)
    draw_B = np.full(len(user_B), draw)
    drawn_items_by_event = lists_of(negatives_of(store).at_events(event_index_B, user_B, max_items=max_items, draw_B=draw_B))
    for user, drawn_items in zip(user_B.tolist(), drawn_items_by_event, strict=True):
        train_items = negative_items(negative_times)[user][0]
        assert len(set(drawn_items)) == len(drawn_items) == min(max_items, len(train_items))
        assert set(drawn_items) <= set(train_items)


def test_every_negative_of_an_unordered_log_is_drawn_equally_often() -> None:
    """Two of five training negatives are drawn, so each has the share 2 / 5. The sixth negative is a validation negative."""
    store = store_with_negatives([([1], [], [])], [([0] * 5, [0], [])], is_ordered=False)
    event_index_B = user_B = np.zeros(5_000, np.int64)
    draw_B = np.random.default_rng(0).random(5_000)
    negatives = negatives_of(store).at_events(event_index_B, user_B, max_items=2, draw_B=draw_B)
    share_by_negative = np.bincount(negatives.values_L - FIRST_NEGATIVE_ITEM, minlength=6) / 5_000
    np.testing.assert_allclose(share_by_negative, [0.4] * 5 + [0], atol=0.03)


def test_a_store_without_arrays_of_negatives_has_no_known_negatives() -> None:
    assert EventStore(arrays_of([([1], [], [])]), is_ordered=True).known_negatives is None
