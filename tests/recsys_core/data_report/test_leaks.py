"""Repetitions and leaks in the event store, compared with plain Python over the same events."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.data_report.leaks import SplitCounts, count_split_events
from recsys_core.ingest.log.split_config import FileSplit, LeaveLastOut, Split, TimeSplit
from recsys_core.units import DAY_US
from tests.recsys_core.ingest.interactions_with_times import Parts, interactions_of

FILES = FileSplit(test_paths=("test.parquet",))
NUM_ITEMS = 5
part = st.lists(st.tuples(st.integers(0, NUM_ITEMS - 1), st.integers(-2, 6).map(lambda half: half * DAY_US // 2)), max_size=6)
ordered_part = part.map(lambda events: sorted(events, key=lambda event: event[1]))
logs = st.lists(st.tuples(ordered_part, ordered_part, ordered_part), min_size=1, max_size=5)


def counts_of(log: list[Parts], split: Split, *, chunk_events: int = 4) -> SplitCounts:
    with tempfile.TemporaryDirectory() as folder:
        interactions = interactions_of(Path(folder, "stage"), log, item_ids=range(NUM_ITEMS))
        return count_split_events(interactions, split=split, max_chunk_events=chunk_events)


@settings(deadline=None, max_examples=60)
@given(log=logs, chunk_events=st.integers(1, 20))
def test_all_counts_equal_those_of_plain_python_for_any_chunk_size(log: list[Parts], chunk_events: int) -> None:
    counts = counts_of(log, FILES, chunk_events=chunk_events)
    all_events = [
        (user, at, item, time) for user, parts in enumerate(log) for at, part in enumerate(parts) for item, time in part
    ]
    assert counts.num_events_I.tolist() == [
        sum(item == event_item for _, _, event_item, _ in all_events) for item in range(NUM_ITEMS)
    ]
    assert counts.num_test_events_I.tolist() == [
        sum(at == 2 and item == event_item for _, at, event_item, _ in all_events) for item in range(NUM_ITEMS)
    ]
    days = {}
    for _, at, _, time in all_events:
        days.setdefault(time // DAY_US, [0, 0, 0])[at] += 1
    assert {day: parts.tolist() for day, parts in counts.num_events_by_day.items()} == days
    assert counts.num_duplicates == len(all_events) - len(set(all_events))
    trained = [(user, item) for user, at, item, _ in all_events if at == 0]
    assert counts.num_repeated_train_pairs == len(trained) - len(set(trained))
    assert counts.num_repeated_test_pairs == sum(at == 2 and (user, item) in trained for user, at, item, _ in all_events)
    first_seen = {
        (user, item, time): min(
            at
            for event_user, at, event_item, event_time in all_events
            if (event_user, event_item, event_time) == (user, item, time)
        )
        for user, _, item, time in all_events
    }
    assert counts.num_leaked_events == sum(at > first_seen[user, item, time] for user, at, item, time in all_events)
    first_test = {user: min(time for _, time in parts[2]) for user, parts in enumerate(log) if parts[2]}
    assert counts.num_future_events == sum(
        at == 0 and user in first_test and time > first_test[user] for user, at, _, time in all_events
    )
    assert (counts.num_unordered_events, counts.num_misplaced_events) == (0, 0)


@settings(deadline=None, max_examples=60)
@given(log=logs)
def test_a_time_split_counts_training_events_after_the_first_held_out_event(log: list[Parts]) -> None:
    firsts = [min((time for parts in log for _, time in parts[at]), default=99 * DAY_US) for at in (1, 2)]
    num_misplaced = sum(time > min(firsts) for parts in log for _, time in parts[0]) + sum(
        time > firsts[1] for parts in log for _, time in parts[1]
    )
    assert counts_of(log, TimeSplit()).num_misplaced_events == num_misplaced


@pytest.mark.parametrize(
    ("user", "misplaced"),
    [
        (([(0, 1), (1, 2)], [(2, 3)], [(3, 4)]), 0),
        (([(0, 1), (1, 4)], [(2, 4)], [(3, 4)]), 0),
        (([(0, 1), (1, 9)], [(2, 9)], [(3, 4)]), 1),
        (([(0, 1), (1, 5)], [(2, 3)], [(3, 6)]), 1),
        (([(0, 1)], [(2, 3)], [(3, 6), (4, 7), (4, 8)]), 2),
        (([(0, 5)], [], [(3, 4)]), 1),
        (([(0, 5)], [], []), 0),
    ],
)
def test_leave_last_out_has_one_event_per_user_and_part_and_none_before_training(user: Parts, misplaced: int) -> None:
    assert counts_of([([(0, 1)], [], []), user, ([], [], [])], LeaveLastOut()).num_misplaced_events == misplaced


def test_events_stored_after_a_later_event_of_the_same_user_are_counted() -> None:
    log = [([(0, 5), (1, 4), (2, 6)], [], [(3, 9)]), ([(0, 1)], [(1, 3), (1, 2)], [(2, 0)])]
    assert counts_of(log, FILES).num_unordered_events == 2


def test_without_timestamps_only_user_item_pairs_are_compared(tmp_path: Path) -> None:
    log = [([(0, 0), (0, 0)], [], [(0, 0), (1, 0)])]
    counts = count_split_events(interactions_of(tmp_path / "stage", log, item_ids=range(2), timed=False), split=FILES)
    assert (counts.num_repeated_train_pairs, counts.num_repeated_test_pairs) == (1, 1)
    assert (counts.num_duplicates, counts.num_leaked_events, counts.num_future_events, counts.num_events_by_day) == (
        0,
        0,
        0,
        {},
    )
