"""Number of held-out events on which the champion was trained, compared with a count over sets of events."""

import random
from pathlib import Path
from typing import Any

import pytest

from recsys_core.errors import StageError
from recsys_core.manifests import InteractionsManifest
from recsys_core.training.warm.leaked_events import count_leaked_events
from recsys_core.units import DAY_US
from tests.recsys_core.ingest.interaction_logs import Event, ingest, read_store, write_log

TIME_SPLIT = {"kind": "time", "test_days": 1, "validation_days": 1}
LAST_OUT_SPLIT = {"kind": "leave_last_out"}
START_US = 20_000 * DAY_US


def daily_log(*, num_users: int = 12, num_days: int = 10) -> list[Event]:
    """Return one event per user and day. Each user has their own minute of the day, and items repeat."""
    generator = random.Random(5)
    return [
        (f"u{user}", f"i{generator.randrange(8)}", START_US + day * DAY_US + user * 60_000_000)
        for day in range(num_days)
        for user in range(num_users)
    ]


def events_before(events: list[Event], day: int) -> list[Event]:
    return [(user, item, time_us) for user, item, time_us in events if time_us < START_US + day * DAY_US]


def ingest_run(folder: Path, events: list[Event], *, split: dict[str, Any], **settings: Any) -> InteractionsManifest:
    folder.mkdir()
    return ingest(folder / "interactions", write_log(folder / "log.parquet", events), split=split, **settings)


def expected_num_leaks(champion: InteractionsManifest, current: InteractionsManifest) -> int:
    """Return the number of training events of the champion that the current run holds out and does not train on."""
    (champion_train, _, _), (train, validation, test) = read_store(champion).splits, read_store(current).splits
    return len((set(validation) | set(test)) & set(champion_train) - set(train))


@pytest.mark.parametrize(
    ("num_days", "split", "num_leaks"),
    [
        (10, TIME_SPLIT, 0),  # the log of the champion
        (11, TIME_SPLIT, 0),
        (9, TIME_SPLIT, 12),  # each of the 12 users has one event per day
        (10, TIME_SPLIT | {"test_days": 3}, 24),
        (10, TIME_SPLIT | {"validation_days": 2}, 12),
        (10, TIME_SPLIT | {"test_days": 2, "validation_days": 0}, 0),
    ],
)
def test_with_a_split_by_time_events_leak_only_if_the_champion_was_trained_on_later_days(
    tmp_path: Path, num_days: int, split: dict[str, Any], num_leaks: int
) -> None:
    events = daily_log(num_days=11)
    champion = ingest_run(tmp_path / "champion", events_before(events, 10), split=TIME_SPLIT)
    current = ingest_run(tmp_path / "current", events_before(events, num_days), split=split)
    assert count_leaked_events(current, champion=champion) == expected_num_leaks(champion, current) == num_leaks


def test_new_and_renumbered_users_neither_add_nor_hide_leaked_events(tmp_path: Path) -> None:
    events = daily_log()
    champion = ingest_run(tmp_path / "champion", events, split=LAST_OUT_SPLIT)
    events_with_new_user = [("new", "i1", START_US + microsecond) for microsecond in range(60)] + events
    current = ingest_run(tmp_path / "current", events_with_new_user, split=LAST_OUT_SPLIT)
    assert read_store(current).users[0] == "new"  # so the other users have other numbers
    assert count_leaked_events(current, champion=champion) == 0
    shorter_run = ingest_run(tmp_path / "shorter", events_before(events_with_new_user, 9), split=LAST_OUT_SPLIT)
    # The validation event of each old user is a training event of the champion.
    assert count_leaked_events(shorter_run, champion=champion) == expected_num_leaks(champion, shorter_run) == 12


def test_with_another_kind_of_split_held_out_events_that_the_champion_trained_on_are_counted(tmp_path: Path) -> None:
    events = [(user, item, time_us) for user, item, time_us in daily_log() if user != "u3" or time_us < START_US + 5 * DAY_US]
    run_split_by_time = ingest_run(tmp_path / "by time", events, split=TIME_SPLIT)
    run_split_by_user = ingest_run(tmp_path / "by user", events, split=LAST_OUT_SPLIT)
    # The last two events of u3 are old, so a split by time trains on them.
    assert (
        count_leaked_events(run_split_by_user, champion=run_split_by_time)
        == expected_num_leaks(run_split_by_time, run_split_by_user)
        == 2
    )
    longer_run = ingest_run(tmp_path / "longer", daily_log(num_days=11), split=LAST_OUT_SPLIT)
    # On day 8, all users but u3 have a validation event in the split by time. The longer log trains on these events.
    assert (
        count_leaked_events(run_split_by_time, champion=longer_run) == expected_num_leaks(longer_run, run_split_by_time) == 11
    )


def test_held_out_events_of_a_user_without_held_out_events_in_the_champion_are_not_counted(tmp_path: Path) -> None:
    events = [("short", "i1", START_US), ("short", "i2", START_US + 9 * DAY_US), *daily_log()]
    champion = ingest_run(tmp_path / "champion", events, split=LAST_OUT_SPLIT)
    current = ingest_run(tmp_path / "current", [*events, ("short", "i3", START_US + 10 * DAY_US)], split=LAST_OUT_SPLIT)
    assert expected_num_leaks(champion, current) == 1  # i2, now the validation event
    assert count_leaked_events(current, champion=champion) == 0


def test_without_timestamps_a_pair_that_the_current_run_also_trains_on_is_no_leak(tmp_path: Path) -> None:
    train_events, test_events = [("u1", "a", 1), ("u2", "b", 1), ("u2", "c", 1)], [("u1", "a", 2), ("u2", "d", 2)]
    settings: dict[str, Any] = {"timestamp_column": None}
    split = {"kind": "files", "test_paths": write_log(tmp_path / "test.parquet", test_events)}
    champion = ingest_run(tmp_path / "champion", [*train_events, ("u2", "d", 1)], split=split, **settings)
    current = ingest_run(tmp_path / "current", train_events, split=split, **settings)
    assert count_leaked_events(champion, champion=champion) == 0  # (u1, a) and (u2, d) are in its training and its test split
    assert count_leaked_events(current, champion=champion) == 1  # (u2, d), which only the champion trains on


def test_a_changed_file_of_the_champion_is_an_error(tmp_path: Path) -> None:
    champion = ingest_run(tmp_path / "champion", daily_log(), split=TIME_SPLIT)
    split_path = champion.path("train_end.npy")
    split_path.write_bytes(split_path.read_bytes() + b" ")
    with pytest.raises(StageError, match=r"train_end\.npy: the file has changed since it was written; set training.warm_start"):
        count_leaked_events(champion, champion=champion)
