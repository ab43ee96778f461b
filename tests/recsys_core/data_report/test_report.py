"""The data report: statistics, limits and reuse."""

import json
from pathlib import Path

import pytest

from recsys_core.data_report.limits import DataReportConfig
from recsys_core.ingest.log.split_config import LeaveLastOut, Split, TimeSplit
from recsys_core.units import DAY_US
from tests.recsys_core.data_report.small_reports import FILES, report_of, user
from tests.recsys_core.ingest.interactions_with_times import Parts, interactions_of


def test_the_first_run_breaks_no_limit_and_is_compared_with_no_run(tmp_path: Path) -> None:
    interactions = interactions_of(tmp_path / "one", [user(0, 1), user(1, 2)], item_ids=["a", "b", "c"], vector_row=[0, 1, -1])
    manifest, report = report_of(tmp_path, interactions)
    assert (manifest.breaches, manifest.compared_with, report.previous_metrics, report.movers) == ((), None, {}, ())
    assert "event_drop_share" not in manifest.metrics
    assert manifest.metrics["item_vector_share"] == pytest.approx(2 / 3)
    assert manifest.metrics["train_event_vector_share"] == 0.75
    assert [(day.day, day.train, day.test) for day in report.days] == [
        ("1970-01-01", 2, 0), ("1970-01-02", 2, 0), ("1970-04-01", 0, 2),
    ]  # fmt: skip
    assert manifest.metrics["empty_day_share"] == pytest.approx(88 / 91)
    assert manifest.metrics["files_without_checksums"] == 1
    assert set(manifest.files) == {"report.json", "report.html"}


def test_a_log_with_less_than_half_the_events_breaks_the_default_limit(tmp_path: Path) -> None:
    before = interactions_of(tmp_path / "one", [user(*[0] * 10)], item_ids=[7])
    after = interactions_of(tmp_path / "two", [user(*[0] * 4)], item_ids=[7])
    manifest, report = report_of(tmp_path, after, before=before)
    assert manifest.breaches == (
        "drop of training events since the previous run: 60 %, but data_report.max_event_drop_share requires at most 50 %",
    )
    assert [check.setting for check in report.checks if not check.is_passed] == ["max_event_drop_share"]
    assert "1 limit violated: the run stops before training" in manifest.path("report.html").read_text()
    assert report_of(tmp_path, after, before=before, max_event_drop_share=None)[0].breaches == ()


def test_too_few_validation_or_test_users_break_a_limit_by_default(tmp_path: Path) -> None:
    log: list[Parts] = [([(0, 1)], [(1, 2)], [(0, 3)]), ([(0, 1)], [], [(1, 3)])]
    interactions = interactions_of(tmp_path / "one", log, item_ids=range(2))
    minimum = DataReportConfig().min_test_users
    default_limits = {"min_validation_users": minimum, "min_test_users": minimum}
    manifest, _ = report_of(tmp_path, interactions, split=LeaveLastOut(), **default_limits)
    assert (manifest.metrics["validation_users"], manifest.metrics["test_users"]) == (1, 2)
    assert manifest.breaches == (
        "users with a validation event: 1, but data_report.min_validation_users requires at least 50",
        "users with a test event: 2, but data_report.min_test_users requires at least 50",
    )
    manifest, report = report_of(tmp_path, interactions, split=FILES, **default_limits)  # this split has no validation part
    assert [check.setting for check in report.checks if not check.is_passed] == ["min_test_users"]


@pytest.mark.parametrize(
    ("split", "log", "setting"),
    [
        (TimeSplit(), [([(0, 5 * DAY_US)], [(0, 3 * DAY_US)], [(0, 4 * DAY_US)])], "max_split_violations requires at most 0"),
        (LeaveLastOut(), [([(0, 1), (1, 2)], [], [(1, 3), (2, 4)])], "max_split_violations requires at most 0"),
        (FILES, [([(0, 5), (1, 4)], [], [(1, 9)])], "max_split_violations requires at most 0"),
        (FILES, [([(0, 1), (1, 2)], [], [(1, 2)])], "max_leaked_event_share requires at most 1 %"),
    ],
)
def test_certain_leaks_break_a_limit_by_default(tmp_path: Path, split: Split, log: list[Parts], setting: str) -> None:
    interactions = interactions_of(tmp_path / "one", log, item_ids=range(3))
    manifest, _ = report_of(tmp_path, interactions, split=split)
    assert any(setting in breach for breach in manifest.breaches), manifest.breaches


def test_possible_leaks_are_reported_and_break_a_limit_only_if_one_is_set(tmp_path: Path) -> None:
    log = [([(0, 1), (1, 50)], [], [(0, 9)]), ([], [], [(2, 9)])]
    interactions = interactions_of(tmp_path / "one", log, item_ids=range(3))
    manifest, _ = report_of(tmp_path, interactions)
    shares = ("future_event_share", "repeated_pair_share", "unseen_item_share", "unseen_user_share")
    assert [manifest.metrics[name] for name in shares] == [0.5, 0.5, 0.5, 0.5]
    assert manifest.breaches == () and "later than the first test event of their user" in manifest.warnings[0]
    limits = ("max_train_after_test_share", "max_repeated_pair_share", "max_unseen_item_share", "max_unseen_user_share")
    assert len(report_of(tmp_path, interactions, **dict.fromkeys(limits, 0.4))[0].breaches) == 4


def test_a_log_without_timestamps_has_no_metrics_that_need_them(tmp_path: Path) -> None:
    interactions = interactions_of(tmp_path / "one", [user(0, 0)], item_ids=[1], timed=False, ordered=False)
    manifest, report = report_of(tmp_path, interactions, max_duplicate_share=0, max_train_after_test_share=0)
    assert {"duplicate_share", "leaked_event_share", "future_event_share", "split_violations", "days"} & set(
        manifest.metrics
    ) == set()
    assert manifest.breaches == () and report.days == ()
    assert "no timestamps in the log" in manifest.path("report.html").read_text()


def test_a_report_is_reused_until_limits_or_data_change(tmp_path: Path) -> None:
    interactions = interactions_of(tmp_path / "one", [user(0, 1)], item_ids=range(2))
    first, _ = report_of(tmp_path, interactions)
    modified_ns = first.path("report.json").stat().st_mtime_ns
    assert report_of(tmp_path, interactions)[0].path("report.json").stat().st_mtime_ns == modified_ns
    assert report_of(tmp_path, interactions, min_train_events=3)[0].breaches != ()
    assert report_of(tmp_path, interactions, before=interactions)[0].compared_with == "20261120-020000-aa11"


def test_report_and_manifest_have_the_same_metrics_as_plain_json(tmp_path: Path) -> None:
    interactions = interactions_of(tmp_path / "one", [user(0, 1), user(1)], item_ids=range(2))
    manifest, _ = report_of(tmp_path, interactions)
    content = json.loads(manifest.path("report.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert content["metrics"] == manifest.metrics
    assert content["history_lengths"] == [["0", 0], ["1", 1], ["2-3", 1]]
