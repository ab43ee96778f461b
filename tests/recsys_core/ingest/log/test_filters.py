"""Filters of events (window, duplicates, bots, minimums, caps) compared with the same rules in plain Python."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.manifests import InteractionsManifest
from recsys_core.units import DAY_US
from tests.recsys_core.ingest.interaction_logs import Event, ingest, read_store, write_log
from tests.recsys_core.ingest.parquet_files import raises_input_error

LEAVE_LAST_OUT = {"kind": "leave_last_out"}
event_lists = st.lists(
    st.tuples(st.integers(0, 5), st.integers(10, 15), st.integers(0, 8).map(lambda day: day * DAY_US)), min_size=6, max_size=40
)


def sorted_events_of(manifest: InteractionsManifest) -> list[Event]:
    """Return the sorted events of all splits."""
    return sorted(event for split_events in read_store(manifest).splits for event in split_events)


def events_above_minimums(events: list[Event], *, min_user_events: int, min_item_events: int) -> list[Event]:
    """Return the largest part of the log in which every user and every item has the minimum number of events."""
    while True:
        count_by_user, count_by_item = (Counter(event[id_index] for event in events) for id_index in (0, 1))
        remaining_events = [
            event
            for event in events
            if count_by_user[event[0]] >= min_user_events and count_by_item[event[1]] >= min_item_events
        ]
        if remaining_events == events:
            return events
        events = remaining_events


@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much])  # many logs lose all events
@given(log=event_lists, min_user_events=st.integers(1, 4), min_item_events=st.integers(1, 4))
def test_the_minimums_of_users_and_items_both_hold_after_the_filter(
    tmp_path_factory: pytest.TempPathFactory, log: list[Event], min_user_events: int, min_item_events: int
) -> None:
    expected_events = events_above_minimums(log, min_user_events=min_user_events, min_item_events=min_item_events)
    assume(all(len({event[id_index] for event in expected_events}) > 1 for id_index in (0, 1)))
    assume(max(Counter(user for user, _, _ in expected_events).values()) >= 3)  # otherwise no user has a test event
    folder = tmp_path_factory.mktemp("core")
    filter_settings = {"min_user_events": min_user_events, "min_item_events": min_item_events}
    manifest = ingest(folder / "stage", write_log(folder / "log.parquet", log), split=LEAVE_LAST_OUT, filter=filter_settings)
    assert sorted_events_of(manifest) == sorted(expected_events)
    assert manifest.num_removed_events_by_filter == (
        {"rare": len(log) - len(expected_events)} if len(expected_events) < len(log) else {}
    )
    assert set(read_store(manifest).users) == {user for user, _, _ in expected_events}
    assert set(read_store(manifest).items) == {item for _, item, _ in expected_events}


LOG = [
    *((1, item, day * DAY_US) for day, item in enumerate((10, 11, 10, 12, 10))),
    *((2, item, day * DAY_US) for day, item in ((3, 10), (3, 10), (4, 11), (4, 12))),
    *((9, 10 + number % 3, number * DAY_US // 10) for number in range(30)),
]  # fmt: skip
"""User, item and time of each event. User 9 has 30 events and is a bot if `bot_threshold` is 10."""
FILTER_CASES = {
    "a rolling window": (
        {"window_days": 2.5},
        lambda log: [event for event in log if event[2] > 4 * DAY_US - 2.5 * DAY_US],
        "outside_window",
    ),
    "an end of the log": (
        {"until": "1970-01-04T00:00:00"},
        lambda log: [event for event in log if event[2] <= 3 * DAY_US],
        "outside_window",
    ),
    "a window that ends earlier": (
        {"until": "1970-01-04T00:00:00", "window_days": 2},
        lambda log: [event for event in log if DAY_US < event[2] <= 3 * DAY_US],
        "outside_window",
    ),
    "exact repeats": ({"duplicates": "exact"}, lambda log: list(dict.fromkeys(log)), "duplicates"),
    "the first event with an item": (
        {"duplicates": "first"},
        lambda log: [(*pair, min(time for *ids, time in log if tuple(ids) == pair)) for pair in {event[:2] for event in log}],
        "duplicates",
    ),
    "the last event with an item": (
        {"duplicates": "last"},
        lambda log: [(*pair, max(time for *ids, time in log if tuple(ids) == pair)) for pair in {event[:2] for event in log}],
        "duplicates",
    ),
    "a cap on a user": (
        {"max_user_events": 3},
        # The events of each user are sorted by time.
        lambda log: [event for user in (1, 2, 9) for event in [event for event in log if event[0] == user][-3:]],
        "over_cap",
    ),
}
"""For each case: filter settings, the same filter in plain Python, and the name under which removed events are counted."""


@pytest.mark.parametrize("case", FILTER_CASES)
def test_a_filter_keeps_the_matching_events_and_counts_the_removed_events(tmp_path: Path, case: str) -> None:
    filter_settings, filter_events, filter_name = FILTER_CASES[case]
    manifest = ingest(
        tmp_path / "stage", write_log(tmp_path / "log.parquet", LOG), split=LEAVE_LAST_OUT, filter=filter_settings
    )
    expected_events = sorted(filter_events(LOG))
    stored_events = sorted_events_of(manifest)
    assert sorted((user, time) for user, _, time in stored_events) == sorted((user, time) for user, _, time in expected_events)
    if filter_name != "over_cap":  # if events have the same time, their item rows decide which events stay
        assert stored_events == expected_events
    assert manifest.num_removed_events_by_filter == {filter_name: len(LOG) - len(expected_events)}


def test_users_above_the_bot_threshold_are_removed_with_their_events(tmp_path: Path) -> None:
    manifest = ingest(
        tmp_path / "stage", write_log(tmp_path / "log.parquet", LOG), split=LEAVE_LAST_OUT, filter={"bot_threshold": 10}
    )
    assert read_store(manifest).users == [1, 2]
    assert manifest.num_removed_events_by_filter == {"bot_users": 1, "bot_events": 30}


@pytest.mark.parametrize("filter_settings", [{}, {"max_user_events": 3}, {"duplicates": "last"}])
def test_equal_events_are_held_out_independently_of_their_order_in_the_file(
    tmp_path: Path, filter_settings: dict[str, object]
) -> None:
    log = [(user, item, 5) for user in (1, 2) for item in (10, 10, 11, 11, 12, 12)]
    weights = [float(number) for number in range(len(log))]
    weights_by_order = []
    for name, step in (("original", 1), ("reversed", -1)):
        path = write_log(tmp_path / f"{name}.parquet", log[::step], w=weights[::step])
        manifest = ingest(tmp_path / name, path, split=LEAVE_LAST_OUT, weight_column="w", filter=filter_settings)
        weights_by_order.append(np.load(manifest.path("event_weight.npy")).tolist())
    assert weights_by_order[0] == weights_by_order[1]


@pytest.mark.parametrize("duplicates", ["exact", "first", "last"])
def test_an_event_in_both_the_training_and_the_test_files_stays_in_training(tmp_path: Path, duplicates: str) -> None:
    log = [(user, item, user + item) for user in (1, 2) for item in (10, 11, 12)]
    train_path, test_path = write_log(tmp_path / "train.parquet", log), write_log(tmp_path / "test.parquet", [*log, (1, 13, 9)])
    manifest = ingest(
        tmp_path / "stage", train_path, split={"kind": "files", "test_paths": (test_path,)}, filter={"duplicates": duplicates}
    )
    assert [*map(sorted, read_store(manifest).splits)] == [log, [], [(1, 13, 9)]]


@pytest.mark.parametrize(
    "rejected_settings",
    [
        {"max_future_days": float("inf")},
        {"filter": {"window_days": float("inf")}},
        {"split": {"kind": "time", "test_days": float("inf")}},
        {"label_column": "label", "label_threshold": float("nan")},
        {"label_column": "label", "label_threshold": 1.0, "label_range": (0.0, float("inf"))},
    ],
)
def test_a_setting_that_is_not_a_finite_number_is_rejected(rejected_settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="should be a finite number"):
        InteractionsConfig.model_validate({"paths": ("log.parquet",), "timestamp_column": "t"} | rejected_settings)


def test_a_filter_that_removes_all_events_is_rejected(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.parquet", LOG)
    with raises_input_error(path, "interactions.filter removes all events; relax it"):
        ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT, filter={"min_user_events": 100})
    with raises_input_error(path, "column 'user_id': the log has a single user"):
        ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT, filter={"min_user_events": 10})


def test_weights_and_context_stay_with_their_events(tmp_path: Path) -> None:
    times = list(range(40))
    log = [(number % 4, number % 7, time) for number, time in enumerate(times)]
    weights, devices = [number / 8 for number in times], [f"d{number}" for number in times]
    path = write_log(tmp_path / "log.parquet", log, w=weights, **{"de'v\"ice": devices})
    column_settings = {"weight_column": "w", "context_columns": ("de'v\"ice", "t")}
    manifest = ingest(tmp_path / "stage", path, split=LEAVE_LAST_OUT, **column_settings)
    stored_times = np.load(manifest.path("event_time.npy"))
    assert np.load(manifest.path("event_weight.npy")).tolist() == [weights[time] for time in stored_times]
    context = pq.read_table(manifest.path("context.parquet"))
    assert context.column_names == ["de'v\"ice", "t"]
    assert context.column(0).to_pylist() == [devices[time] for time in stored_times]
    assert context.column("t").to_pylist() == stored_times.tolist()


@pytest.mark.parametrize(
    ("rejected_settings", "message"),
    [
        ({"filter": {"window_days": 3}, "order_column": "t"}, "filter.window_days needs timestamp_column"),
        ({"filter": {"max_user_events": 3}}, "need an order of the events; set timestamp_column or order_column"),
        ({"label_range": (1, 5), "timestamp_column": "t"}, "label_range is set, but label_column is not"),
        ({"label_range": (5, 1), "label_column": "label", "label_threshold": 1, "timestamp_column": "t"}, "below the second"),
        (
            {"split": {"kind": "files", "test_paths": "t.parquet", "validation_unit": "item"}},
            "validation_unit is item, but validation_share is 0",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_rejected(rejected_settings: dict[str, object], message: str) -> None:
    split = {"kind": "files", "test_paths": "test.parquet"}
    with pytest.raises(ValidationError, match=message):
        InteractionsConfig(**{"paths": "log.parquet", "split": split} | rejected_settings)


def test_the_test_period_ends_with_the_newest_event_above_the_label_threshold(tmp_path: Path) -> None:
    log = [(1, 1, 0), (2, 2, 0), (1, 3, 2 * DAY_US), (1, 4, 9 * DAY_US)]
    path = write_log(tmp_path / "a.parquet", log, stars=[5, 5, 5, 1])
    split = {"kind": "time", "validation_days": 0}
    manifest = ingest(tmp_path / "stage", path, split=split, label_column="stars", label_threshold=3)
    _, _, test_events = read_store(manifest).splits
    assert test_events == [log[2]]
