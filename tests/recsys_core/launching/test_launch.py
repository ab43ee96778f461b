"""Launches whose ranks fail, hang or are killed: each raises an explanatory error and leaves no process."""

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
from tests.recsys_core.launching.scripted_launches import agents_and_ranks, launch_ranks

ROOT = Path(__file__).resolve().parents[3]
NO_TORCHX = pytest.mark.skipif(find_spec("torchx") is None, reason="torchx is not installed")
KINDS = ["local", pytest.param("torchx", marks=[NO_TORCHX, pytest.mark.drill])]
GONE_WITHIN_S = 10.0
PAGE_BYTES = 4096
"""Bytes that a file takes at least on a tmpfs."""


@pytest.fixture(autouse=True)
def ranks_import_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_a_rank_that_hangs_is_reported_with_its_function_and_no_process_is_left(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"sent no heartbeat for 2 s; raise training\.heartbeat_timeout_s") as caught:
        launch_ranks(tmp_path, {1: "hang"}, heartbeat_timeout_s=2)
    lines = str(caught.value).splitlines()
    assert lines[1].startswith("rank 0 (host ") and ": barrier (distributed_c10d.py:" in lines[1]
    assert lines[2].startswith("rank 1 (host ") and ": hang (scripted_ranks.py:" in lines[2]
    assert not agents_and_ranks()


def test_a_rank_out_of_gpu_memory_is_reported_with_advice_and_traceback(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="rank 1 was the first to fail, with an exception; torch") as caught:
        launch_ranks(tmp_path, {1: "run out of GPU memory"})
    message = str(caught.value)
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB; lower training.batch_size" in message
    assert 'raise torch.cuda.OutOfMemoryError("CUDA' in message, "the traceback is missing"


def test_an_input_error_of_a_rank_keeps_its_message_and_is_not_blamed_on_its_peer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^the input is invalid; fix it$"):
        launch_ranks(tmp_path, {1: "reject input"})


def test_a_rank_killed_by_a_signal_is_the_cause_and_not_its_peer_that_lost_the_connection(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"rank 1 was the first to fail, with signal SIGKILL .*out of memory") as caught:
        launch_ranks(tmp_path, {1: "kill itself"})
    assert not isinstance(caught.value, InputError)


def test_an_agent_that_starts_too_late_is_ended_and_reported_with_the_setting(tmp_path: Path) -> None:
    # A fast host is ready while the message is written.
    with pytest.raises(LaunchError, match=r"(missing: host 0|ranks 0, 1 do not run).*raise launcher\.rendezvous_timeout_s"):
        launch_ranks(tmp_path, {}, launcher=LocalLauncher(rendezvous_timeout_s=0.01))
    assert not agents_and_ranks()


def test_a_disk_that_a_rank_fills_is_reported_with_the_folder_and_the_free_space(small_disk: Path) -> None:
    with pytest.raises(InputError, match=rf"^{small_disk}/logs: the output of .*ranks? .*does not fit.* has 0\.000 GiB free"):
        launch_ranks(small_disk, {1: "fill the disk"})


def test_a_disk_with_room_only_for_launch_json_is_reported_instead_of_the_exit_code_of_torchrun(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(2**20 - 3 * PAGE_BYTES))
    with pytest.raises(InputError, match=rf"^{small_disk}/logs: .*, but the disk has 0\.000 GiB free; free some"):
        launch_ranks(small_disk, {})


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
def running_launch(folder: Path, kind: str) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """Yield a process that has launched two ranks, once both work, and all processes below it."""
    command = [sys.executable, "-m", "tests.recsys_core.launching.scripted_launches", str(folder), kind]
    with (folder / "output").open("wb") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not all((folder / f"sum-{rank}").is_file() for rank in range(2)):
            assert launcher.poll() is None and time.monotonic() < deadline, (folder / "output").read_text()
            time.sleep(0.1)
        yield launcher, psutil.Process(launcher.pid).children(recursive=True)
    finally:
        launcher.kill()
        launcher.wait()


def assert_gone(processes: list[psutil.Process]) -> None:
    assert processes
    _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
    assert not alive, [process.cmdline() for process in alive]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.drill)])
def test_every_process_below_the_launching_process_ends_with_it(tmp_path: Path, kind: str, number: signal.Signals) -> None:
    with running_launch(tmp_path, kind) as (launcher, below):
        started = {rank.pid for rank in LaunchFolder(tmp_path / "logs").started_ranks().values()}
        assert len(started) == 2 and started <= {process.pid for process in below}
        launcher.send_signal(number)
        assert_gone(below)
        assert launcher.wait(GONE_WITHIN_S) == (-number if number == signal.SIGKILL else 128 + number)


@NO_TORCHX
@pytest.mark.drill
@pytest.mark.parametrize("kind", ["remote", "remote, long lease"])
def test_remote_hosts_end_when_the_lease_expires_or_when_another_launch_takes_it_over(tmp_path: Path, kind: str) -> None:
    with running_launch(tmp_path, kind) as (launcher, below):
        launcher.kill()
        launcher.wait()
        _, alive = psutil.wait_procs(below, timeout=1.0)
        assert alive, "they ended at once and not because of the lease"
        if kind == "remote, long lease":
            LaunchFolder(tmp_path / "logs").renew_lease("another", 0)
        assert_gone(alive)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_agent_ends_its_ranks_and_the_launch_fails(tmp_path: Path, kind: str) -> None:
    with running_launch(tmp_path, kind) as (launcher, below):
        agent = LaunchFolder(tmp_path / "logs").ready_hosts()[0].pid
        assert agent in {process.pid for process in below}
        os.kill(agent, signal.SIGKILL)
        assert_gone(below)
        assert launcher.wait(GONE_WITHIN_S) == 1
    output = (tmp_path / "output").read_text()
    assert "LaunchError" in output and ("SIGKILL" if kind == "local" else "an agent was killed") in output, output


def test_a_launch_error_is_a_stage_error_with_exit_code_1() -> None:
    assert issubclass(LaunchError, StageError) and LaunchError.exit_code == 1
