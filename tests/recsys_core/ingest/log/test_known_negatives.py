"""Known negatives of the store compared with plain Python over the same rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.dataset.events import EventStore
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.manifests import InteractionsManifest
from recsys_core.units import DAY_US
from tests.recsys_core.ingest.interaction_logs import Event, Id, SplitEvents, ingest, leave_last_out, split_by_time, write_log
from tests.recsys_core.models.error_messages import raises_message

LABELS: dict[str, Any] = {"label_column": "stars", "label_threshold": 3}
TIME = {"kind": "time", "test_days": 1, "validation_days": 1}
LAST_OUT = {"kind": "leave_last_out"}
Row = tuple[Id, Id, int, int]
"""User, item, time, label."""
Negatives = dict[Id, tuple[list[Id], list[Id], list[Id]]]
"""Items of the known negatives by user and split, oldest first."""
rows = st.tuples(st.sampled_from("abc"), st.sampled_from("uvwxyz"), st.integers(0, 11), st.integers(1, 5))
logs = st.lists(rows, min_size=1, max_size=40)


def write_rows(path: Path, log: Sequence[Row]) -> str:
    return write_log(path, [row[:3] for row in log], stars=[row[3] for row in log])


def stored_negatives(manifest: InteractionsManifest) -> tuple[Negatives, list[int]]:
    """Return the known negatives of a store, and the index of the event of each."""
    arrays = {name: np.load(manifest.path(f"negative_{name}.npy")).tolist() for name in ("offset", "item", "event")}
    users, items = (pq.read_table(manifest.path(f"{side}.parquet"))["id"].to_pylist() for side in ("users", "items"))
    assert len(arrays["offset"]) == 3 * len(users) + 1
    assert arrays["offset"][-1] == len(arrays["item"]) == len(arrays["event"]) == manifest.num_known_negatives
    negatives = {
        user: tuple(
            [items[row] for row in arrays["item"][slice(*arrays["offset"][3 * user_row + split : 3 * user_row + split + 2])]]
            for split in range(3)
        )
        for user_row, user in enumerate(users)
    }
    return negatives, arrays["event"]


def check_negatives(
    manifest: InteractionsManifest, log: Sequence[Row], *, parts: SplitEvents, starts: dict[Id, list[int]]
) -> None:
    """Compare the store with plain Python. starts: times from which a negative of a user is in the splits 1 and 2."""
    negatives, event_indices = stored_negatives(manifest)
    catalogue = {item for part in parts for _, item, _ in part}
    positions, counts = iter(event_indices), np.diff(np.load(manifest.path("user_offset.npy")))
    block_start = 0
    assert sorted(event_indices) == event_indices
    for user_row, user in enumerate(negatives):
        own: list[list[Event]] = [[event for event in part if event[0] == user] for part in parts]
        first_time: dict[Id, int] = {}
        for owner, item, time, label in log:
            if owner == user and label < 3 and item in catalogue:
                first_time[item] = min(time, first_time.get(item, time))
        for split, stored in enumerate(negatives[user]):
            liked = {item for part in own[: split + 1] for _, item, _ in part}
            expected = [
                item
                for item, time in first_time.items()
                if sum(time >= start for start in starts[user]) == split and item not in liked
            ]
            assert sorted(stored) == sorted(expected)
            assert [first_time[item] for item in stored] == sorted(first_time[item] for item in stored)
            for item in stored:
                assert next(positions) == block_start + sum(time < first_time[item] for _, _, time in own[split])
            block_start += len(own[split])
        assert block_start == sum(counts[: user_row + 1])


@settings(max_examples=25, deadline=None)
@given(log=logs)
def test_known_negatives_of_a_split_by_time_are_those_of_plain_python(
    log: list[Row], tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Two users with training and test events, so that every log can be split.
    log = [(user, item, time * DAY_US // 3, label) for user, item, time, label in log]
    log += [("p", "u", 0, 5), ("q", "v", 0, 5), ("p", "w", 4 * DAY_US, 5)]
    folder = tmp_path_factory.mktemp("time")
    manifest = ingest(folder / "stage", write_rows(folder / "log.parquet", log), split=TIME, explicit_negatives=True, **LABELS)
    events = [row[:3] for row in log if row[3] >= 3]
    newest = max(time for _, _, time in events)
    starts = [newest - 2 * DAY_US + 1, newest - DAY_US + 1]  # a period starts after the end of the period before
    parts = split_by_time(events, test_days=1, validation_days=1)
    check_negatives(manifest, log, parts=parts, starts={user: starts for user, _, _ in events})


@settings(max_examples=25, deadline=None)
@given(log=logs)
def test_known_negatives_of_leave_last_out_end_before_the_held_out_events_of_the_user(
    log: list[Row], tmp_path_factory: pytest.TempPathFactory
) -> None:
    log += [("p", item, time, 5) for time, item in enumerate("uvw")] + [("q", "v", 0, 5)]
    folder = tmp_path_factory.mktemp("last")
    path = write_rows(folder / "log.parquet", log)
    manifest = ingest(
        folder / "stage", path, split=LAST_OUT, explicit_negatives=True, timestamp_column=None, order_column="t", **LABELS
    )
    parts = leave_last_out([row[:3] for row in log if row[3] >= 3], min_events=3)
    held_out = [{user: time for user, _, time in part} for part in parts[1:]]
    starts = {user: [times[user] for times in held_out if user in times] for user, *_ in log}
    check_negatives(manifest, log, parts=parts, starts=starts)


def test_each_file_is_a_split_and_the_validation_share_holds_out_negatives_of_the_same_items(tmp_path: Path) -> None:
    items = range(200)
    train = write_rows(
        tmp_path / "train.parquet", [row for i in items for row in ((1, i, i, 5), (2, i, i, 1), (2, 1000 + i, i, 5))]
    )
    test = write_rows(tmp_path / "test.parquet", [(1, 500, 0, 5), (1, 1000, 0, 1), (2, 501, 0, 5)])
    split = {"kind": "files", "test_paths": test, "validation_share": 0.3, "validation_unit": "item"}
    manifest = ingest(tmp_path / "stage", train, split=split, explicit_negatives=True, **LABELS)
    negatives, _ = stored_negatives(manifest)
    arrays = {name: np.load(manifest.path(f"{name}.npy")) for name in ("train_end", "validation_end", "event_item")}
    ids = pq.read_table(manifest.path("items.parquet"))["id"].to_pylist()
    row = pq.read_table(manifest.path("users.parquet"))["id"].to_pylist().index(1)
    validation = {ids[item] for item in arrays["event_item"][arrays["train_end"][row] : arrays["validation_end"][row]]}
    assert 30 < len(validation) < 90
    assert set(negatives[2][1]) == validation and set(negatives[2][0]) == set(items) - validation
    assert negatives[1] == ([], [], [1000])


def test_a_log_without_an_order_has_no_event_of_a_negative(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.parquet", [(1, 7, 0, 5), (1, 8, 0, 1), (2, 8, 0, 5), (2, 7, 0, 1), (1, 7, 0, 1)])
    test = write_rows(tmp_path / "test.parquet", [(1, 9, 0, 5), (2, 9, 0, 1)])
    manifest = ingest(
        tmp_path / "stage",
        train,
        split={"kind": "files", "test_paths": test},
        timestamp_column=None,
        explicit_negatives=True,
        **LABELS,
    )
    assert "negative_event.npy" not in manifest.files and manifest.num_known_negatives == 3
    known_negatives = EventStore.open(manifest).known_negatives
    assert known_negatives is not None and known_negatives.event_L is None
    assert known_negatives.num_train_negatives_U.tolist() == [1, 1]


def test_events_splits_and_rows_are_those_of_a_log_without_its_negatives(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    log = [
        (int(user), f"i{item}", int(time), int(label)) for user, item, time, label in rng.integers(1, [9, 30, 99, 6], (400, 4))
    ]
    path = write_rows(tmp_path / "log.parquet", [*log, (77, "only negative", 5, 1)])
    settings = {"split": LAST_OUT, **LABELS, "filter": {"min_item_events": 3, "max_user_events": 20}}
    ordinary = ingest(tmp_path / "without", path, **settings)
    manifest = ingest(tmp_path / "with", path, explicit_negatives=True, **settings)
    assert manifest.num_known_negatives > 50 and ordinary.num_known_negatives == 0
    compared_files = [name for name in ordinary.files if not name.startswith("parts/") and not name.endswith("_ids.parquet")]
    assert {name: ordinary.files[name] for name in compared_files} == {name: manifest.files[name] for name in compared_files}
    assert manifest.files.keys() - ordinary.files.keys() - {part.file_name for part in manifest.parts} == {
        f"negative_{name}.npy" for name in ("offset", "item", "event")
    }
    excluded = {"files", "folder", "fingerprint", "lineage", "seconds", "parts", "num_known_negatives"}
    assert manifest.model_dump(exclude=excluded) == ordinary.model_dump(exclude=excluded)


def test_without_the_setting_the_fingerprints_do_not_contain_it() -> None:
    config = InteractionsConfig(paths=("log",), timestamp_column="t", **LABELS)
    assert "explicit_negatives" not in config.result_settings()
    assert config.model_copy(update={"explicit_negatives": True}).result_settings()["explicit_negatives"] is True


def test_the_filters_by_time_apply_to_negatives(tmp_path: Path) -> None:
    log = [("a", "x", day * DAY_US, 5) for day in range(12)] + [("b", item, 11 * DAY_US, 5) for item in "xyz"]
    log += [("a", "y", 3 * DAY_US, 1), ("a", "y", 8 * DAY_US, 1), ("a", "z", 2 * DAY_US, 1), ("b", "y", 20 * DAY_US, 1)]
    path = write_rows(tmp_path / "log.parquet", log)
    manifest = ingest(
        tmp_path / "stage",
        path,
        split=TIME,
        explicit_negatives=True,
        filter={"until": "1970-01-12T00:00:00", "window_days": 6},
        **LABELS,
    )
    negatives, event_indices = stored_negatives(manifest)
    assert negatives == {"a": (["y"], [], []), "b": ([], [], [])}
    assert event_indices == [2]  # the events of the days 6 and 7 are earlier


def test_negatives_of_one_moment_are_in_another_order_for_each_user(tmp_path: Path) -> None:
    items = [f"i{index}" for index in range(5)]
    log = [(user, item, 2, 1) for user in range(20) for item in items]
    log += [(user, f"own{user}", time, 5) for user in range(20) for time in (1, 2, 3, 4)]
    log += [(20, item, 1, 5) for item in items]
    manifest = ingest(
        tmp_path / "stage", write_rows(tmp_path / "log.parquet", log), split=LAST_OUT, explicit_negatives=True, **LABELS
    )
    negatives, _ = stored_negatives(manifest)
    assert len({tuple(negatives[user][0]) for user in range(20)}) > 10


def test_a_log_without_a_label_below_the_threshold_has_no_known_negative(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "log.parquet", [(user, item, item, 5) for user in (1, 2) for item in range(4)])
    manifest = ingest(tmp_path / "stage", path, split=LAST_OUT, explicit_negatives=True, **LABELS)
    assert stored_negatives(manifest) == ({1: ([], [], []), 2: ([], [], [])}, [])


DAYS: list[list[Row]] = [
    [("ann", "x", 1, 5), ("bob", "x", 2, 4), ("ann", "y", 3, 1), ("bob", "w", 3, 2), ("dan", "x", 4, 1)],
    [("bob", "y", DAY_US, 5), ("ann", "z", DAY_US, 1), ("cat", "z", DAY_US + 1, 3), ("ann", "x", DAY_US + 2, 2)],
    [("ann", "z", 2 * DAY_US, 5), ("bob", "z", 2 * DAY_US + 1, 1), ("cat", "y", 2 * DAY_US + 2, 1)],
    [("dan", "w", 3 * DAY_US, 5), ("ann", "w", 3 * DAY_US + 1, 1), ("dan", "y", 3 * DAY_US + 2, 5), ("bob", "v", 1, 1)],
]


@pytest.mark.parametrize("split", [{"kind": "time", "test_days": 0.5, "validation_days": 0.25}, LAST_OUT])
def test_a_run_with_a_new_day_gives_the_negatives_of_a_complete_ingest(tmp_path: Path, split: dict[str, Any]) -> None:
    """On the last day, the item w and the user dan get their first event, and their negatives of the first day count."""
    extra = [("cat", item, time, 5) for time, item in enumerate("xyzx")] + [("ann", "x", 5, 5), ("bob", "x", 9, 5)]
    manifest, paths = None, []
    for number, day in enumerate([DAYS[0] + extra, *DAYS[1:]]):
        write_rows(tmp_path / "in" / f"day{number}.parquet", day)
        paths.append(str(tmp_path / "in" / f"day{number}.parquet"))
        if number > 0:
            manifest = ingest(
                tmp_path / f"run{number}", *paths, split=split, previous=manifest, explicit_negatives=True, **LABELS
            )
    assert manifest is not None and (manifest.num_files_read, manifest.run_number) == (1, 3)
    whole = ingest(tmp_path / "whole", *paths, split=split, explicit_negatives=True, **LABELS)
    negatives, _ = stored_negatives(manifest)
    expected, _ = stored_negatives(whole)
    assert {user: negatives[user] for user in sorted(negatives)} == {user: expected[user] for user in sorted(expected)}
    assert "w" in negatives["bob"][0] and "x" in negatives["dan"][0] and manifest.num_known_negatives >= 4


def test_the_switch_reads_the_files_again_and_keeps_the_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "log.parquet", [row for day in DAYS for row in day])
    first = ingest(tmp_path / "run1", path, split=TIME, **LABELS)
    second = ingest(tmp_path / "run2", path, split=TIME, previous=first, explicit_negatives=True, **LABELS)
    third = ingest(tmp_path / "run3", path, split=TIME, previous=second, **LABELS)
    assert [run.num_files_read for run in (second, third)] == [1, 1] and second.num_known_negatives > 0
    for side in ("users", "items"):
        ids = [pq.read_table(run.path(f"{side}.parquet"))["id"].to_pylist() for run in (first, second, third)]
        assert ids[0] == ids[1] == ids[2]


def test_the_switch_without_a_label_column_is_rejected() -> None:
    with raises_message("explicit_negatives is true, but label_column is not set, so no event is a negative; set label_column"):
        InteractionsConfig(paths=("log",), timestamp_column="t", explicit_negatives=True)
