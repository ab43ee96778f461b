"""Statistics, limits and reuse of the data report."""

import json
from pathlib import Path

import pytest

from recsys_core.data_report.limits import DataReportConfig
from recsys_core.ingest.log.split_config import LeaveLastOut, Split, TimeSplit
from recsys_core.units import DAY_US
from tests.recsys_core.data_report.small_reports import (
    FILE_SPLIT,
    PREVIOUS_RUN_NAME,
    report_manifest_of,
    report_of,
    user_events,
)
from tests.recsys_core.ingest.interaction_logs import ingest, write_log
from tests.recsys_core.ingest.interactions_with_times import UserEvents, interactions_of

pytestmark = pytest.mark.usefixtures("no_plots")


def test_the_first_run_breaks_no_limit_and_is_compared_with_no_run(tmp_path: Path) -> None:
    interactions = interactions_of(
        tmp_path / "log", [user_events(0, 1), user_events(1, 2)], item_ids=["a", "b", "c"], vector_row=[0, 1, -1]
    )
    manifest, report = report_of(tmp_path, interactions)
    assert (manifest.breaches, manifest.compared_with, report.previous_metrics, report.movers) == ((), None, {}, ())
    assert "event_drop_share" not in manifest.metrics
    assert manifest.metrics["item_vector_share"] == pytest.approx(2 / 3)
    assert manifest.metrics["train_event_vector_share"] == 0.75  # one of the four events has item c, without a vector
    assert [(day.day, day.train, day.test) for day in report.days] == [
        ("1970-01-01", 2, 0), ("1970-01-02", 2, 0), ("1970-04-01", 0, 2),
    ]  # fmt: skip
    assert manifest.metrics["empty_day_share"] == pytest.approx(88 / 91)  # of the days 0 to 90, three have events
    assert manifest.metrics["files_without_checksums"] == 1
    assert set(manifest.files) == {"report.json", "report.html"}


def test_a_log_with_less_than_half_the_events_breaks_the_default_limit(tmp_path: Path) -> None:
    previous_stage = interactions_of(tmp_path / "previous", [user_events(*[0] * 10)], item_ids=[7])
    current_stage = interactions_of(tmp_path / "current", [user_events(*[0] * 4)], item_ids=[7])
    manifest, report = report_of(tmp_path, current_stage, previous=previous_stage)
    assert manifest.breaches == (
        "drop of training events since the previous run: 60 %, but data_report.max_event_drop_share requires at most 50 %",
    )
    assert [check.setting for check in report.checks if not check.is_passed] == ["max_event_drop_share"]
    assert "1 limit violated: the run stops before training" in manifest.path("report.html").read_text()
    assert report_manifest_of(tmp_path, current_stage, previous=previous_stage, max_event_drop_share=None).breaches == ()


def test_the_nulls_of_a_context_column_are_counted_among_the_events(tmp_path: Path) -> None:
    log = [(user, item, item) for user in (1, 2) for item in range(4)]
    devices, stars = [None, None, None, "phone", None, "phone", None, None], [5, 5, 5, 5, 5, 5, 1, 1]
    path = write_log(tmp_path / "log.parquet", log, device=devices, stars=stars)
    settings = {"context_columns": ("device", "stars"), "label_column": "stars", "label_threshold": 5}
    interactions = ingest(tmp_path / "log", path, split={"kind": "leave_last_out"}, **settings)
    manifest, report = report_of(tmp_path, interactions, split=LeaveLastOut(), max_null_share=0.5)
    assert {name: column.num_nulls for name, column in report.columns.items() if column.num_nulls} == {"device": 4}
    assert manifest.metrics["null_share"] == pytest.approx(4 / 6)  # of the 6 events with 5 stars, 4 have no device
    assert manifest.breaches == (
        "nulls in the column with the largest share of nulls: 66.67 %, but data_report.max_null_share requires at most 50 %",
    )


def test_too_few_validation_or_test_users_break_a_limit_by_default(tmp_path: Path) -> None:
    log: list[UserEvents] = [([(0, 1)], [(1, 2)], [(0, 3)]), ([(0, 1)], [], [(1, 3)])]
    interactions = interactions_of(tmp_path / "log", log, item_ids=range(2))
    default_config = DataReportConfig()
    default_limits = {
        "min_validation_users": default_config.min_validation_users,
        "min_test_users": default_config.min_test_users,
    }
    manifest, _ = report_of(tmp_path, interactions, split=LeaveLastOut(), **default_limits)
    assert (manifest.metrics["validation_users"], manifest.metrics["test_users"]) == (1, 2)
    assert manifest.breaches == (
        "users with a validation event: 1, but data_report.min_validation_users requires at least 50",
        "users with a test event: 2, but data_report.min_test_users requires at least 50",
    )
    # A split by files without validation files has no minimum of validation users.
    manifest, report = report_of(tmp_path, interactions, split=FILE_SPLIT, **default_limits)
    assert [check.setting for check in report.checks if not check.is_passed] == ["min_test_users"]


