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
from tests.recsys_core.ingest.parquet_files import input_error, write_parquet

LAST_OUT = {"kind": "leave_last_out"}
events = st.lists(
    st.tuples(st.integers(0, 5), st.integers(10, 15), st.integers(0, 8).map(lambda day: day * DAY_US)), min_size=6, max_size=40
)


def events_of(manifest: InteractionsManifest) -> list[Event]:
    return sorted(event for part in read_store(manifest).splits for event in part)


def core(log: list[Event], *, users: int, items: int) -> list[Event]:
    while True:
        by_user, by_item = (Counter(event[side] for event in log) for side in (0, 1))
        filtered = [event for event in log if by_user[event[0]] >= users and by_item[event[1]] >= items]
        if filtered == log:
            return log
        log = filtered


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])  # many logs have no core
@given(log=events, users=st.integers(1, 4), items=st.integers(1, 4))
def test_both_minimums_hold_at_the_end(
    tmp_path_factory: pytest.TempPathFactory, log: list[Event], users: int, items: int
) -> None:
    expected = core(log, users=users, items=items)
    assume(all(len({event[side] for event in expected}) > 1 for side in (0, 1)))
    assume(max(Counter(user for user, _, _ in expected).values()) >= 3)  # otherwise no user has a test event
    folder = tmp_path_factory.mktemp("core")
    chosen = {"min_user_events": users, "min_item_events": items}
    manifest = ingest(folder / "stage", write_log(folder / "log.parquet", log), split=LAST_OUT, filter=chosen)
    assert events_of(manifest) == sorted(expected)
    assert manifest.num_removed_events_by_filter == ({"rare": len(log) - len(expected)} if len(expected) < len(log) else {})
    assert set(read_store(manifest).users) == {user for user, _, _ in expected}
    assert set(read_store(manifest).items) == {item for _, item, _ in expected}


LOG = [
    *((1, item, day * DAY_US) for day, item in enumerate((10, 11, 10, 12, 10))),
    *((2, item, day * DAY_US) for day, item in ((3, 10), (3, 10), (4, 11), (4, 12))),
    *((9, 10 + number % 3, number * DAY_US // 10) for number in range(30)),
]  # fmt: skip
FILTERS = {
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
        lambda log: [(*key, min(time for *pair, time in log if tuple(pair) == key)) for key in {event[:2] for event in log}],
        "duplicates",
    ),
    "the last event with an item": (
        {"duplicates": "last"},
        lambda log: [(*key, max(time for *pair, time in log if tuple(pair) == key)) for key in {event[:2] for event in log}],
        "duplicates",
    ),
    "a cap on a user": (
        {"max_user_events": 3},
        lambda log: [
            event
            for user in (1, 2, 9)
            for event in sorted(
                (user_event for user_event in log if user_event[0] == user), key=lambda user_event: user_event[2]
            )[-3:]
        ],
        "over_cap",
    ),
}


@pytest.mark.parametrize("case", FILTERS)
def test_a_filter_keeps_the_matching_events_and_counts_the_others(tmp_path: Path, case: str) -> None:
    chosen, rule, reason = FILTERS[case]
    manifest = ingest(tmp_path / "stage", write_log(tmp_path / "log.parquet", LOG), split=LAST_OUT, filter=chosen)
    expected = sorted(rule(LOG))
    assert sorted((user, time) for user, _, time in events_of(manifest)) == sorted((user, time) for user, _, time in expected)
    if reason != "over_cap":  # of events at one time, which are the newest is settled by the vocabulary
        assert events_of(manifest) == expected
    assert manifest.num_removed_events_by_filter == {reason: len(LOG) - len(expected)}


def test_users_above_the_bot_threshold_are_removed_with_their_events(tmp_path: Path) -> None:
    manifest = ingest(
        tmp_path / "stage", write_log(tmp_path / "log.parquet", LOG), split=LAST_OUT, filter={"bot_threshold": 10}
    )
    assert read_store(manifest).users == [1, 2]
    assert manifest.num_removed_events_by_filter == {"bot_users": 1, "bot_events": 30}


@pytest.mark.parametrize("filters", [{}, {"max_user_events": 3}, {"duplicates": "last"}])
def test_equal_events_are_held_out_independently_of_their_order_in_the_file(tmp_path: Path, filters: dict[str, object]) -> None:
    log = [(user, item, 5) for user in (1, 2) for item in (10, 10, 11, 11, 12, 12)]
    weights = [float(number) for number in range(len(log))]
    stored = []
    for name, step in (("as it came", 1), ("turned around", -1)):
        path = write_log(tmp_path / f"{name}.parquet", log[::step], w=weights[::step])
        manifest = ingest(tmp_path / name, path, split=LAST_OUT, weight_column="w", filter=filters)
        stored.append(np.load(manifest.path("event_weight.npy")).tolist())
    assert stored[0] == stored[1]


@pytest.mark.parametrize("policy", ["exact", "first", "last"])
def test_an_event_in_both_the_training_and_the_test_files_stays_in_training(tmp_path: Path, policy: str) -> None:
    log = [(user, item, user + item) for user in (1, 2) for item in (10, 11, 12)]
    train, test = write_log(tmp_path / "train.parquet", log), write_log(tmp_path / "test.parquet", [*log, (1, 13, 9)])
    manifest = ingest(tmp_path / "stage", train, split={"kind": "files", "test_paths": (test,)}, filter={"duplicates": policy})
    assert [sorted(part) for part in read_store(manifest).splits] == [log, [], [(1, 13, 9)]]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_future_days": float("inf")},
        {"filter": {"window_days": float("inf")}},
        {"split": {"kind": "time", "test_days": float("inf")}},
        {"label_column": "l", "label_threshold": float("nan")},
        {"label_column": "l", "label_threshold": 1.0, "label_range": (0.0, float("inf"))},
    ],
)
def test_a_setting_that_is_no_finite_number_is_rejected(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="should be a finite number"):
        InteractionsConfig.model_validate({"paths": ("log.parquet",), "timestamp_column": "t"} | settings)


