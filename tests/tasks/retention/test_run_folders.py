"""Retention of run folders: which runs stay whole, are reduced or removed, and which files are always kept."""

import errno
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recsys_core.errors import InputError
from recsys_core.manifests import (
    DataReportManifest,
    InteractionsManifest,
    RegistrationManifest,
    TrainManifest,
    load_manifest,
    read_unchecked_manifest,
)
from tasks.retention import run_folders
from tasks.retention.config import RetentionConfig
from tasks.retention.run_folders import TRASH_FOLDER_NAME, find_removals, remove_files
from tasks.runs.run import REDUCED_FILE_NAME, Run
from tasks.runs.workspace import Workspace
from tests.tasks.retention.run_folders_by_hand import STAGE_BYTES, files_below, run_ids, run_of

AddRun = Callable[..., Run]
CONFIG = RetentionConfig(keep_full_runs=2, keep_report_runs=4)


def clean(workspace: Path, *, aliased_run_ids: Collection[str] = (), config: RetentionConfig = CONFIG) -> dict[str, str]:
    """Clean a workspace. Return the action by run id. Runs of `aliased_run_ids` have a version with an alias."""
    removals = remove_files(workspace, find_removals(workspace, config, aliased_run_ids=aliased_run_ids))
    return {removal.run_id: removal.action for removal in removals}


def test_runs_lose_first_their_large_files_and_later_their_folder(tmp_path: Path, add_run: AddRun) -> None:
    runs = [add_run(tmp_path, f"2026{index}") for index in range(6)]
    complete_files = files_below(runs[0].folder)
    (removal, *_) = find_removals(tmp_path, CONFIG, aliased_run_ids=())
    assert (removal.run_id, removal.action) == ("20260", "remove")
    assert clean(tmp_path) == {"20260": "remove", "20261": "remove", "20262": "reduce", "20263": "reduce"}
    assert run_ids(tmp_path) == ["20262", "20263", "20264", "20265"]
    assert files_below(runs[5].folder) == files_below(runs[4].folder) == complete_files
    # The last run before the whole runs keeps its interactions, because a resumed run reads them.
    assert load_manifest(runs[3].stage_folder(InteractionsManifest), InteractionsManifest) is not None
    assert files_below(runs[2].folder) == {
        ".nightjar", ".lock", "config.yaml", "loss.png", "reduced.json", "ingest_interactions/.nightjar",
        "ingest_interactions/manifest.json", *(
            f"{stage}/{name}" for stage in ("check_data", "register")
            for name in (".nightjar", "manifest.json", "report.html", "report.json")
        ),
    }  # fmt: skip
    manifest = read_unchecked_manifest(runs[2].stage_folder(RegistrationManifest), RegistrationManifest)
    assert manifest is not None and manifest.version == "1"
    assert load_manifest(runs[2].stage_folder(RegistrationManifest), RegistrationManifest, verify=False) is None
    assert not (tmp_path / TRASH_FOLDER_NAME).exists()
    assert clean(tmp_path) == {}


def test_files_behind_a_link_and_stage_folders_without_a_marker_are_never_removed(tmp_path: Path, add_run: AddRun) -> None:
    workspace = tmp_path / "workspace"
    runs = [add_run(workspace, f"2026{index}") for index in range(4)]
    archive = tmp_path / "archive"
    (archive / "checkpoint").mkdir(parents=True)
    for name in (".nightjar", "values.npy", "checkpoint/weights.bin"):
        (archive / name).write_bytes(b"precious")
    runs[0].stage_folder(TrainManifest).symlink_to(archive)
    shutil.rmtree(runs[0].folder / "train.work")
    (runs[0].folder / "train.work").symlink_to(archive)
    unmarked_folder = runs[1].stage_folder(TrainManifest)
    unmarked_folder.mkdir()
    (unmarked_folder / "values.npy").write_bytes(b"precious")
    archive_files = files_below(archive)
    assert clean(workspace) == {"20260": "reduce", "20261": "reduce"}
    assert files_below(archive) == archive_files and (unmarked_folder / "values.npy").is_file()
    assert clean(workspace, config=RetentionConfig(keep_full_runs=1, keep_report_runs=1))["20260"] == "remove"
    assert files_below(archive) == archive_files


