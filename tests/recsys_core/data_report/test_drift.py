"""Drift between two runs, in the metrics of the data report."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.data_report.drift import MAX_MOVERS, match_rows, popularity_buckets, stability_index
from tests.recsys_core.data_report.small_reports import report_manifest_of, report_of, user_events
from tests.recsys_core.ingest.interactions_with_times import interactions_of

pytestmark = pytest.mark.usefixtures("no_plots")

MAJOR_SHIFT = 0.25
"""Stability index above which the report warns of a major shift."""

event_counts = st.lists(st.integers(0, 1_000), min_size=1, max_size=50).filter(any)


@pytest.mark.parametrize("has_same_rows", [True, False])
def test_runs_are_compared_by_id_whether_or_not_their_rows_agree(tmp_path: Path, has_same_rows: bool) -> None:
    """The training events have the items a a b c c in the previous run. This run has two events of a, two of d and one of c."""
    log = [user_events(0, 0), user_events(1), user_events(2, 2)]
    previous_stage = interactions_of(tmp_path / "previous", log, item_ids=["a", "b", "c"], user_ids=[1, 2, 3])
    if has_same_rows:  # user 2 and item b keep their rows, although they have no event in this run
        log = [user_events(0, 0), ([], [], []), user_events(3, 3, test_item=2), user_events(2)]
        ids = {"item_ids": ["a", "b", "c", "d"], "user_ids": [1, 2, 3, 4]}
        current_stage = interactions_of(tmp_path / "current", log, **ids, continued_fingerprint=previous_stage.fingerprint)
    else:
        log = [user_events(0, 0, test_item=1), user_events(2), user_events(1, 1, test_item=2)]
        current_stage = interactions_of(tmp_path / "current", log, item_ids=["d", "c", "a"], user_ids=[3, 4, 1])
        assert match_rows(previous_stage, current_stage, side="item", spill_folder=tmp_path / "spill").tolist() == [-1, 2, 0]
    manifest, report = report_of(tmp_path, current_stage, previous=previous_stage)
    expected_metrics = {"new_users": 1, "vanished_users": 1, "new_items": 1, "vanished_items": 1, "event_drop_share": 0.0}
    assert {name: manifest.metrics[name] for name in expected_metrics} == expected_metrics
    shares_by_item = {mover.id: (mover.previous_share, mover.current_share) for mover in report.movers}
    assert shares_by_item["'b'"] == (0.2, 0) and shares_by_item["'d'"] == (0, 0.4)


def test_the_event_drop_counts_training_events_and_the_turnover_counts_events_of_all_splits(tmp_path: Path) -> None:
    ids = {"item_ids": range(3), "user_ids": [1, 2, 3]}
    previous_stage = interactions_of(tmp_path / "previous", [user_events(0, 1), user_events(1, 0), user_events()], **ids)
    current_stage = interactions_of(
        tmp_path / "current", [user_events(0, 1, 1), user_events(test_item=2), user_events()], **ids
    )
    metrics = report_manifest_of(tmp_path, current_stage, previous=previous_stage).metrics
    assert metrics["event_drop_share"] == 0.25
    assert (metrics["new_users"], metrics["vanished_users"], metrics["new_items"], metrics["vanished_items"]) == (0, 0, 1, 0)


def test_a_workspace_below_a_folder_named_like_a_hive_partition_is_compared(tmp_path: Path) -> None:
    log = [user_events(0, 1, test_item=2), user_events(1)]
    previous_stage = interactions_of(tmp_path / "id=7" / "previous", log, item_ids=["a", "b", "c"])
    current_stage = interactions_of(tmp_path / "id=7" / "current", log, item_ids=["c", "b", "a"])
    assert match_rows(previous_stage, current_stage, side="item", spill_folder=tmp_path / "spill").tolist() == [2, 1, 0]


def test_ids_of_different_types_do_not_match(tmp_path: Path) -> None:
    previous_stage = interactions_of(tmp_path / "previous", [user_events(0, 1)], item_ids=[0, 1])
    current_stage = interactions_of(tmp_path / "current", [user_events(0, 1)], item_ids=["0", "1"])
    assert match_rows(previous_stage, current_stage, side="item", spill_folder=tmp_path).tolist() == [-1, -1]
    assert report_manifest_of(tmp_path, current_stage, previous=previous_stage).metrics["vanished_item_share"] == 1


def test_equal_popularity_has_psi_0_and_reversed_popularity_has_a_large_psi(tmp_path: Path) -> None:
    num_events_by_item = (40, 20, 10, 5, 3, 2)
    log = [user_events(*[item] * num_events) for item, num_events in enumerate(num_events_by_item)]
    reversed_log = [user_events(*[5 - item] * num_events) for item, num_events in enumerate(num_events_by_item)]
    previous_stage = interactions_of(tmp_path / "previous", log, item_ids=range(6))
    unchanged_stage = interactions_of(tmp_path / "unchanged", log[::-1], item_ids=range(6))
    reversed_stage = interactions_of(tmp_path / "shifted", reversed_log, item_ids=range(6))
    assert report_manifest_of(tmp_path / "a", unchanged_stage, previous=previous_stage).metrics["popularity_psi"] == 0
    manifest, _ = report_of(tmp_path / "b", reversed_stage, previous=previous_stage)
    assert manifest.metrics["popularity_psi"] > MAJOR_SHIFT and manifest.breaches == ()
    assert "major shift" in " ".join(manifest.warnings)
    manifest_with_limit, _ = report_of(tmp_path / "b", reversed_stage, previous=previous_stage, max_popularity_psi=MAJOR_SHIFT)
    (breach,) = manifest_with_limit.breaches
    assert "but data_report.max_popularity_psi requires at most 0.250" in breach


def test_new_items_raise_the_psi(tmp_path: Path) -> None:
    previous_stage = interactions_of(tmp_path / "previous", [user_events(*range(10))], item_ids=range(10))
    current_stage = interactions_of(tmp_path / "current", [user_events(*range(20))], item_ids=range(20))
    manifest, report = report_of(tmp_path, current_stage, previous=previous_stage)
    assert manifest.metrics["popularity_psi"] > 1
    assert len(report.movers) == MAX_MOVERS


def test_the_items_with_the_largest_changes_include_items_that_are_no_longer_in_the_vocabulary(tmp_path: Path) -> None:
    previous_stage = interactions_of(tmp_path / "previous", [user_events(*range(8))], item_ids=range(8))
    current_stage = interactions_of(tmp_path / "current", [user_events(*range(20))], item_ids=range(8, 28))
    _, report = report_of(tmp_path, current_stage, previous=previous_stage)
    shares_by_item = {mover.id: (mover.previous_share, mover.current_share) for mover in report.movers}
    assert len(shares_by_item) == MAX_MOVERS
    assert shares_by_item == {str(item): (1 / 8, 0) for item in range(8)} | {str(item): (0, 1 / 20) for item in (8, 9)}


@given(event_counts)
def test_the_stability_index_is_symmetric_and_0_for_equal_counts(counts: list[int]) -> None:
    previous_count_I, count_I = np.array(counts), np.array(counts[::-1])
    assert stability_index(count_I, count_I) == 0
    assert stability_index(previous_count_I, count_I) == pytest.approx(stability_index(count_I, previous_count_I))
    assert stability_index(previous_count_I, count_I) >= 0


@given(event_counts)
def test_the_ten_popularity_buckets_begin_with_the_most_popular_items(counts: list[int]) -> None:
    order_I = np.argsort(-np.array(counts), kind="stable")
    bucket_by_falling_count = popularity_buckets(np.array(counts))[order_I]
    assert bucket_by_falling_count[0] == 0 and bucket_by_falling_count.max() <= 9
    assert (np.diff(bucket_by_falling_count) >= 0).all()
