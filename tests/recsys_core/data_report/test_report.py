"""The data report: drift since the previous run, limits, and a page that escapes all data."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.data.interactions.config import GivenSplit, LeaveLastOut, Split, TimeSplit
from recsys_core.data_report.config import DataReportConfig
from recsys_core.data_report.drift import match_rows, popularity_buckets, stability_index
from recsys_core.data_report.page import to_html, to_markdown
from recsys_core.data_report.report import PreviousRun, report_data
from recsys_core.data_report.schema import DataReport
from recsys_core.manifests import ColumnFacts, DataReportManifest, InteractionsManifest
from recsys_core.units import DAY_US
from tests.recsys_core.data.nights import Parts, interactions_of

FILES = GivenSplit(test=("test.parquet",))
HOSTILE = "<script>alert('&')</script>\u202e\x00\""


def user(*items: int, test: int = 0, at: int = 0) -> Parts:
    """Training events on consecutive days, then one test event."""
    return [(item, (at + day) * DAY_US) for day, item in enumerate(items)], [], [(test, 90 * DAY_US)]


def report_of(
    folder: Path,
    interactions: InteractionsManifest,
    *,
    before: InteractionsManifest | None = None,
    split: Split = FILES,
    **limits: Any,
) -> tuple[DataReportManifest, DataReport]:
    previous = before and PreviousRun("20261120-020000-aa11", before, {"train_events": float(before.train_events)})
    manifest = report_data(
        DataReportConfig(**limits),
        split=split,
        interactions=interactions,
        previous=previous,
        folder=folder / "run" / "data_report",
    )
    return manifest, DataReport.model_validate_json(manifest.path("report.json").read_bytes())


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


@pytest.mark.parametrize("same_rows", [True, False])
def test_runs_are_compared_by_id_whether_or_not_their_rows_agree(tmp_path: Path, same_rows: bool) -> None:
    before = interactions_of(tmp_path / "one", [user(0, 0), user(1), user(2, 2)], item_ids=["a", "b", "c"], user_ids=[1, 2, 3])
    if same_rows:  # user 2 and item b have no event in this run, and keep their rows
        log: list[Parts] = [user(0, 0), ([], [], []), user(3, 3, test=2), user(2)]
        ids = {"item_ids": ["a", "b", "c", "d"], "user_ids": [1, 2, 3, 4]}
        after = interactions_of(tmp_path / "two", log, **ids, continues=before.fingerprint)
    else:
        log = [user(0, 0, test=1), user(2), user(1, 1, test=2)]
        after = interactions_of(tmp_path / "two", log, item_ids=["d", "c", "a"], user_ids=[3, 4, 1])
        assert match_rows(before, after, side="items", spill=tmp_path / "spill").tolist() == [-1, 2, 0]
    manifest, report = report_of(tmp_path, after, before=before)
    expected = {"new_users": 1, "vanished_users": 1, "new_items": 1, "vanished_items": 1, "event_drop_share": 0.0}
    assert {name: manifest.metrics[name] for name in expected} == expected
    shares = {mover.id: (mover.previous, mover.current) for mover in report.movers}
    assert shares["'b'"] == (0.2, 0) and shares["'d'"] == (0, 0.4)


def test_a_workspace_below_a_folder_named_like_a_hive_partition_is_compared(tmp_path: Path) -> None:
    previous, current = (
        interactions_of(tmp_path / "id=7" / name, [user(0, 1, test=2), user(1, test=0)], item_ids=ids)
        for name, ids in (("previous", ["a", "b", "c"]), ("current", ["c", "b", "a"]))
    )
    assert match_rows(previous, current, side="items", spill=tmp_path / "spill").tolist() == [2, 1, 0]


def test_ids_of_different_types_do_not_match(tmp_path: Path) -> None:
    before = interactions_of(tmp_path / "one", [user(0, 1)], item_ids=[0, 1])
    after = interactions_of(tmp_path / "two", [user(0, 1)], item_ids=["0", "1"])
    assert match_rows(before, after, side="items", spill=tmp_path).tolist() == [-1, -1]
    assert report_of(tmp_path, after, before=before)[0].metrics["vanished_item_share"] == 1


def test_equal_popularity_has_psi_0_and_reversed_popularity_a_large_psi(tmp_path: Path) -> None:
    items = [[row] * count for row, count in enumerate((40, 20, 10, 5, 3, 2))]
    before = interactions_of(tmp_path / "one", [user(*row) for row in items], item_ids=range(6))
    same = interactions_of(tmp_path / "two", [user(*row) for row in reversed(items)], item_ids=range(6))
    reversed_ = interactions_of(tmp_path / "three", [user(*([5 - row[0]] * len(row))) for row in items], item_ids=range(6))
    assert report_of(tmp_path / "a", same, before=before)[0].metrics["popularity_psi"] == 0
    manifest, _ = report_of(tmp_path / "b", reversed_, before=before)
    assert manifest.metrics["popularity_psi"] > 0.25 and manifest.breaches == ()
    assert "major shift" in " ".join(manifest.warnings)
    stopped, _ = report_of(tmp_path / "b", reversed_, before=before, max_popularity_psi=0.25)
    assert len(stopped.breaches) == 1 and "but data_report.max_popularity_psi requires at most 0.250" in stopped.breaches[0]


def test_new_items_raise_the_psi(tmp_path: Path) -> None:
    before = interactions_of(tmp_path / "one", [user(*range(10))], item_ids=range(10))
    after = interactions_of(tmp_path / "two", [user(*range(20))], item_ids=range(20))
    assert report_of(tmp_path, after, before=before)[0].metrics["popularity_psi"] > 1


@given(st.lists(st.integers(0, 1_000), min_size=1, max_size=50).filter(any))
def test_the_stability_index_is_symmetric_and_0_for_equal_counts(counts: list[int]) -> None:
    before, after = np.array(counts), np.array(counts[::-1])
    assert stability_index(before, before) == 0
    assert (
        stability_index(before, after) == pytest.approx(stability_index(after, before)) and stability_index(before, after) >= 0
    )
    bucket = popularity_buckets(before)
    falling = bucket[np.argsort(-before, kind="stable")]
    assert (np.diff(falling) >= 0).all() and falling[0] == 0 and falling.max() <= 9


def test_a_log_with_less_than_half_the_events_breaks_the_default_limit(tmp_path: Path) -> None:
    before = interactions_of(tmp_path / "one", [user(*[0] * 10)], item_ids=[7])
    after = interactions_of(tmp_path / "two", [user(*[0] * 4)], item_ids=[7])
    manifest, report = report_of(tmp_path, after, before=before)
    assert manifest.breaches == (
        "drop of training events since the previous run: 60 %, but data_report.max_event_drop_share requires at most 50 %",
    )
    assert [check.setting for check in report.checks if not check.passed] == ["max_event_drop_share"]
    assert "1 limit broken: the run stops before training" in manifest.path("report.html").read_text()
    assert report_of(tmp_path, after, before=before, max_event_drop_share=None)[0].breaches == ()


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
    limits = ("max_future_event_share", "max_repeated_pair_share", "max_unseen_item_share", "max_unseen_user_share")
    assert len(report_of(tmp_path, interactions, **dict.fromkeys(limits, 0.4))[0].breaches) == 4


def test_a_log_without_timestamps_has_no_metrics_that_need_them(tmp_path: Path) -> None:
    interactions = interactions_of(tmp_path / "one", [user(0, 0)], item_ids=[1], timed=False, ordered=False)
    manifest, report = report_of(tmp_path, interactions, max_duplicate_share=0, max_future_event_share=0)
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
    assert report_of(tmp_path, interactions, min_events=3)[0].breaches != ()
    assert report_of(tmp_path, interactions, before=interactions)[0].compared_with == "20261120-020000-aa11"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]


def test_the_page_is_one_file_and_escapes_all_values_of_the_data(tmp_path: Path) -> None:
    facts = {
        "columns": {HOSTILE: ColumnFacts(nulls=1, first=HOSTILE)},
        "removed_events": {HOSTILE: 2},
        "bad_rows": {HOSTILE: 1},
    }
    before = interactions_of(tmp_path / "one", [user(0, 1)], item_ids=[HOSTILE, "x" * 10_000])
    interactions = interactions_of(tmp_path / "two", [user(0, 0, 1)], item_ids=[HOSTILE, "y" * 10_000], **facts)
    manifest, report = report_of(tmp_path, interactions, before=before, max_null_share=0)
    page = manifest.path("report.html").read_text(encoding="utf-8")
    parser = _Tags()
    parser.feed(page)
    assert "script" not in parser.tags and {"svg", "table"} <= parser.tags
    assert all(address.startswith("#") for address in parser.addresses), parser.addresses
    assert not re.search(r"url\((?!#)|@import", page)
    assert "<script>" not in page and "&lt;script&gt;" in page and "\u202e" not in page and "\x00" not in page
    assert "x" * 100 not in page and len(page) < 300_000
    hostile_run = to_html(report, run=HOSTILE)
    assert "<script>" not in hostile_run
    markdown = to_markdown(manifest, page=manifest.path("report.html"))
    assert "**1 limit broken**" in markdown and "<script>" not in markdown


def test_report_and_manifest_have_the_same_metrics_as_plain_json(tmp_path: Path) -> None:
    interactions = interactions_of(tmp_path / "one", [user(0, 1), user(1)], item_ids=range(2))
    manifest, _ = report_of(tmp_path, interactions)
    content = json.loads(manifest.path("report.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert content["metrics"] == manifest.metrics
    assert content["history_lengths"] == [["0", 0], ["1", 1], ["2-3", 1]]
