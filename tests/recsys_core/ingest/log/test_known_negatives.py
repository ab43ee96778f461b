"""Known negatives, which are events below the label threshold, compared with plain Python over the same rows."""

from collections.abc import Sequence
from itertools import pairwise
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
from tests.recsys_core.ingest.interaction_logs import (
    Event,
    Id,
    SplitEvents,
    ingest,
    leave_last_out,
    read_store,
    split_by_time,
    write_log,
)
from tests.recsys_core.models.error_messages import raises_message

LABEL_SETTINGS: dict[str, Any] = {"label_column": "stars", "label_threshold": 3}
TIME_SPLIT = {"kind": "time", "test_days": 1, "validation_days": 1}
LEAVE_LAST_OUT = {"kind": "leave_last_out"}
LabelledEvent = tuple[Id, Id, int, int]
"""User, item, time, label."""
Negatives = dict[Id, tuple[list[Id], list[Id], list[Id]]]
"""Items of the known negatives by user and split, oldest first."""
labelled_events = st.tuples(st.sampled_from("abc"), st.sampled_from("uvwxyz"), st.integers(0, 11), st.integers(1, 5))
logs = st.lists(labelled_events, min_size=1, max_size=40)


def write_labelled_log(path: Path, log: Sequence[LabelledEvent]) -> str:
    """Write a log. The labels are in the column stars."""
    return write_log(path, [(user, item, time) for user, item, time, _ in log], stars=[label for *_, label in log])


def stored_negatives(manifest: InteractionsManifest) -> tuple[Negatives, list[int]]:
    """Return the known negatives of a store, and for each negative the index of the first event that is not older."""
    offset, item_rows, event_indices = (
        np.load(manifest.path(f"negative_{name}.npy")).tolist() for name in ("offset", "item", "event")
    )
    users, items = (pq.read_table(manifest.path(f"{side}.parquet"))["id"].to_pylist() for side in ("users", "items"))
    assert len(offset) == 3 * len(users) + 1
    assert offset[-1] == len(item_rows) == len(event_indices) == manifest.num_known_negatives
    negative_items = [items[row] for row in item_rows]
    split_items = [negative_items[start:stop] for start, stop in pairwise(offset)]  # three lists for each user
    return {user: tuple(split_items[3 * row : 3 * row + 3]) for row, user in enumerate(users)}, event_indices


def assert_negatives(
    manifest: InteractionsManifest, log: Sequence[LabelledEvent], *, splits: SplitEvents, period_starts: dict[Id, list[int]]
) -> None:
    """Assert that the store has the known negatives that plain Python finds in the log.

    period_starts: for each user, the start times of the validation and test periods; empty if all events are training events.
    """
    negatives, event_indices = stored_negatives(manifest)
    catalogue = {item for split_events in splits for _, item, _ in split_events}
    event_index_iterator, num_events_U = iter(event_indices), np.diff(np.load(manifest.path("user_offset.npy")))
    split_start = 0
    assert sorted(event_indices) == event_indices
    for user_row, user in enumerate(negatives):
        user_splits: list[list[Event]] = [[event for event in split_events if event[0] == user] for split_events in splits]
        first_time_by_item: dict[Id, int] = {}
        for event_user, item, time, label in log:
            if event_user == user and label < 3 and item in catalogue:
                first_time_by_item[item] = min(time, first_time_by_item.get(item, time))
        for split_index, stored_items in enumerate(negatives[user]):
            items_with_event = {item for split_events in user_splits[: split_index + 1] for _, item, _ in split_events}
            expected_items = [
                item
                for item, time in first_time_by_item.items()
                if sum(time >= start for start in period_starts[user]) == split_index and item not in items_with_event
            ]
            assert sorted(stored_items) == sorted(expected_items)
            first_times = [first_time_by_item[item] for item in stored_items]
            assert first_times == sorted(first_times)
            for first_time in first_times:
                num_earlier_events = sum(time < first_time for _, _, time in user_splits[split_index])
                assert next(event_index_iterator) == split_start + num_earlier_events
            split_start += len(user_splits[split_index])
        assert split_start == sum(num_events_U[: user_row + 1])