@pytest.mark.parametrize(
    ("split", "log", "broken_limit"),
    [
        (TimeSplit(), [([(0, 5 * DAY_US)], [(0, 3 * DAY_US)], [(0, 4 * DAY_US)])], "max_split_violations requires at most 0"),
        (LeaveLastOut(), [([(0, 1), (1, 2)], [], [(1, 3), (2, 4)])], "max_split_violations requires at most 0"),
        (FILE_SPLIT, [([(0, 5), (1, 4)], [], [(1, 9)])], "max_split_violations requires at most 0"),
        (FILE_SPLIT, [([(0, 1), (1, 2)], [], [(1, 2)])], "max_leaked_event_share requires at most 1 %"),
    ],
)
def test_events_in_a_wrong_order_and_leaked_events_break_a_limit_by_default(
    tmp_path: Path, split: Split, log: list[UserEvents], broken_limit: str
) -> None:
    interactions = interactions_of(tmp_path / "log", log, item_ids=range(3))
    manifest, _ = report_of(tmp_path, interactions, split=split)
    assert any(broken_limit in breach for breach in manifest.breaches), manifest.breaches


def test_possible_leaks_are_reported_but_break_a_limit_only_if_the_limit_is_set(tmp_path: Path) -> None:
    # One of two training events is later than the test event of its user. One of two test events repeats a training event, and
    # the other test event has a user and an item without training events.
    log = [([(0, 1), (1, 50)], [], [(0, 9)]), ([], [], [(2, 9)])]
    interactions = interactions_of(tmp_path / "log", log, item_ids=range(3))
    manifest, _ = report_of(tmp_path, interactions)
    share_names = ("future_event_share", "repeated_pair_share", "unseen_item_share", "unseen_user_share")
    assert [manifest.metrics[name] for name in share_names] == [0.5] * 4
    assert manifest.breaches == () and "later than the first test event of their user" in manifest.warnings[0]
    limit_names = ("max_train_after_test_share", "max_repeated_pair_share", "max_unseen_item_share", "max_unseen_user_share")
    assert len(report_manifest_of(tmp_path, interactions, **dict.fromkeys(limit_names, 0.4)).breaches) == 4


def test_a_log_without_timestamps_has_no_metrics_that_need_them(tmp_path: Path) -> None:
    interactions = interactions_of(tmp_path / "log", [user_events(0, 0)], item_ids=[1], has_times=False, is_ordered=False)
    manifest, report = report_of(tmp_path, interactions, max_duplicate_share=0, max_train_after_test_share=0)
    metrics_with_times = {"duplicate_share", "leaked_event_share", "future_event_share", "split_violations", "days"}
    assert metrics_with_times.isdisjoint(manifest.metrics)
    assert manifest.breaches == () and report.days == ()
    assert "no timestamps in the log" in manifest.path("report.html").read_text()


def test_a_report_is_reused_until_limits_or_data_change(tmp_path: Path) -> None:
    interactions = interactions_of(tmp_path / "log", [user_events(0, 1)], item_ids=range(2))
    manifest, _ = report_of(tmp_path, interactions)
    modified_ns = manifest.path("report.json").stat().st_mtime_ns
    assert report_manifest_of(tmp_path, interactions).path("report.json").stat().st_mtime_ns == modified_ns
    assert report_manifest_of(tmp_path, interactions, min_train_events=3).breaches != ()
    assert report_manifest_of(tmp_path, interactions, previous=interactions).compared_with == PREVIOUS_RUN_NAME


def test_the_report_is_standard_json_with_the_metrics_of_the_manifest(tmp_path: Path) -> None:
    interactions = interactions_of(tmp_path / "log", [user_events(0, 1), user_events(1)], item_ids=range(2))
    manifest, _ = report_of(tmp_path, interactions)
    # parse_constant is called for NaN and Infinity, which JSON does not allow.
    report_content = json.loads(manifest.path("report.json").read_text(), parse_constant=lambda constant: pytest.fail(constant))
    assert report_content["metrics"] == manifest.metrics
    assert report_content["history_lengths"] == [["0", 0], ["1", 1], ["2-3", 1]]
