"""Stages as Prefect tasks: their results and log lines, skipped stages, and the end of a run after the stage `until`."""

import logging
import re
from pathlib import Path

import pytest

from recsys_core.errors import StageError
from recsys_core.manifests import PlanManifest, StageName
from tasks.runs.context import Results, StageContext
from tasks.runs.run import Run
from tasks.stages.stage import StoppedEarly, stage
from tests.recsys_core.manifests.committed_stage import commit_stage


@stage(PlanManifest)
def plan_stage(context: StageContext, *, is_skipped: bool = False) -> tuple[PlanManifest | None, str]:
    """Commit a plan, unless the stage is skipped, and return it with a summary for the log."""
    if is_skipped:
        return None, "nothing to plan"
    folder = context.folder(PlanManifest)
    manifest = commit_stage(folder, PlanManifest, inputs=["f"], build=lambda folder: {"world_size": 2, "device": "cpu"})
    return manifest, "2 cpu ranks"


def context_of(folder: Path, *, until: StageName | None = None) -> StageContext:
    return StageContext(Run("r", workspace=folder), until=until)


def test_a_stage_returns_its_manifest_and_logs_whether_it_was_kept_or_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("nightjar"), "propagate", True)
    context = context_of(tmp_path)
    assert plan_stage(context) == plan_stage(context_of(tmp_path)) == context.results[PlanManifest]
    assert plan_stage(context_of(tmp_path), is_skipped=True) is None
    log_lines = [record.getMessage() for record in caplog.records if hasattr(record, "stage_line")]
    patterns = (
        r"plan_sharding +2 cpu ranks +\d+\.\d s",
        r"plan_sharding +2 cpu ranks +\(kept\)",
        r"plan_sharding +nothing .*\(skipped\)",
    )
    for pattern, log_line in zip(patterns, log_lines, strict=True):
        assert re.fullmatch(pattern, log_line)


def test_a_run_stops_after_its_last_stage_and_keeps_the_manifest_of_this_stage(tmp_path: Path) -> None:
    with pytest.raises(StoppedEarly, match="plan_sharding"):
        plan_stage(context_of(tmp_path, until="plan_sharding"))
    assert Results.read(Run("r", workspace=tmp_path)).get(PlanManifest) is not None
    plan_stage(context_of(tmp_path, until="train"))  # does not stop, because train is a later stage


def test_the_error_of_a_missing_input_names_the_stage_that_creates_it(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="the run has no completed stage ingest_interactions"):
        _ = context_of(tmp_path).dataset
