"""Drift between two runs, in the metrics of the data report."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.data_report.drift import match_rows, popularity_buckets, stability_index
from tests.recsys_core.data_report.small_reports import report_of, user
from tests.recsys_core.ingest.interactions_with_times import Parts, interactions_of


@pytest.mark.parametrize("same_rows", [True, False])
def test_runs_are_compared_by_id_whether_or_not_their_rows_agree(tmp_path: Path, same_rows: bool) -> None:
    before = interactions_of(tmp_path / "one", [user(0, 0), user(1), user(2, 2)], item_ids=["a", "b", "c"], user_ids=[1, 2, 3])
    if same_rows:  # user 2 and item b have no event in this run, and keep their rows
        log: list[Parts] = [user(0, 0), ([], [], []), user(3, 3, test=2), user(2)]
        ids = {"item_ids": ["a", "b", "c", "d"], "user_ids": [1, 2, 3, 4]}
        after = interactions_of(tmp_path / "two", log, **ids, continued_fingerprint=before.fingerprint)
    else:
        log = [user(0, 0, test=1), user(2), user(1, 1, test=2)]
        after = interactions_of(tmp_path / "two", log, item_ids=["d", "c", "a"], user_ids=[3, 4, 1])
        assert match_rows(before, after, side="item", spill_folder=tmp_path / "spill").tolist() == [-1, 2, 0]
    manifest, report = report_of(tmp_path, after, before=before)
    expected = {"new_users": 1, "vanished_users": 1, "new_items": 1, "vanished_items": 1, "event_drop_share": 0.0}
    assert {name: manifest.metrics[name] for name in expected} == expected
    shares = {mover.id: (mover.previous_share, mover.current_share) for mover in report.movers}
    assert shares["'b'"] == (0.2, 0) and shares["'d'"] == (0, 0.4)


def test_a_workspace_below_a_folder_named_like_a_hive_partition_is_compared(tmp_path: Path) -> None:
    previous, current = (
        interactions_of(tmp_path / "id=7" / name, [user(0, 1, test=2), user(1, test=0)], item_ids=ids)
        for name, ids in (("previous", ["a", "b", "c"]), ("current", ["c", "b", "a"]))
    )
    assert match_rows(previous, current, side="item", spill_folder=tmp_path / "spill").tolist() == [2, 1, 0]


def test_ids_of_different_types_do_not_match(tmp_path: Path) -> None:
    before = interactions_of(tmp_path / "one", [user(0, 1)], item_ids=[0, 1])
    after = interactions_of(tmp_path / "two", [user(0, 1)], item_ids=["0", "1"])
    assert match_rows(before, after, side="item", spill_folder=tmp_path).tolist() == [-1, -1]
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