def test_the_runs_of_another_workspace_behind_a_link_are_never_removed(tmp_path: Path, add_run: AddRun) -> None:
    for index in range(6):
        add_run(tmp_path / "other", f"2026{index}")
    other_files = files_below(tmp_path / "other")
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "runs").symlink_to(tmp_path / "other" / "runs")
    assert clean(tmp_path / "workspace") == {}
    assert files_below(tmp_path / "other") == other_files


def test_files_behind_a_link_in_a_stage_of_a_reduced_run_are_kept(tmp_path: Path, add_run: AddRun) -> None:
    runs = [add_run(tmp_path / "workspace", f"2026{index}") for index in range(4)]
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "values.npy").write_bytes(bytes(100 * STAGE_BYTES))
    (runs[0].folder / "ingest_interactions" / "archive").symlink_to(tmp_path / "archive")
    assert clean(tmp_path / "workspace") == {"20260": "reduce", "20261": "reduce"}
    assert (tmp_path / "archive" / "values.npy").stat().st_size == 100 * STAGE_BYTES


def test_runs_of_aliased_versions_and_their_starting_champions_are_never_changed(tmp_path: Path, add_run: AddRun) -> None:
    for index in range(6):
        add_run(tmp_path, f"2026{index}", starting_run_id="20261" if index == 5 else None)
    files_by_run_id = {run_id: files_below(run_of(tmp_path, run_id).folder) for run_id in ("20260", "20261")}
    assert clean(tmp_path, aliased_run_ids={"20260"}) == {"20262": "reduce", "20263": "reduce"}
    assert {run_id: files_below(run_of(tmp_path, run_id).folder) for run_id in files_by_run_id} == files_by_run_id


def test_failed_runs_do_not_displace_the_newest_interactions_and_data_report(tmp_path: Path, add_run: AddRun) -> None:
    add_run(tmp_path, "20260")
    accepted_run = add_run(tmp_path, "20261")
    for index in range(2, 9):
        add_run(tmp_path, f"2026{index}", end="rejected" if index == 2 else "failed")
    clean(tmp_path)
    new_run = run_of(tmp_path, "20269")
    workspace = Workspace(tmp_path)
    interactions = workspace.newest_manifest(InteractionsManifest, before=new_run)
    report = workspace.newest_manifest(DataReportManifest, before=new_run, where=lambda manifest: not manifest.breaches)
    assert interactions is not None and interactions.folder.parent.name == "20262"
    assert report is not None and report.folder.parent == accepted_run.folder
    assert load_manifest(accepted_run.stage_folder(InteractionsManifest), InteractionsManifest) is not None
    assert not (accepted_run.folder / "train.work").exists()
    assert "20260" not in run_ids(tmp_path)


def test_a_file_that_is_also_a_hard_link_in_a_newer_run_is_kept_there(tmp_path: Path, add_run: AddRun) -> None:
    runs = [add_run(tmp_path, f"2026{index}") for index in range(4)]
    part_path, link_path = (run.stage_folder(InteractionsManifest) / "part.parquet" for run in (runs[0], runs[3]))
    part_path.write_bytes(bytes(10 * STAGE_BYTES))
    link_path.hardlink_to(part_path)
    clean(tmp_path)
    assert not part_path.exists()
    assert link_path.stat().st_size == 10 * STAGE_BYTES


def test_a_locked_run_stays_whole_and_a_reduced_run_cannot_be_resumed(tmp_path: Path, add_run: AddRun) -> None:
    runs = [add_run(tmp_path, f"2026{index}") for index in range(4)]
    files_before = files_below(runs[0].folder)
    with runs[0].lock():
        assert clean(tmp_path) == {"20261": "reduce"}
    assert files_below(runs[0].folder) - {".lock"} == files_before
    with (
        pytest.raises(InputError, match=r"only the manifests and reports of run 20261 are left.*start a new run"),
        runs[1].lock(),
    ):
        pass


