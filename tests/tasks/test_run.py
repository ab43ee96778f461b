"""Names and folders of a run, and who may be in it."""

import logging
import re
from pathlib import Path

import pytest

from recsys_core.errors import InputError
from recsys_core.manifests import PlanManifest, produce
from tasks.reporting import begin
from tasks.run import STAGES, Run, new_run_id


def test_run_ids_sort_by_time_and_differ() -> None:
    ids = [new_run_id() for _ in range(5)]
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", run_id) for run_id in ids)
    assert len(set(ids)) > 1


def test_each_stage_has_a_folder_of_its_own(tmp_path: Path) -> None:
    run = Run("r", workspace=tmp_path, experiment="e")
    folders = [run.stage_folder(stage) for stage in STAGES]
    assert len(set(folders)) == len(STAGES)
    assert {folder.parent for folder in folders} == {tmp_path / "runs" / "r"}


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    run = Run("r", workspace=tmp_path, experiment="e")
    with run.lock():
        with pytest.raises(InputError, match="another process is working on run r"), run.lock():
            pass
        with Run("other", workspace=tmp_path, experiment="e").lock():
            pass
    with run.lock():
        pass


def test_a_stage_says_in_one_line_whether_it_was_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("nightjar"), "propagate", True)

    def stage() -> None:
        finish = begin("plan_sharding")
        made = produce(
            tmp_path / "plan", PlanManifest, fingerprint="f", build=lambda folder: {"world_size": 2, "device": "cpu"}
        )
        finish(made, "2 cpu ranks")

    stage()
    stage()
    first, second = (record.getMessage() for record in caplog.records if record.levelno == logging.INFO)
    assert re.fullmatch(r"plan_sharding +2 cpu ranks +\d+\.\d s", first)
    assert re.fullmatch(r"plan_sharding +2 cpu ranks +\(kept\)", second)
