"""The history of a workspace, read from the records of its runs."""

import json
import math
from datetime import timedelta
from pathlib import Path

from flows import run_history
from flows.runs.run_history import newest_promoted_version
from tests.flows.run_folders import FIRST_START, METRIC, month_of_runs, past_run


def test_runs_are_listed_from_the_newest_start_with_their_figures(tmp_path: Path) -> None:
    written_runs = month_of_runs(tmp_path)
    listed_runs = run_history(tmp_path)
    assert [listed_run.run.run_id for listed_run in listed_runs] == [run.run_id for run in reversed(written_runs)]
    states = {listed_run.record.state for listed_run in listed_runs}
    assert states == {"Promoted", "NotPromoted", "DataRejected", "Failed", "Interrupted"}
    assert listed_runs[0].record.figures.events and listed_runs[0].disk_bytes > 0
    assert listed_runs[0].page_paths["plan"] == f"runs/{written_runs[-1].run_id}/plan_sharding/plan.html"
    assert [listed_run.run.run_id for listed_run in run_history(tmp_path, max_runs=2)] == [
        run.run_id for run in written_runs[:-3:-1]
    ]


def test_the_champion_is_the_version_of_the_newest_promotion(tmp_path: Path) -> None:
    assert newest_promoted_version(run_history(tmp_path)) is None
    for day, state, version in ((0, "Promoted", "1"), (1, "Promoted", "2"), (2, "NotPromoted", "3")):
        past_run(tmp_path, FIRST_START + timedelta(days=day), state=state, version=version)  # type: ignore[arg-type]
    assert newest_promoted_version(run_history(tmp_path)) == "2"
    past_run(tmp_path, FIRST_START + timedelta(days=3), state="BrokenChampion", version="4", promoted=True)
    assert newest_promoted_version(run_history(tmp_path)) == "4"


def test_a_metric_that_is_not_a_number_is_missing(tmp_path: Path) -> None:
    past_run(tmp_path, FIRST_START, state="NotPromoted", metrics={f"served/{METRIC}": math.nan})
    (listed_run,) = run_history(tmp_path)
    assert listed_run.new_version_metric(METRIC) is None
    assert json.dumps(listed_run.as_json(metric_name=METRIC), allow_nan=False)


def test_other_folders_are_not_runs(tmp_path: Path) -> None:
    past_run(tmp_path, FIRST_START, state="Promoted")
    (tmp_path / "runs" / "theirs").mkdir()
    (tmp_path / "runs" / "a b").mkdir()
    (tmp_path / "runs" / "a b" / "config.yaml").touch()
    (tmp_path / "runs" / "link").symlink_to(run_history(tmp_path)[0].run.folder)
    assert len(run_history(tmp_path)) == 1
