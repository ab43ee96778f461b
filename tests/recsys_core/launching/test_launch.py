"""Launches whose ranks fail, hang or are killed. A launch raises an error with the cause and leaves no process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from recsys_core.errors import InputError, LaunchError, StageError
from recsys_core.launching.config import LocalLauncher
from recsys_core.launching.heartbeat import HeartbeatFile
from recsys_core.launching.launch import launch
from recsys_core.launching.messages import LaunchFolder, RankLayout
from tests.recsys_core.launching.scripted_launches import REMOTE_LAUNCHER, agents_and_ranks, launch_ranks

ROOT = Path(__file__).resolve().parents[3]
needs_torchx = pytest.mark.skipif(find_spec("torchx") is None, reason="torchx is not installed")
LAUNCHER_NAMES = ["local", pytest.param("torchx", marks=[needs_torchx, pytest.mark.drill])]
END_TIMEOUT_S = 10.0
PAGE_BYTES = 4096
"""The least space that a file takes on a tmpfs."""


@pytest.fixture(scope="module", autouse=True)
def ranks_import_this_tree() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


def test_a_rank_that_hangs_is_reported_with_its_function_and_no_process_is_left(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"sent no heartbeat for 2 s; raise training\.heartbeat_timeout_s") as error_info:
        launch_ranks(tmp_path, {1: "hang"}, heartbeat_timeout_s=2)
    lines = str(error_info.value).splitlines()
    assert lines[1].startswith("rank 0 (host ") and ": barrier (distributed_c10d.py:" in lines[1]
    assert lines[2].startswith("rank 1 (host ") and ": hang (scripted_ranks.py:" in lines[2]
    assert not agents_and_ranks()


def test_an_input_error_of_a_rank_keeps_its_class_and_message(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^the input is invalid; fix it$"):
        launch_ranks(tmp_path, {1: "reject input"})


def test_the_error_names_a_killed_rank_instead_of_a_peer_without_connection(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"rank 1 was the first to fail, with signal SIGKILL .*out of memory") as error_info:
        launch_ranks(tmp_path, {1: "kill itself"})
    assert not isinstance(error_info.value, InputError)


def test_an_agent_that_starts_too_late_is_ended_and_reported_with_the_setting(tmp_path: Path) -> None:
    # If the host becomes ready while the message is written, the message names the ranks instead of the host.
    with pytest.raises(LaunchError, match=r"(missing: host 0|ranks 0, 1 do not run).*raise launcher\.rendezvous_timeout_s"):
        launch_ranks(tmp_path, {}, launcher=LocalLauncher(rendezvous_timeout_s=0.01))
    assert not agents_and_ranks()


def test_a_disk_that_a_rank_fills_is_reported_with_the_folder_and_the_free_space(small_disk: Path) -> None:
    with pytest.raises(InputError, match=rf"^{small_disk}/logs: the output of .*ranks? .*does not fit.* has 0\.000 GiB free"):
        launch_ranks(small_disk, {1: "fill the disk"})


def test_a_disk_that_is_full_after_launch_json_is_named_in_the_error(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(2**20 - 3 * PAGE_BYTES))
    with pytest.raises(InputError, match=rf"^{small_disk}/logs: .*, but the disk has 0\.000 GiB free; free some"):
        launch_ranks(small_disk, {})


def test_a_launch_without_torchx_names_the_extra_and_creates_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recsys_core.launching.launch.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"install nightjar with the extra torchx, e\.g\. pip install \"\.\[torchx\]\""):
        launch_ranks(tmp_path, {}, launcher=REMOTE_LAUNCHER)
    assert not (tmp_path / "logs").exists()


def test_the_local_launcher_rejects_a_layout_of_two_hosts_before_it_creates_a_folder(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"made for 2 hosts.*set launcher\.kind to torchx, or sharding\.cluster\.num_nodes to 1"
    ):
        launch(
            tmp_path / "job.json",
            layout=RankLayout(device="cpu", num_hosts=2, ranks_per_host=1),
            folder=tmp_path / "logs",
            heartbeat_file=HeartbeatFile(tmp_path / "heartbeat", start_timeout_s=1, timeout_s=1),
        )
    assert list(tmp_path.iterdir()) == []


@contextmanager
def running_launch(folder: Path, launcher_name: str) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """Launch two ranks from a new process. Once both ranks work, yield the new process and all processes below it."""
    command = [sys.executable, "-m", "tests.recsys_core.launching.scripted_launches", str(folder), launcher_name]
    with (folder / "output").open("wb") as output_file:
        launching_process = subprocess.Popen(
            command, stdout=output_file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 120
        while not all((folder / f"num-ranks-{rank}").is_file() for rank in range(2)):
            assert launching_process.poll() is None and time.monotonic() < deadline, (folder / "output").read_text()
            time.sleep(0.1)
        yield launching_process, psutil.Process(launching_process.pid).children(recursive=True)
    finally:
        launching_process.kill()
        launching_process.wait()


def assert_all_end(processes: list[psutil.Process]) -> None:
    """Assert that `processes` is not empty and that each process ends within END_TIMEOUT_S."""
    assert processes
    _, remaining_processes = psutil.wait_procs(processes, timeout=END_TIMEOUT_S)
    assert not remaining_processes, [process.cmdline() for process in remaining_processes]


@pytest.mark.drill
@pytest.mark.parametrize(
    ("launcher_name", "signal_number"),
    [  # test_torchrun.py kills a launch on one host
        ("local", signal.SIGTERM),
        pytest.param("torchx", signal.SIGTERM, marks=needs_torchx),
        pytest.param("torchx", signal.SIGKILL, marks=needs_torchx),
    ],
)
def test_every_process_below_the_launching_process_ends_with_it(
    tmp_path: Path, launcher_name: str, signal_number: signal.Signals
) -> None:
    with running_launch(tmp_path, launcher_name) as (launching_process, descendants):
        rank_pids = {report.pid for report in LaunchFolder(tmp_path / "logs").start_reports().values()}
        assert len(rank_pids) == 2 and rank_pids <= {process.pid for process in descendants}
        launching_process.send_signal(signal_number)
        assert_all_end(descendants)
        expected_exit_code = -signal_number if signal_number == signal.SIGKILL else 128 + signal_number
        assert launching_process.wait(END_TIMEOUT_S) == expected_exit_code


@needs_torchx
@pytest.mark.drill
@pytest.mark.parametrize("launcher_name", ["remote", "remote, long lease"])
def test_remote_hosts_end_when_the_lease_expires_or_another_launch_takes_it_over(tmp_path: Path, launcher_name: str) -> None:
    with running_launch(tmp_path, launcher_name) as (launching_process, descendants):
        launching_process.kill()
        launching_process.wait()
        _, remaining_processes = psutil.wait_procs(descendants, timeout=1.0)
        assert remaining_processes, "the hosts ended with the launching process and not because of the lease"
        if launcher_name == "remote, long lease":
            LaunchFolder(tmp_path / "logs").renew_lease("another", 0)
        assert_all_end(remaining_processes)


@pytest.mark.parametrize("launcher_name", LAUNCHER_NAMES)
def test_after_the_kill_of_an_agent_its_ranks_end_and_the_launch_fails(tmp_path: Path, launcher_name: str) -> None:
    with running_launch(tmp_path, launcher_name) as (launching_process, descendants):
        agent_pid = LaunchFolder(tmp_path / "logs").ready_reports()[0].pid
        assert agent_pid in {process.pid for process in descendants}
        os.kill(agent_pid, signal.SIGKILL)
        assert_all_end(descendants)
        assert launching_process.wait(END_TIMEOUT_S) == 1
    output = (tmp_path / "output").read_text()
    assert "LaunchError" in output and ("SIGKILL" if launcher_name == "local" else "an agent was killed") in output, output


def test_a_launch_error_is_a_stage_error_with_exit_code_1() -> None:
    assert issubclass(LaunchError, StageError) and LaunchError.exit_code == 1