def test_a_filter_that_removes_all_events_is_rejected(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.parquet", LOG)
    with input_error(path, "interactions.filter removes all events; relax it"):
        ingest(tmp_path / "stage", path, split=LAST_OUT, filter={"min_user_events": 100})
    with input_error(path, "column 'user_id': the log has a single user"):
        ingest(tmp_path / "stage", path, split=LAST_OUT, filter={"min_user_events": 10})


def test_weights_and_context_stay_with_their_events(tmp_path: Path) -> None:
    times = list(range(40))
    log = [(number % 4, number % 7, time) for number, time in enumerate(times)]
    weights, devices = [number / 8 for number in times], [f"d{number}" for number in times]
    path = write_log(tmp_path / "log.parquet", log, w=weights, **{"de'v\"ice": devices})
    settings = {"weight_column": "w", "context_columns": ("de'v\"ice", "t")}
    manifest = ingest(tmp_path / "stage", path, split=LAST_OUT, **settings)
    stored = np.load(manifest.path("event_time.npy"))
    assert np.load(manifest.path("event_weight.npy")).tolist() == [weights[time] for time in stored]
    context = pq.read_table(manifest.path("context.parquet"))
    assert context.column_names == ["de'v\"ice", "t"]
    assert context.column(0).to_pylist() == [devices[time] for time in stored]
    assert context.column("t").to_pylist() == stored.tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"filter": {"window_days": 3}, "order_column": "t"}, "filter.window_days needs timestamp_column"),
        ({"filter": {"max_user_events": 3}}, "need an order of the events; set timestamp_column or order_column"),
        ({"label_range": (1, 5), "timestamp_column": "t"}, "label_range is set, but label_column is not"),
        ({"label_range": (5, 1), "label_column": "s", "label_threshold": 1, "timestamp_column": "t"}, "below the second"),
        (
            {"split": {"kind": "files", "test_paths": "t.parquet", "validation_unit": "item"}},
            "validation_unit is item, but validation_share is 0",
        ),
    ],
)
def test_settings_that_need_each_other_are_checked(settings: dict[str, object], message: str) -> None:
    split = {"kind": "files", "test_paths": "test.parquet"}
    with pytest.raises(ValidationError, match=message):
        InteractionsConfig(**{"paths": "log.parquet", "split": split} | settings)


def test_the_time_split_starts_from_the_newest_event_above_the_threshold(tmp_path: Path) -> None:
    log = [(1, 1, 0), (2, 2, 0), (1, 3, 2 * DAY_US), (1, 4, 9 * DAY_US)]
    path = write_parquet(
        tmp_path / "a.parquet",
        user_id=[user for user, _, _ in log],
        item_id=[item for _, item, _ in log],
        t=[time for *_, time in log],
        s=[5, 5, 5, 1],
    )
    manifest = ingest(
        tmp_path / "stage", path, split={"kind": "time", "validation_days": 0}, label_column="s", label_threshold=3
    )
    assert read_store(manifest).splits[2] == [log[2]]
