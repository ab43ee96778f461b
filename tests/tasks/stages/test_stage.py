"""Stages as Prefect tasks: their log lines, skipped stages, and the end of a run at `until`."""

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from recsys_core.manifests import PlanManifest
from tasks.progress.reporting import StageLog
from tasks.runs.run import Run, StageName
from tasks.stages.stage import StoppedEarly, stage
from tests.recsys_core.manifests.committed_stage import commit_stage


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PlanManifest | None]:
    """A stage without Prefect's engine, which would start a server; tests/flows/test_nightly.py runs stages with it."""
    monkeypatch.setattr("tasks.stages.stage.task", lambda **_: lambda function: function)

    @stage("plan_sharding")
    def plan(folder: Path | None, *, run: Run) -> PlanManifest | None:
        stage_log = StageLog("plan_sharding")
        if folder is None:
            return stage_log.finish(None, "nothing to plan")
        manifest = commit_stage(folder, PlanManifest, fingerprint="f", build=lambda out: {"world_size": 2, "device": "cpu"})
        return stage_log.finish(manifest, "2 cpu ranks")

    return plan


def run_of(folder: Path, *, until: StageName | None = None) -> Run:
    return Run("r", workspace=folder, experiment="e", until=until)


def test_a_stage_returns_its_manifest_and_logs_whether_it_was_kept_or_skipped(
    tmp_path: Path, plan: Callable[..., PlanManifest | None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("nightjar"), "propagate", True)
    assert plan(tmp_path / "plan", run=run_of(tmp_path)) == plan(tmp_path / "plan", run=run_of(tmp_path))
    assert plan(None, run=run_of(tmp_path)) is None
    lines = [record.getMessage() for record in caplog.records if hasattr(record, "stage_line")]
    patterns = (
        r"plan_sharding +2 cpu ranks +\d+\.\d s",
        r"plan_sharding +2 cpu ranks +\(kept\)",
        r"plan_sharding +nothing .*\(skipped\)",
    )
    assert [bool(re.fullmatch(pattern, line)) for pattern, line in zip(patterns, lines, strict=True)] == [True] * 3


def test_the_run_ends_after_the_stage_that_until_names_and_its_manifest_is_there(
    tmp_path: Path, plan: Callable[..., PlanManifest | None]
) -> None:
    with pytest.raises(StoppedEarly, match="plan_sharding"):
        plan(tmp_path / "plan", run=run_of(tmp_path, until="plan_sharding"))
    assert (tmp_path / "plan" / "manifest.json").is_file()
    plan(tmp_path / "plan", run=run_of(tmp_path, until="train"))
