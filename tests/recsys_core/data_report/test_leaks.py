"""Repetitions and leaks in the event store, against plain Python over the same events."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.data.interactions.config import GivenSplit, LeaveLastOut, Split, TimeSplit
from recsys_core.data_report.leaks import SplitFacts, read_split
from recsys_core.units import DAY_US
from tests.recsys_core.data.nights import Parts, interactions_of

FILES = GivenSplit(test=("test.parquet",))
ITEMS = 5
part = st.lists(st.tuples(st.integers(0, ITEMS - 1), st.integers(-2, 6).map(lambda half: half * DAY_US // 2)), max_size=6)
ordered_part = part.map(lambda events: sorted(events, key=lambda event: event[1]))
logs = st.lists(st.tuples(ordered_part, ordered_part, ordered_part), min_size=1, max_size=5)


def facts_of(log: list[Parts], split: Split, *, chunk_events: int = 4) -> SplitFacts:
    with tempfile.TemporaryDirectory() as folder:
        made = interactions_of(Path(folder, "stage"), log, item_ids=range(ITEMS))
        return read_split(made, split=split, chunk_events=chunk_events)


@settings(deadline=None, max_examples=60)
@given(log=logs, chunk_events=st.integers(1, 20))
def test_every_count_is_what_plain_python_counts_however_the_store_is_cut(log: list[Parts], chunk_events: int) -> None:
    facts = facts_of(log, FILES, chunk_events=chunk_events)
    every = [(user, at, item, time) for user, parts in enumerate(log) for at, part in enumerate(parts) for item, time in part]
    assert facts.events_I.tolist() == [sum(item == one for _, _, one, _ in every) for item in range(ITEMS)]
    assert facts.test_events_I.tolist() == [sum(at == 2 and item == one for _, at, one, _ in every) for item in range(ITEMS)]
    days = {}
    for _, at, _, time in every:
        days.setdefault(time // DAY_US, [0, 0, 0])[at] += 1
    assert {day: parts.tolist() for day, parts in facts.days.items()} == days
    assert facts.duplicates == len(every) - len(set(every))
    trained = [(user, item) for user, at, item, _ in every if at == 0]
    assert facts.repeated_train_pairs == len(trained) - len(set(trained))
    assert facts.repeated_test_pairs == sum(at == 2 and (user, item) in trained for user, at, item, _ in every)
    first_seen = {
        (user, item, time): min(at for u, at, i, t in every if (u, i, t) == (user, item, time)) for user, _, item, time in every
    }
    assert facts.leaked == sum(at > first_seen[user, item, time] for user, at, item, time in every)
    first_test = {user: min(time for _, time in parts[2]) for user, parts in enumerate(log) if parts[2]}
    assert facts.future == sum(at == 0 and user in first_test and time > first_test[user] for user, at, _, time in every)
    assert (facts.unordered, facts.misplaced) == (0, 0)


@settings(deadline=None, max_examples=60)
@given(log=logs)
def test_a_time_split_may_train_on_nothing_after_the_held_out_time_began(log: list[Parts]) -> None:
    firsts = [min((time for parts in log for _, time in parts[at]), default=99 * DAY_US) for at in (1, 2)]
    wrong = sum(time > min(firsts) for parts in log for _, time in parts[0]) + sum(
        time > firsts[1] for parts in log for _, time in parts[1]
    )
    assert facts_of(log, TimeSplit()).misplaced == wrong


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
def test_leave_last_out_keeps_one_event_of_a_user_for_each_part_and_none_before_training(user: Parts, misplaced: int) -> None:
    assert facts_of([([(0, 1)], [], []), user, ([], [], [])], LeaveLastOut()).misplaced == misplaced


def test_events_stored_behind_a_later_one_are_counted_and_users_do_not_mix() -> None:
    log = [([(0, 5), (1, 4), (2, 6)], [], [(3, 9)]), ([(0, 1)], [(1, 3), (1, 2)], [(2, 0)])]
    assert facts_of(log, FILES).unordered == 2


def test_without_times_only_pairs_are_compared(tmp_path: Path) -> None:
    log = [([(0, 0), (0, 0)], [], [(0, 0), (1, 0)])]
    facts = read_split(interactions_of(tmp_path / "stage", log, item_ids=range(2), timed=False), split=FILES)
    assert (facts.repeated_train_pairs, facts.repeated_test_pairs) == (1, 1)
    assert (facts.duplicates, facts.leaked, facts.future, facts.days) == (0, 0, 0, {})
