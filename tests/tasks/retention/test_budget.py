"""The disk budget: the estimated size of a new run, and the error of a run that does not fit."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recsys_core.disk import used_bytes
from recsys_core.errors import InputError, TrackingServerError
from recsys_core.manifests import PackageManifest, RegistrationManifest, read_unchecked_manifest
from recsys_core.units import GIB, MIB
from tasks.registry.mlflow_client import connect
from tasks.retention.budget import ensure_disk_space, estimated_bytes, require_disk_space
from tasks.retention.config import RetentionConfig
from tasks.runs.run import REDUCED_FILE_NAME, Run
from tests.recsys_core.manifests.committed_stage import commit_stage
from tests.tasks.retention.run_folders_by_hand import run_ids, run_of

AddRun = Callable[..., Run]
PACKAGE_FIELDS: dict[str, Any] = {"size_bytes": 3 * MIB, "served_index": "flat", "quantization": "int8"}


def add_large_run(workspace: Path, add_run: AddRun, run_id: str, *, num_bytes: int) -> Run:
    """Add a complete run with an additional file of `num_bytes`."""
    run = add_run(workspace, run_id)
    (run.folder / "train.work" / "values").write_bytes(bytes(num_bytes))
    return run


def test_the_estimate_is_the_size_of_the_newest_whole_run(tmp_path: Path, add_run: AddRun) -> None:
    new_run = run_of(tmp_path, "9")
    assert estimated_bytes(new_run) == 0
    add_large_run(tmp_path, add_run, "1", num_bytes=5 * MIB)
    assert 5 * MIB < estimated_bytes(new_run) < 6 * MIB
    newer_run = add_large_run(tmp_path, add_run, "2", num_bytes=2 * MIB)
    assert 2 * MIB < estimated_bytes(new_run) < 3 * MIB
    # The runs 2 and 3 are not whole any more.
    (newer_run.folder / REDUCED_FILE_NAME).write_text("{}")
    shutil.rmtree(add_run(tmp_path, "3").stage_folder(RegistrationManifest))
    assert 5 * MIB < estimated_bytes(new_run) < 6 * MIB


def test_the_package_counts_twice_because_mlflow_has_a_copy(tmp_path: Path, add_run: AddRun) -> None:
    complete_run = add_large_run(tmp_path, add_run, "1", num_bytes=5 * MIB)

    def write_package(folder: Path) -> dict[str, Any]:
        (folder / "values").write_bytes(bytes(3 * MIB))
        return PACKAGE_FIELDS

    commit_stage(complete_run.stage_folder(PackageManifest), PackageManifest, inputs=["f"], build=write_package)
    assert 11 * MIB < estimated_bytes(run_of(tmp_path, "9")) < 12 * MIB
    assert estimated_bytes(complete_run) == 0  # no other run is complete
    resumed_run = add_large_run(tmp_path, add_run, "2", num_bytes=2 * MIB)
    assert 8 * MIB < estimated_bytes(resumed_run) < 10 * MIB  # of run 1, minus the files of the resumed run


def test_a_run_that_another_process_removes_during_the_estimate_does_not_count(
    tmp_path: Path, add_run: AddRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed_run = add_large_run(tmp_path, add_run, "1", num_bytes=MIB)

    def read_manifest_and_remove_run(folder: Path, manifest_type: Any) -> Any:
        manifest = read_unchecked_manifest(folder, manifest_type)
        if manifest_type is PackageManifest:
            shutil.rmtree(removed_run.folder)
        return manifest

    monkeypatch.setattr("tasks.retention.budget.read_unchecked_manifest", read_manifest_and_remove_run)
    assert estimated_bytes(run_of(tmp_path, "9")) == 0


def test_files_shared_with_earlier_runs_and_files_of_a_resumed_run_are_not_counted(tmp_path: Path, add_run: AddRun) -> None:
    complete_run = add_run(tmp_path, "1")
    part_path = complete_run.folder / "ingest_interactions" / "part.parquet"
    part_path.write_bytes(bytes(5 * MIB))
    os.utime(part_path, (1, 1))  # older than the run, like a hard link to a file of an earlier run
    assert estimated_bytes(run_of(tmp_path, "9")) < MIB
    resumed_run = add_large_run(tmp_path, add_run, "2", num_bytes=MIB)
    shutil.rmtree(resumed_run.stage_folder(RegistrationManifest))
    assert estimated_bytes(resumed_run) == 0


def test_files_that_a_resumed_run_shares_with_earlier_runs_do_not_lower_its_estimate(tmp_path: Path, add_run: AddRun) -> None:
    add_large_run(tmp_path, add_run, "1", num_bytes=5 * MIB)
    resumed_run = run_of(tmp_path, "2")
    with resumed_run.lock():
        part_path = resumed_run.folder / "part.parquet"
        part_path.write_bytes(bytes(20 * MIB))
        os.utime(part_path, (1, 1))  # older than the run, like a hard link to a file of an earlier run
    assert 5 * MIB < estimated_bytes(resumed_run) < 6 * MIB


def test_a_run_that_exceeds_the_budget_or_the_disk_is_rejected(
    tmp_path: Path, add_run: AddRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_large_run(tmp_path, add_run, "1", num_bytes=5 * MIB)
    new_run, workspace_bytes = run_of(tmp_path, "9"), used_bytes(tmp_path)
    large_budget = RetentionConfig(disk_budget_gb=(workspace_bytes + 6 * MIB) / GIB)
    require_disk_space(large_budget, new_run)
    small_budget = RetentionConfig(disk_budget_gb=(workspace_bytes + 4 * MIB) / GIB)
    message = (
        r"run 9 needs about 0\.00\d GiB, like the last run, and the workspace has 0\.00\d GiB, but retention\.disk_budget_gb is"
    )
    with pytest.raises(InputError, match=message):
        require_disk_space(small_budget, new_run)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 100, 100))  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"but the disk has 0\.000 GiB free; free some, or lower retention\.keep_full_runs"):
        require_disk_space(RetentionConfig(), new_run)


def test_the_workspace_is_cleaned_before_a_run_is_rejected(workspace: Path, add_run: AddRun) -> None:
    connect(workspace).create_registered_model("m")
    for index in range(6):
        add_large_run(workspace, add_run, f"2026{index}", num_bytes=4 * MIB)
    budget_gib = (used_bytes(workspace) + MIB) / GIB
    config = RetentionConfig(keep_full_runs=1, keep_report_runs=2, disk_budget_gb=budget_gib)
    ensure_disk_space(config, run_of(workspace, "9"), model_name="m")
    assert run_ids(workspace) == ["20264", "20265"]
    with pytest.raises(InputError, match=r"retention\.disk_budget_gb is"):
        ensure_disk_space(config.model_copy(update={"disk_budget_gb": 0.001}), run_of(workspace, "9"), model_name="m")


def test_a_run_that_does_not_fit_is_rejected_also_if_mlflow_does_not_answer(
    tmp_path: Path, add_run: AddRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clean_without_mlflow(*_: Any, **__: Any) -> None:
        raise TrackingServerError("MLflow at http://mlflow does not answer")

    monkeypatch.setattr("tasks.retention.clean.clean", clean_without_mlflow)
    add_large_run(tmp_path, add_run, "1", num_bytes=5 * MIB)
    with pytest.raises(InputError, match=r"retention\.disk_budget_gb is 0\.001; raise it"):
        ensure_disk_space(RetentionConfig(disk_budget_gb=0.001), run_of(tmp_path, "9"), model_name="m")
