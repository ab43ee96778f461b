"""Counting held-out events that the champion was trained on, compared with sets of events in plain Python."""

import random
from pathlib import Path
from typing import Any

import pytest

from recsys_core.errors import StageError
from recsys_core.manifests import InteractionsManifest
from recsys_core.training.warm.leaked_events import count_leaked_events
from recsys_core.units import DAY_US
from tests.recsys_core.ingest.interaction_logs import Event, ingest, read_store, write_log

TIME = {"kind": "time", "test_days": 1, "validation_days": 1}
LAST = {"kind": "leave_last_out"}
START = 20_000 * DAY_US


def log_of(*, users: int = 12, days: int = 10) -> list[Event]:
    """Return an event of each user on each day, at a minute of their own; items repeat."""
    draw = random.Random(5)
    return [
        (f"u{user}", f"i{draw.randrange(8)}", START + day * DAY_US + user * 60_000_000)
        for day in range(days)
        for user in range(users)
    ]


def until(events: list[Event], day: float) -> list[Event]:
    return [event for event in events if event[2] < START + day * DAY_US]


def ingest_run(folder: Path, events: list[Event], *, split: dict[str, Any], **settings: Any) -> InteractionsManifest:
    folder.mkdir()
    return ingest(folder / "interactions", write_log(folder / "log.parquet", events), split=split, **settings)


def trained_and_held_out(champion: InteractionsManifest, current: InteractionsManifest) -> int:
    """Return the number of training events of the champion that are held out in this run and not in its training split."""
    (before, _, _), (training, validation, test) = read_store(champion).splits, read_store(current).splits
    return len((set(validation) | set(test)) & set(before) - set(training))


@pytest.mark.parametrize(
    ("day", "split", "leaks"),
    [
        (10, TIME, 0),  # the same log again
        (11, TIME, 0),
        (9, TIME, 12),
        (10, TIME | {"test_days": 3}, 24),
        (10, TIME | {"validation_days": 2}, 12),
        (10, TIME | {"test_days": 2, "validation_days": 0}, 0),
    ],
)
def test_a_split_by_time_leaks_only_if_it_moves_back(tmp_path: Path, day: int, split: dict[str, Any], leaks: int) -> None:
    events = log_of(days=11)
    champion = ingest_run(tmp_path / "champion", until(events, 10), split=TIME)
    current = ingest_run(tmp_path / "current", until(events, day), split=split)
    assert count_leaked_events(current, champion=champion) == trained_and_held_out(champion, current) == leaks


def test_new_and_renumbered_users_neither_add_nor_hide_leaked_events(tmp_path: Path) -> None:
    events = log_of()
    champion = ingest_run(tmp_path / "champion", events, split=LAST)
    renumbered = [("a new one", "i1", START + minute) for minute in range(60)] + events
    current = ingest_run(tmp_path / "current", renumbered, split=LAST)
    assert read_store(current).users[0] == "a new one"
    assert count_leaked_events(current, champion=champion) == 0
    moved = ingest_run(tmp_path / "moved", [event for event in renumbered if event[2] < START + 9 * DAY_US], split=LAST)
    # The validation event of each user.
    assert count_leaked_events(moved, champion=champion) == trained_and_held_out(champion, moved) == 12


def test_another_kind_of_split_leaks_the_training_events_that_it_holds_out(tmp_path: Path) -> None:
    events = [event for event in log_of() if event[0] != "u3" or event[2] < START + 5 * DAY_US]  # u3 has been away
    by_time = ingest_run(tmp_path / "by time", events, split=TIME)
    by_user = ingest_run(tmp_path / "by user", events, split=LAST)
    assert count_leaked_events(by_user, champion=by_time) == trained_and_held_out(by_time, by_user) == 2  # the last two of u3
    longer = ingest_run(tmp_path / "longer", log_of(days=11), split=LAST)
    assert count_leaked_events(by_time, champion=longer) == trained_and_held_out(longer, by_time) == 11  # a day of all others


def test_a_growing_log_leaks_nothing_although_some_users_are_split_for_the_first_time(tmp_path: Path) -> None:
    events = [("new", "i1", START), ("new", "i2", START + 9 * DAY_US), *log_of()]
    champion = ingest_run(tmp_path / "champion", events, split=LAST)
    current = ingest_run(tmp_path / "current", [*events, ("new", "i3", START + 10 * DAY_US)], split=LAST)
    assert trained_and_held_out(champion, current) == 1  # the validation event of the new user
    assert count_leaked_events(current, champion=champion) == 0


def test_without_times_a_pair_in_the_training_split_of_this_run_is_no_leak(tmp_path: Path) -> None:
    old, new = [("u1", "a", 1), ("u2", "b", 1), ("u2", "c", 1)], [("u1", "a", 2), ("u2", "d", 2)]
    settings: dict[str, Any] = {"timestamp_column": None}
    test = write_log(tmp_path / "test.parquet", new)
    split = {"kind": "files", "test_paths": test}
    champion = ingest_run(tmp_path / "champion", [*old, ("u2", "d", 1)], split=split, **settings)
    current = ingest_run(tmp_path / "current", old, split=split, **settings)
    assert count_leaked_events(champion, champion=champion) == 0  # (u1, a) and (u2, d) are in both parts of its own
    assert count_leaked_events(current, champion=champion) == 1


def test_a_changed_file_of_the_champion_is_an_error(tmp_path: Path) -> None:
    champion = ingest_run(tmp_path / "champion", log_of(), split=TIME)
    path = champion.path("train_end.npy")
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(StageError, match=r"train_end\.npy: the file has changed since it was written; set training.warm_start"):
        count_leaked_events(champion, champion=champion)