def test_runs_on_a_full_disk_are_reduced(tmp_path: Path, add_run: AddRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_text_on_full_disk(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folders, "write_text", write_text_on_full_disk)
    runs = [add_run(tmp_path, f"2026{index}") for index in range(3)]
    assert clean(tmp_path) == {"20260": "reduce"}
    assert (runs[0].folder / REDUCED_FILE_NAME).exists() and not (runs[0].folder / "train.work").exists()


def test_files_that_cannot_be_removed_do_not_prevent_the_removal_of_other_files(
    tmp_path: Path, add_run: AddRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove_tree = shutil.rmtree

    def fail_for_run_20261(path: Path) -> None:
        if "20261" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        remove_tree(path)

    monkeypatch.setattr(shutil, "rmtree", fail_for_run_20261)
    runs = [add_run(tmp_path, f"2026{index}") for index in range(5)]
    assert clean(tmp_path) == {"20260": "remove", "20262": "reduce"}
    assert f"{runs[1].folder}: cannot be cleaned ([Errno 13] Permission denied)" in caplog.text
    assert clean(tmp_path, config=RetentionConfig(keep_full_runs=1, keep_report_runs=1)) == {
        "20261": "remove", "20262": "remove", "20263": "reduce",
    }  # fmt: skip
    assert f"{tmp_path / TRASH_FOLDER_NAME}: cannot be emptied ([Errno 13] Permission denied)" in caplog.text


@pytest.mark.parametrize("is_removed_during_the_lock", [False, True], ids=["before the lock", "during the lock"])
def test_a_run_that_another_process_removes_meanwhile_is_not_created_again(
    tmp_path: Path, add_run: AddRun, monkeypatch: pytest.MonkeyPatch, is_removed_during_the_lock: bool
) -> None:
    for index in range(6):
        add_run(tmp_path, f"2026{index}")
    removals = find_removals(tmp_path, CONFIG, aliased_run_ids=())
    assert {removal.action for removal in removals} == {"remove", "reduce"}

    def remove_runs(*_: object) -> None:
        for removal in removals:
            shutil.rmtree(tmp_path / "runs" / removal.run_id, ignore_errors=True)

    if is_removed_during_the_lock:
        monkeypatch.setattr(run_folders, "FileLock", lambda path, timeout: remove_runs() or FileLock(path, timeout=timeout))
    else:
        remove_runs()
    assert remove_files(tmp_path, removals) == []
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["20264", "20265"]


def test_folders_that_nightjar_did_not_create_are_not_removed(tmp_path: Path, add_run: AddRun) -> None:
    for index in range(6):
        add_run(tmp_path, f"2026{index}")
    (tmp_path / "runs" / "mine").mkdir()
    (tmp_path / "runs" / "mine" / "values.npy").write_bytes(b"mine")
    (tmp_path / "runs" / "0-link").symlink_to(tmp_path / "runs" / "mine")
    clean(tmp_path)
    assert (tmp_path / "runs" / "mine" / "values.npy").read_bytes() == b"mine"
    assert (tmp_path / "runs" / "0-link").is_symlink()


def _clean_until_killed(workspace: Path, num_operations: int) -> None:
    """Clean a workspace, but kill this process after `num_operations` file operations."""
    num_calls = 0

    def kill_after_limit(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls > num_operations:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    os.unlink, os.rename, os.rmdir = map(kill_after_limit, (os.unlink, os.rename, os.rmdir))  # type: ignore[assignment]
    clean(workspace)


def test_a_clean_that_is_killed_at_any_point_is_completed_by_the_next_clean(tmp_path: Path, add_run: AddRun) -> None:
    original_workspace = tmp_path / "original"
    for index in range(5):
        add_run(original_workspace, f"2026{index}")
    files_of_whole_run = files_below(original_workspace / "runs" / "20260")
    cleaned_workspace = tmp_path / "cleaned"
    shutil.copytree(original_workspace, cleaned_workspace, copy_function=os.link)
    clean(cleaned_workspace)
    fork = multiprocessing.get_context("fork")
    num_operations, exit_code = 0, -signal.SIGKILL
    while exit_code == -signal.SIGKILL:
        workspace = tmp_path / str(num_operations)
        shutil.copytree(original_workspace, workspace, copy_function=os.link)
        process = fork.Process(target=_clean_until_killed, args=(workspace, num_operations))
        process.start()
        process.join()
        assert process.exitcode is not None
        exit_code = process.exitcode
        for run_id in run_ids(workspace):
            run = run_of(workspace, run_id)
            assert run.config_file.is_file()
            assert read_unchecked_manifest(run.stage_folder(RegistrationManifest), RegistrationManifest) is not None
            is_whole = files_below(run.folder) - {".lock"} == files_of_whole_run
            assert is_whole or (run.folder / "reduced.json").is_file()
        clean(workspace)
        assert files_below(workspace) == files_below(cleaned_workspace)
        shutil.rmtree(workspace)
        num_operations += 9  # every ninth operation, to save time
    assert num_operations > 30  # at least four processes were started


Step = tuple[str, int]
"""A kind of run to add, `alias` or `clean`, and a number that chooses the run of an alias or the start of a training."""
STEPS = st.lists(
    st.tuples(st.sampled_from(["complete", "complete", "rejected", "failed", "alias", "clean"]), st.integers(0, 30)),
    max_size=14,
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, num_full_runs=st.integers(1, 3), num_reduced_runs=st.integers(0, 3))
def test_a_clean_keeps_aliased_runs_the_newest_runs_and_the_files_of_a_new_run(
    add_run: AddRun, steps: list[Step], num_full_runs: int, num_reduced_runs: int
) -> None:
    config = RetentionConfig(keep_full_runs=num_full_runs, keep_report_runs=num_full_runs + num_reduced_runs)
    with tempfile.TemporaryDirectory() as folder:
        workspace, complete_runs, aliased_run_ids = Path(folder), list[Run](), set[str]()
        for step_number, (step_kind, run_choice) in enumerate([*steps, ("clean", 0)]):
            if step_kind in ("complete", "rejected", "failed"):
                starting_run_id = max(aliased_run_ids) if aliased_run_ids and run_choice % 2 else None
                run = add_run(workspace, f"2026{step_number:04}", end=step_kind, starting_run_id=starting_run_id, link=True)
                complete_runs += [run] if step_kind == "complete" else []
            elif step_kind == "alias":
                whole_runs = [run for run in complete_runs if _is_whole(run)]
                if whole_runs:
                    aliased_run_ids = {whole_runs[run_choice % len(whole_runs)].run_id}
            else:
                new_run = run_of(workspace, "next")
                inputs_before = _inputs_of(new_run)
                files_of_aliased_runs = {run_id: files_below(run_of(workspace, run_id).folder) for run_id in aliased_run_ids}
                files_of_newest_runs = {
                    run_id: files_below(run_of(workspace, run_id).folder) for run_id in run_ids(workspace)[-num_full_runs:]
                }
                clean(workspace, aliased_run_ids=aliased_run_ids, config=config)
                assert _inputs_of(new_run) == inputs_before
                for run_id, files in (files_of_aliased_runs | files_of_newest_runs).items():
                    assert files_below(run_of(workspace, run_id).folder) - {".lock"} == files - {".lock"}
                # Newer runs read files of at most 4 other runs.
                assert len(run_ids(workspace)) <= config.keep_report_runs + len(aliased_run_ids) + 4


def _is_whole(run: Run) -> bool:
    return load_manifest(run.stage_folder(RegistrationManifest), RegistrationManifest) is not None


def _inputs_of(run: Run) -> tuple[Path | None, Path | None, bool]:
    """Return the folders of the interactions and of the data report that a run reads from earlier runs.

    The third value is whether the run of this data report still has the ingested interactions.
    """
    workspace = Workspace(run.workspace)
    interactions = workspace.newest_manifest(InteractionsManifest, before=run)
    report = workspace.newest_manifest(DataReportManifest, before=run, where=lambda manifest: not manifest.breaches)
    folder = report and report.folder.parent / InteractionsManifest.stage
    has_reference = folder is not None and load_manifest(folder, InteractionsManifest) is not None
    return interactions and interactions.folder, report and report.folder, has_reference
