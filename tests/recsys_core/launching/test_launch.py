"""What becomes of a launch whose ranks misbehave, or whose processes are killed: an error that says so, and nothing left."""

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
from recsys_core.launching.launch import launch
from recsys_core.launching.messages import LaunchFolder
from tests.recsys_core.launching.launches import agents_and_ranks, launch_ranks, plan_of

ROOT = Path(__file__).resolve().parents[3]
NO_TORCHX = pytest.mark.skipif(find_spec("torchx") is None, reason="no torchx here")
KINDS = ["local", pytest.param("torchx", marks=[NO_TORCHX, pytest.mark.drill])]
GONE_WITHIN_S = 10.0
PAGE = 4096
"""A file of a tmpfs takes at least one."""


@pytest.fixture(autouse=True)
def ranks_find_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_a_rank_that_hangs_is_named_with_the_function_it_hangs_in_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"gave no sign of life for 2 s; raise training\.heartbeat_timeout_s") as caught:
        launch_ranks(tmp_path, {1: "hang"}, heartbeat_timeout_s=2)
    told = str(caught.value).splitlines()
    assert told[1].startswith("rank 0 (host ") and ": barrier (distributed_c10d.py:" in told[1]
    assert told[2].startswith("rank 1 (host ") and ": wait_forever (ranks.py:" in told[2]
    assert not agents_and_ranks()


def test_a_rank_that_runs_out_of_gpu_memory_says_so_by_name_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="rank 1 was the first to fail, with an exception; torch") as caught:
        launch_ranks(tmp_path, {1: "use too much memory"})
    said = str(caught.value)
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB; lower training.batch_size" in said
    assert 'raise torch.cuda.OutOfMemoryError("CUDA' in said, "the traceback is missing"


def test_what_a_rank_refuses_on_purpose_is_an_input_error_and_no_failure_of_its_peer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^the input is wrong; fix it$"):
        launch_ranks(tmp_path, {1: "refuse"})


def test_a_rank_killed_by_a_signal_is_the_culprit_and_not_its_peer_whose_connection_broke(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"rank 1 was the first to fail, with signal SIGKILL .*out of memory") as caught:
        launch_ranks(tmp_path, {1: "kill"})
    assert not isinstance(caught.value, InputError)


def test_ranks_that_do_not_start_in_time_are_a_launch_error_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"ranks 0, 1 do not run.*raise launcher\.rendezvous_timeout_s"):
        launch_ranks(tmp_path, {}, launcher=LocalLauncher(rendezvous_timeout_s=1.5))
    assert not agents_and_ranks()


def test_a_disk_that_a_rank_fills_is_told_with_the_folder_and_what_is_free(small_disk: Path) -> None:
    with pytest.raises(InputError, match=rf"^{small_disk}/logs: what .*ranks? .*does not fit.* has 0\.000 GiB free"):
        launch_ranks(small_disk, {1: "fill the disk"})


def test_a_disk_that_has_room_for_the_order_alone_is_told_and_not_torchruns_exit_code(small_disk: Path) -> None:
    (small_disk / "already").write_bytes(bytes(2**20 - 3 * PAGE))
    with pytest.raises(InputError, match=rf"^{small_disk}/logs: .*, but the disk has 0\.000 GiB free; free some"):
        launch_ranks(small_disk, {})


def test_a_plan_for_two_hosts_is_refused_by_the_launcher_of_one_with_the_way_out(tmp_path: Path) -> None:
    plan = plan_of(nodes=2, processes=1)
    with pytest.raises(
        InputError, match=r"made for 2 hosts.*set launcher\.kind to torchx, or sharding\.cluster\.num_nodes to 1"
    ):
        launch(
            tmp_path / "job", plan=plan, logs=tmp_path / "logs", start_timeout_s=1, heartbeat_timeout_s=1, alive=tmp_path / "a"
        )
    assert not (tmp_path / "logs").exists()


@contextmanager
def working(folder: Path, kind: str) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """A process that launches two ranks, once both work; and all processes below it."""
    command = [sys.executable, "-m", "tests.recsys_core.launching.launches", str(folder), kind]
    with (folder / "output").open("wb") as output:
        flow = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not all((folder / f"sum-{rank}").is_file() for rank in range(2)):
            assert flow.poll() is None and time.monotonic() < deadline, (folder / "output").read_text()
            time.sleep(0.1)
        yield flow, psutil.Process(flow.pid).children(recursive=True)
    finally:
        flow.kill()
        flow.wait()


def require_gone(processes: list[psutil.Process]) -> None:
    assert processes
    _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
    assert not alive, [process.cmdline() for process in alive]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.drill)])
def test_when_the_launching_process_is_ended_every_process_below_it_ends(
    tmp_path: Path, kind: str, number: signal.Signals
) -> None:
    with working(tmp_path, kind) as (flow, below):
        started = {rank.pid for rank in LaunchFolder(tmp_path / "logs").ranks().values()}
        assert len(started) == 2 and started <= {process.pid for process in below}
        flow.send_signal(number)
        require_gone(below)
        assert flow.wait(GONE_WITHIN_S) == (-number if number == signal.SIGKILL else 128 + number)


@NO_TORCHX
@pytest.mark.drill
@pytest.mark.parametrize("kind", ["far", "far, long lease"])
def test_hosts_elsewhere_end_when_the_lease_stands_still_and_at_once_when_a_resumed_run_begins(
    tmp_path: Path, kind: str
) -> None:
    with working(tmp_path, kind) as (flow, below):
        flow.kill()
        flow.wait()
        _, alive = psutil.wait_procs(below, timeout=1.0)
        assert alive, "they ended at once, not by the lease"
        if kind == "far, long lease":
            LaunchFolder(tmp_path / "logs").renew_lease("another", 0)
        require_gone(alive)


@pytest.mark.parametrize("kind", KINDS)
def test_when_an_agent_is_killed_its_ranks_end_and_the_launch_fails_soon(tmp_path: Path, kind: str) -> None:
    with working(tmp_path, kind) as (flow, below):
        agent = LaunchFolder(tmp_path / "logs").joined()[0].pid
        assert agent in {process.pid for process in below}
        os.kill(agent, signal.SIGKILL)
        require_gone(below)
        assert flow.wait(GONE_WITHIN_S) == 1
    said = (tmp_path / "output").read_text()
    assert "LaunchError" in said and ("SIGKILL" if kind == "local" else "an agent was killed") in said, said


def test_an_error_of_the_launch_is_a_stage_error_so_that_the_exit_code_is_1() -> None:
    assert issubclass(LaunchError, StageError) and LaunchError.exit_code == 1
