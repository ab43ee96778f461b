"""Ids and folders of runs, and the locks of a run and of a workspace."""

import errno
import fcntl
import json
import multiprocessing
import os
import re
import signal
import socket
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from recsys_core.errors import InputError
from recsys_core.manifests import STAGES
from tasks.runs.run import LOCK_NAME, Run, new_run_id
from tasks.runs.workspace import Workspace


def test_run_ids_begin_with_the_time_and_differ() -> None:
    run_ids = [new_run_id() for _ in range(5)]
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", run_id) for run_id in run_ids)
    assert len(set(run_ids)) > 1  # the four random digits may repeat


@pytest.mark.parametrize("seconds_ahead", [0, 3_000_000_000], ids=["now", "in 95 years"])
def test_a_new_run_id_sorts_after_all_runs_even_if_the_newest_run_is_from_the_future(
    tmp_path: Path, seconds_ahead: int
) -> None:
    newest_run_id = f"{datetime.now(UTC) + timedelta(seconds=seconds_ahead):%Y%m%d-%H%M%S}-ffff"
    workspace, created_ids = Workspace(tmp_path), [newest_run_id]
    for run_id in ("20260101-000000-ab12", "by-hand", newest_run_id):
        workspace.run(run_id).folder.mkdir(parents=True)
    for _ in range(3):
        created_ids.append(workspace.new_run_id())
        workspace.run(created_ids[-1]).folder.mkdir()
    assert created_ids == sorted(created_ids)
    assert len({run_id[: len("20260101-000000")] for run_id in created_ids}) == 4  # no two ids have the same second
    timed_runs = [run.run_id for run in workspace.runs() if run.run_id != "by-hand"]
    assert timed_runs[-3:] == created_ids[1:]


@pytest.mark.parametrize("newest_run_id", ["99991231-235959-ab12", "99990231-000000-ab12"])
def test_an_error_names_the_newest_run_if_no_later_id_exists(tmp_path: Path, newest_run_id: str) -> None:
    workspace = Workspace(tmp_path)
    workspace.run(newest_run_id).folder.mkdir(parents=True)
    with pytest.raises(InputError, match=f"{newest_run_id}: no later run id exists; move this folder out of {tmp_path}/runs"):
        workspace.new_run_id()


def test_each_stage_has_a_folder_of_its_own(tmp_path: Path) -> None:
    run = Run("r", workspace=tmp_path)
    folders = [run.stage_folder(stage) for stage in STAGES.values()]
    assert len(set(folders)) == len(STAGES)
    assert {folder.parent for folder in folders} == {tmp_path / "runs" / "r"}


def test_a_run_can_be_locked_again_only_after_its_lock_is_released(tmp_path: Path) -> None:
    run = Run("r", workspace=tmp_path)
    with run.lock():
        with pytest.raises(InputError, match="another process is working on run r"), run.lock():
            pass
        with Run("other", workspace=tmp_path).lock():
            pass
    with run.lock():
        pass


def test_a_process_that_only_reads_the_state_of_a_run_does_not_count_as_working_on_it(tmp_path: Path) -> None:
    run = Run("r", workspace=tmp_path)
    with run.lock():
        pass
    with (run.folder / LOCK_NAME).open("rb") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_SH)  # as in Run.is_locked
        assert not run.is_locked()
        release_timer = threading.Timer(0.05, fcntl.flock, (lock_file, fcntl.LOCK_UN))
        release_timer.start()
        with run.lock():
            assert run.is_locked()
        release_timer.join()


def test_a_user_who_may_only_read_the_workspace_sees_whether_a_run_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, open_file = Run("r", workspace=tmp_path), os.open

    def open_as_reader(path: Path, flags: int, *arguments: Any) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", path)
        return open_file(path, flags, *arguments)

    with run.lock(), monkeypatch.context() as patch:
        patch.setattr(os, "open", open_as_reader)
        assert run.is_locked()
    monkeypatch.setattr(os, "open", open_as_reader)
    assert not run.is_locked()


@pytest.mark.parametrize(
    "run_id", ["", ".", "..", "../../x", "/etc", "a/b", "a\\b", "a.b", "a b", "a\n", "-a", "~", "ü", "a" * 101, "a\0", "%2e%2e"]
)
def test_a_run_id_is_the_name_of_a_folder_and_never_a_path(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(InputError, match="a run id consists of letters, digits, - and _"):
        Run(run_id, workspace=tmp_path)


def test_a_folder_that_nightjar_did_not_create_is_not_a_run(tmp_path: Path) -> None:
    user_folder = tmp_path / "runs" / "theirs"
    (user_folder / "embeddings").mkdir(parents=True)
    (user_folder / "embeddings" / "mine.npy").write_text("kept")
    (user_folder / "config.yaml").write_text("kept")
    (tmp_path / "runs" / "link").symlink_to(user_folder)
    for run_id, message in (("theirs", "holds files, but not the marker .nightjar"), ("link", "is a link")):
        with pytest.raises(InputError, match=message), Run(run_id, workspace=tmp_path).lock():
            pass
    assert sorted(path.name for path in user_folder.rglob("*")) == ["config.yaml", "embeddings", "mine.npy"]


def _hold_lock(workspace: Path, is_locked: Any, may_end: Any) -> None:
    with Workspace(workspace).lock(run_id="first"):
        is_locked.set()
        may_end.wait()


@pytest.mark.parametrize("end", ["finished", "killed"])
def test_a_second_command_in_a_workspace_is_rejected_with_pid_and_run_of_the_first_command(tmp_path: Path, end: str) -> None:
    fork = multiprocessing.get_context("fork")
    is_locked, may_end = fork.Event(), fork.Event()
    first_process = fork.Process(target=_hold_lock, args=(tmp_path, is_locked, may_end))
    first_process.start()
    assert is_locked.wait(60) and first_process.pid is not None
    message = (
        rf"process {first_process.pid} on {socket.gethostname()} with run first, since \d{{4}}-.* UTC, is using this workspace"
    )
    with pytest.raises(InputError, match=message), Workspace(tmp_path).lock(run_id="second"):
        pass
    if end == "killed":
        os.kill(first_process.pid, signal.SIGKILL)
    else:
        may_end.set()  # set() would block if the waiting process was killed
    first_process.join()
    with Workspace(tmp_path).lock(run_id="second"):
        assert json.loads((tmp_path / ".command.json").read_text())["run_id"] == "second"


def test_a_workspace_on_a_full_disk_can_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_text_on_full_disk(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tasks.runs.workspace.write_text", write_text_on_full_disk)
    (tmp_path / ".command.json").write_text('{"pid": 1, "host": "h", "run_id": "killed", "started": "2026"}')
    with (
        Workspace(tmp_path).lock(run_id="clean"),
        pytest.raises(InputError, match="another process is using this workspace"),
        Workspace(tmp_path).lock(run_id="second"),
    ):
        pass


def test_the_lock_file_of_another_user_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_as_another_user(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", open_as_another_user)
    message = f"{tmp_path}/.command.lock: permission denied; run nightjar as the user who"
    with pytest.raises(InputError, match=message), Workspace(tmp_path).lock(run_id="first"):
        pass