@settings(max_examples=25)
@given(log=logs)
def test_known_negatives_of_a_split_by_time_equal_the_results_of_plain_python(
    log: list[LabelledEvent], tmp_path_factory: pytest.TempPathFactory
) -> None:
    log = [(user, item, time * DAY_US // 3, label) for user, item, time, label in log]
    # With these events, every log has training events of two users and a test event.
    log += [("p", "u", 0, 5), ("q", "v", 0, 5), ("p", "w", 4 * DAY_US, 5)]
    folder = tmp_path_factory.mktemp("time")
    manifest = ingest(
        folder / "stage",
        write_labelled_log(folder / "log.parquet", log),
        split=TIME_SPLIT,
        explicit_negatives=True,
        **LABEL_SETTINGS,
    )
    events = [(user, item, time) for user, item, time, label in log if label >= 3]
    newest_time = max(time for _, _, time in events)
    # An event exactly one day before the newest event is not in the last day.
    period_starts = [newest_time - 2 * DAY_US + 1, newest_time - DAY_US + 1]
    splits = split_by_time(events, test_days=1, validation_days=1)
    assert_negatives(manifest, log, splits=splits, period_starts={user: period_starts for user, _, _ in events})


@settings(max_examples=25)
@given(log=logs)
def test_with_leave_last_out_known_negatives_after_the_first_held_out_event_are_held_out(
    log: list[LabelledEvent], tmp_path_factory: pytest.TempPathFactory
) -> None:
    log += [("p", item, time, 5) for time, item in enumerate("uvw")] + [("q", "v", 0, 5)]
    folder = tmp_path_factory.mktemp("last")
    path = write_labelled_log(folder / "log.parquet", log)
    manifest = ingest(
        folder / "stage",
        path,
        split=LEAVE_LAST_OUT,
        explicit_negatives=True,
        timestamp_column=None,
        order_column="t",
        **LABEL_SETTINGS,
    )
    splits = leave_last_out([(user, item, time) for user, item, time, label in log if label >= 3], min_events=3)
    held_out_times = [{user: time for user, _, time in split_events} for split_events in splits[1:]]
    period_starts = {user: [time_by_user[user] for time_by_user in held_out_times if user in time_by_user] for user, *_ in log}
    assert_negatives(manifest, log, splits=splits, period_starts=period_starts)


def test_the_validation_share_holds_out_events_and_negatives_of_the_same_items(tmp_path: Path) -> None:
    items = range(200)
    # User 2 rejects the items that user 1 likes.
    log = [event for item in items for event in ((1, item, item, 5), (2, item, item, 1), (2, 1000 + item, item, 5))]
    train_path = write_labelled_log(tmp_path / "train.parquet", log)
    test_path = write_labelled_log(tmp_path / "test.parquet", [(1, 500, 0, 5), (1, 1000, 0, 1), (2, 501, 0, 5)])
    split = {"kind": "files", "test_paths": test_path, "validation_share": 0.3, "validation_unit": "item"}
    manifest = ingest(tmp_path / "stage", train_path, split=split, explicit_negatives=True, **LABEL_SETTINGS)
    negatives, _ = stored_negatives(manifest)
    validation_items = {item for user, item, _ in read_store(manifest).splits[1] if user == 1}
    assert 30 < len(validation_items) < 90  # 60 on average
    assert set(negatives[2][1]) == validation_items and set(negatives[2][0]) == set(items) - validation_items
    assert negatives[1] == ([], [], [1000])


def test_a_log_without_an_order_stores_no_event_indices_of_negatives(tmp_path: Path) -> None:
    train_path = write_labelled_log(
        tmp_path / "train.parquet", [(1, 7, 0, 5), (1, 8, 0, 1), (2, 8, 0, 5), (2, 7, 0, 1), (1, 7, 0, 1)]
    )
    test_path = write_labelled_log(tmp_path / "test.parquet", [(1, 9, 0, 5), (2, 9, 0, 1)])
    manifest = ingest(
        tmp_path / "stage",
        train_path,
        split={"kind": "files", "test_paths": test_path},
        timestamp_column=None,
        explicit_negatives=True,
        **LABEL_SETTINGS,
    )
    assert "negative_event.npy" not in manifest.files and manifest.num_known_negatives == 3
    known_negatives = EventStore.open(manifest).known_negatives
    assert known_negatives is not None and known_negatives.event_L is None
    assert known_negatives.num_train_negatives_U.tolist() == [1, 1]


def test_explicit_negatives_change_no_event_split_or_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    log = [
        (int(user), f"i{item}", int(time), int(label)) for user, item, time, label in rng.integers(1, [9, 30, 99, 6], (400, 4))
    ]
    path = write_labelled_log(tmp_path / "log.parquet", [*log, (77, "only negative", 5, 1)])
    settings = {"split": LEAVE_LAST_OUT, **LABEL_SETTINGS, "filter": {"min_item_events": 3, "max_user_events": 20}}
    plain_manifest = ingest(tmp_path / "without", path, **settings)
    manifest = ingest(tmp_path / "with", path, explicit_negatives=True, **settings)
    assert manifest.num_known_negatives > 50 and plain_manifest.num_known_negatives == 0
    compared_names = [
        name for name in plain_manifest.files if not name.startswith("parts/") and not name.endswith("_ids.parquet")
    ]
    assert all(manifest.files[name] == plain_manifest.files[name] for name in compared_names)
    assert manifest.files.keys() - plain_manifest.files.keys() - {part.file_name for part in manifest.parts} == {
        f"negative_{name}.npy" for name in ("offset", "item", "event")
    }
    excluded_fields = {"files", "folder", "fingerprint", "lineage", "seconds", "parts", "num_known_negatives"}
    assert manifest.model_dump(exclude=excluded_fields) == plain_manifest.model_dump(exclude=excluded_fields)


def test_explicit_negatives_are_part_of_the_fingerprint_only_if_true() -> None:
    config = InteractionsConfig(paths=("log",), timestamp_column="t", **LABEL_SETTINGS)
    assert "explicit_negatives" not in config.result_settings()
    assert config.model_copy(update={"explicit_negatives": True}).result_settings()["explicit_negatives"] is True


def test_the_filters_by_time_apply_to_negatives(tmp_path: Path) -> None:
    log = [("a", "x", day * DAY_US, 5) for day in range(12)] + [("b", item, 11 * DAY_US, 5) for item in "xyz"]
    log += [("a", "y", 3 * DAY_US, 1), ("a", "y", 8 * DAY_US, 1), ("a", "z", 2 * DAY_US, 1), ("b", "y", 20 * DAY_US, 1)]
    path = write_labelled_log(tmp_path / "log.parquet", log)
    manifest = ingest(
        tmp_path / "stage",
        path,
        split=TIME_SPLIT,
        explicit_negatives=True,
        filter={"until": "1970-01-12T00:00:00", "window_days": 6},
        **LABEL_SETTINGS,
    )
    negatives, event_indices = stored_negatives(manifest)
    assert negatives == {"a": (["y"], [], []), "b": ([], [], [])}
    assert event_indices == [2]  # the events of the days 6 and 7, with the indices 0 and 1, are earlier


def test_negatives_at_the_same_time_are_in_another_order_for_each_user(tmp_path: Path) -> None:
    items = [f"i{index}" for index in range(5)]
    log = [(user, item, 2, 1) for user in range(20) for item in items]
    log += [(user, f"own{user}", time, 5) for user in range(20) for time in (1, 2, 3, 4)]
    log += [(20, item, 1, 5) for item in items]
    manifest = ingest(
        tmp_path / "stage",
        write_labelled_log(tmp_path / "log.parquet", log),
        split=LEAVE_LAST_OUT,
        explicit_negatives=True,
        **LABEL_SETTINGS,
    )
    negatives, _ = stored_negatives(manifest)
    assert len({tuple(negatives[user][0]) for user in range(20)}) > 10


def test_a_log_without_labels_below_the_threshold_has_no_known_negatives(tmp_path: Path) -> None:
    path = write_labelled_log(tmp_path / "log.parquet", [(user, item, item, 5) for user in (1, 2) for item in range(4)])
    manifest = ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT, explicit_negatives=True, **LABEL_SETTINGS)
    assert stored_negatives(manifest) == ({1: ([], [], []), 2: ([], [], [])}, [])


EVENTS_BY_DAY: list[list[LabelledEvent]] = [
    [("ann", "x", 1, 5), ("bob", "x", 2, 4), ("ann", "y", 3, 1), ("bob", "w", 3, 2), ("dan", "x", 4, 1)],
    [("bob", "y", DAY_US, 5), ("ann", "z", DAY_US, 1), ("cat", "z", DAY_US + 1, 3), ("ann", "x", DAY_US + 2, 2)],
    [("ann", "z", 2 * DAY_US, 5), ("bob", "z", 2 * DAY_US + 1, 1), ("cat", "y", 2 * DAY_US + 2, 1)],
    [("dan", "w", 3 * DAY_US, 5), ("ann", "w", 3 * DAY_US + 1, 1), ("dan", "y", 3 * DAY_US + 2, 5), ("bob", "v", 1, 1)],
]


@pytest.mark.parametrize(
    "split", [{"kind": "time", "test_days": 0.5, "validation_days": 0.25}, LEAVE_LAST_OUT], ids=["time", "last"]
)
def test_an_incremental_ingest_has_the_negatives_of_a_complete_ingest(tmp_path: Path, split: dict[str, Any]) -> None:
    """The item w and the user dan have no event before the last day, so their negatives of the first day count only then."""
    extra_events = [("cat", item, time, 5) for time, item in enumerate("xyzx")] + [("ann", "x", 5, 5), ("bob", "x", 9, 5)]
    manifest, paths = None, []
    for day, events in enumerate([EVENTS_BY_DAY[0] + extra_events, *EVENTS_BY_DAY[1:]]):
        write_labelled_log(tmp_path / "in" / f"day{day}.parquet", events)
        paths.append(str(tmp_path / "in" / f"day{day}.parquet"))
        if day > 0:
            manifest = ingest(
                tmp_path / f"run{day}", *paths, split=split, previous=manifest, explicit_negatives=True, **LABEL_SETTINGS
            )
    assert manifest is not None and (manifest.num_files_read, manifest.run_number) == (1, 3)
    complete_manifest = ingest(tmp_path / "whole", *paths, split=split, explicit_negatives=True, **LABEL_SETTINGS)
    negatives, _ = stored_negatives(manifest)
    expected_negatives, _ = stored_negatives(complete_manifest)
    assert negatives == expected_negatives
    assert "w" in negatives["bob"][0] and "x" in negatives["dan"][0] and manifest.num_known_negatives >= 4


def test_a_change_of_explicit_negatives_reads_the_files_again_and_ids_keep_their_rows(tmp_path: Path) -> None:
    path = write_labelled_log(tmp_path / "log.parquet", [event for day in EVENTS_BY_DAY for event in day])
    first_manifest = ingest(tmp_path / "run1", path, split=TIME_SPLIT, **LABEL_SETTINGS)
    second_manifest = ingest(
        tmp_path / "run2", path, split=TIME_SPLIT, previous=first_manifest, explicit_negatives=True, **LABEL_SETTINGS
    )
    third_manifest = ingest(tmp_path / "run3", path, split=TIME_SPLIT, previous=second_manifest, **LABEL_SETTINGS)
    assert (second_manifest.num_files_read, third_manifest.num_files_read) == (1, 1)
    assert second_manifest.num_known_negatives > 0
    for side in ("users", "items"):
        ids = [
            pq.read_table(manifest.path(f"{side}.parquet"))["id"].to_pylist()
            for manifest in (first_manifest, second_manifest, third_manifest)
        ]
        assert ids[0] == ids[1] == ids[2]


def test_explicit_negatives_without_a_label_column_are_rejected() -> None:
    with raises_message("explicit_negatives is true, but label_column is not set, so no event is a negative; set label_column"):
        InteractionsConfig(paths=("log",), timestamp_column="t", explicit_negatives=True)
