"""Repetitions and leaks in the event store, compared with plain Python over the same events.

`part` is the index of a part of the split: 0 training, 1 validation, 2 test.
"""

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.data_report.leaks import SplitCounts, count_split_events
from recsys_core.ingest.log.split_config import LeaveLastOut, Split, TimeSplit
from recsys_core.units import DAY_US
from tests.recsys_core.data_report.small_reports import FILE_SPLIT
from tests.recsys_core.ingest.interactions_with_times import UserEvents, interactions_of

NUM_ITEMS = 5
times_us = st.integers(-2, 6).map(lambda half_days: half_days * DAY_US // 2)
events_by_time = st.lists(st.tuples(st.integers(0, NUM_ITEMS - 1), times_us), max_size=6).map(
    lambda events: sorted(events, key=lambda event: event[1])
)
logs = st.lists(st.tuples(events_by_time, events_by_time, events_by_time), min_size=1, max_size=5)


def counts_of(log: list[UserEvents], split: Split, *, max_chunk_events: int = 4) -> SplitCounts:
    """Return the counts of an interactions stage with these events."""
    with tempfile.TemporaryDirectory() as folder:
        interactions = interactions_of(Path(folder, "stage"), log, item_ids=range(NUM_ITEMS))
        return count_split_events(interactions, split=split, max_chunk_events=max_chunk_events)


@given(log=logs, max_chunk_events=st.integers(1, 20))
def test_all_counts_equal_the_counts_of_plain_python_for_any_chunk_size(log: list[UserEvents], max_chunk_events: int) -> None:
    counts = counts_of(log, FILE_SPLIT, max_chunk_events=max_chunk_events)
    events = [
        (user, part, item, time)
        for user, events_by_part in enumerate(log)
        for part, part_events in enumerate(events_by_part)
        for item, time in part_events
    ]
    train_items = {item for _, part, item, _ in events if part == 0}
    assert counts.num_unseen_item_events == sum(part == 2 and item not in train_items for _, part, item, _ in events)
    assert counts.num_events_by_day_and_part == Counter((time // DAY_US, part) for _, part, _, time in events)
    assert counts.days == sorted({time // DAY_US for _, _, _, time in events})

    train_pairs = [(user, item) for user, part, item, _ in events if part == 0]
    assert counts.num_duplicates == len(events) - len(set(events))
    assert counts.num_repeated_train_pairs == len(train_pairs) - len(set(train_pairs))
    assert counts.num_repeated_test_pairs == sum(part == 2 and (user, item) in train_pairs for user, part, item, _ in events)

    earliest_part_by_event: dict[tuple[int, int, int], int] = {}
    for user, part, item, time in events:  # the training events of a user come first, and the test events last
        earliest_part_by_event.setdefault((user, item, time), part)
    assert counts.num_leaked_events == sum(part > earliest_part_by_event[user, item, time] for user, part, item, time in events)

    first_test_time_by_user = {
        user: min(time for _, time in test_events) for user, (_, _, test_events) in enumerate(log) if test_events
    }
    assert counts.num_future_events == sum(
        part == 0 and user in first_test_time_by_user and time > first_test_time_by_user[user] for user, part, _, time in events
    )
    assert (counts.num_unordered_events, counts.num_misplaced_events) == (0, 0)


@given(log=logs)
def test_a_time_split_counts_events_after_the_start_of_the_next_part(log: list[UserEvents]) -> None:
    times_by_part = [[time for user_events in log for _, time in user_events[part]] for part in range(3)]
    first_validation_time, first_test_time = (min(times_by_part[part], default=99 * DAY_US) for part in (1, 2))
    num_misplaced_events = sum(time > min(first_validation_time, first_test_time) for time in times_by_part[0])
    num_misplaced_events += sum(time > first_test_time for time in times_by_part[1])
    assert counts_of(log, TimeSplit()).num_misplaced_events == num_misplaced_events


@pytest.mark.parametrize(
    ("user_events", "num_misplaced_events"),
    [
        pytest.param(([(0, 1), (1, 2)], [(2, 3)], [(3, 4)]), 0, id="one held-out event per part"),
        pytest.param(([(0, 1), (1, 4)], [(2, 4)], [(3, 4)]), 0, id="parts meet at one time"),
        pytest.param(([(0, 1), (1, 9)], [(2, 9)], [(3, 4)]), 1, id="test before validation"),
        pytest.param(([(0, 1), (1, 5)], [(2, 3)], [(3, 6)]), 1, id="validation before the end of training"),
        pytest.param(([(0, 1)], [(2, 3)], [(3, 6), (4, 7), (4, 8)]), 2, id="two surplus test events"),
        pytest.param(([(0, 5)], [], [(3, 4)]), 1, id="test before the end of training"),
        pytest.param(([(0, 5)], [], []), 0, id="training events only"),
    ],
)
def test_leave_last_out_counts_surplus_events_and_users_with_overlapping_splits(
    user_events: UserEvents, num_misplaced_events: int
) -> None:
    user_without_held_out_events: UserEvents = ([(0, 1)], [], [])
    user_without_events: UserEvents = ([], [], [])
    log = [user_without_held_out_events, user_events, user_without_events]
    assert counts_of(log, LeaveLastOut()).num_misplaced_events == num_misplaced_events


def test_events_stored_after_a_later_event_of_the_same_user_and_part_are_counted() -> None:
    log = [([(0, 5), (1, 4), (2, 6)], [], [(3, 9)]), ([(0, 1)], [(1, 3), (1, 2)], [(2, 0)])]
    assert counts_of(log, FILE_SPLIT).num_unordered_events == 2


def test_without_timestamps_only_user_item_pairs_are_compared(tmp_path: Path) -> None:
    log = [([(0, 0), (0, 0)], [], [(0, 0), (1, 0)])]
    interactions = interactions_of(tmp_path / "stage", log, item_ids=range(2), has_times=False)
    counts = count_split_events(interactions, split=FILE_SPLIT)
    assert (counts.num_repeated_train_pairs, counts.num_repeated_test_pairs) == (1, 1)
    assert (counts.num_duplicates, counts.num_leaked_events, counts.num_future_events) == (0, 0, 0)
    assert counts.days == []
