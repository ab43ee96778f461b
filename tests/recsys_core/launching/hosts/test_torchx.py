"""Requests to TorchX schedulers, and failures of launches on two hosts. Both hosts are this machine."""

import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from recsys_core.errors import InputError, LaunchError
from recsys_core.launching.config import MountConfig, TorchxLauncher
from recsys_core.launching.messages import AGENT_MODULE, LaunchFolder, LaunchSpec, RankLayout
from tests.recsys_core.launching.scripted_launches import TWO_HOSTS, agents_and_ranks, launch_ranks

pytest.importorskip("torchx")
from torchx.runner import get_runner

from recsys_core.launching.hosts.torchx import build_request

ROOT = Path(__file__).resolve().parents[4]
REQUESTS_FOLDER = Path(__file__).parent / "requests"
LAUNCH_FOLDER = Path("/shared/workspace/runs/20261121-020000-ab12/train.work/logs/attempt-1")
LAYOUT = RankLayout(device="cuda", num_hosts=2, ranks_per_host=8)


@pytest.fixture(autouse=True)
def hosts_import_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def request_for(launcher: TorchxLauncher) -> str:
    """Return the request that TorchX would send to the scheduler."""
    spec = LaunchSpec(
        token="0123456789abcdef", versions={}, module="none", job_path=Path("job.json"), layout=LAYOUT, launcher=launcher
    )
    with get_runner() as runner:
        return str(build_request(spec, LaunchFolder(LAUNCH_FOLDER), launcher=launcher, runner=runner))


@pytest.fixture
def slurm_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the tools of a fake Slurm on the PATH. Return the folder with the files of its jobs."""
    tools_folder, state_folder = tmp_path / "bin", tmp_path / "slurm"
    tools_folder.mkdir()
    state_folder.mkdir()
    for name in ("sbatch", "srun", "sacct", "scancel", "sinfo"):
        tool_path = tools_folder / name
        tool_path.write_text(f"#!{sys.executable}\n{(Path(__file__).parent / 'fake_slurm.py').read_text()}")
        tool_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools_folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(state_folder))
    return state_folder


def test_the_request_to_slurm_equals_the_stored_request(slurm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["nightjar"])  # TorchX writes the command into the script
    launcher = TorchxLauncher(
        scheduler="slurm",
        args={"partition": "gpu", "time": "04:00:00"},
        python="/shared/nightjar/.venv/bin/python",
        cpus=64,
        memory_gb=512,
        env={"NCCL_SOCKET_IFNAME": "ib0"},
        rendezvous_port=29500,
    )
    assert request_for(launcher) == (REQUESTS_FOLDER / "slurm.txt").read_text()


SLURM_LAUNCHER = TWO_HOSTS.model_copy(update={"scheduler": "slurm", "interface": "lo", "args": {"partition": "gpu"}})


@pytest.mark.drill
def test_a_slurm_job_runs_the_ranks_of_two_hosts_to_completion(slurm_folder: Path, tmp_path: Path) -> None:
    launch_ranks(tmp_path, {}, launcher=SLURM_LAUNCHER)
    assert [(tmp_path / f"num-ranks-{rank}").read_text() for rank in range(2)] == ["2", "2"]
    assert (slurm_folder / "100.state").read_text() == "COMPLETED"


@pytest.mark.drill
def test_a_slurm_job_whose_heartbeat_stops_is_cancelled_and_the_stacks_are_reported(slurm_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"sent no heartbeat for 2 s.*\n.*\n.*hang \(scripted_ranks"):
        launch_ranks(tmp_path, {1: "hang"}, launcher=SLURM_LAUNCHER, heartbeat_timeout_s=2)
    assert (slurm_folder / "100.state").read_text() == "CANCELLED"
    agent_pids = [report.pid for report in LaunchFolder(tmp_path / "logs").ready_reports().values()]
    _, remaining_processes = psutil.wait_procs(
        [psutil.Process(pid) for pid in agent_pids if psutil.pid_exists(pid)], timeout=10
    )
    assert not remaining_processes


def test_the_request_to_kubernetes_has_one_pod_per_host_with_the_shared_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kubernetes")
    from torchx.schedulers import kubernetes_scheduler

    monkeypatch.setattr(kubernetes_scheduler, "make_unique", lambda name: f"{name}-x")
    monkeypatch.setenv("USER", "recsys")
    launcher = TorchxLauncher(
        scheduler="kubernetes",
        args={"namespace": "recsys", "queue": "nightly"},
        image="nightjar:0.1.0",
        cpus=64,
        memory_gb=512,
        mounts=(MountConfig(src="nightjar-shared", dst="/shared"),),
        rendezvous_port=29500,
    )
    assert request_for(launcher) == (REQUESTS_FOLDER / "kubernetes.yaml").read_text()


def test_an_unknown_scheduler_is_rejected_and_the_error_lists_the_known_schedulers() -> None:
    with pytest.raises(InputError, match=r"launcher\.scheduler is slrum, but TorchX has .*kubernetes, .*slurm"):
        request_for(TorchxLauncher(scheduler="slrum"))


def test_a_missing_setting_of_the_scheduler_is_reported() -> None:
    with pytest.raises(InputError, match=r"launcher\.scheduler kubernetes rejects the request .*queue.*launcher\.args: empty"):
        request_for(TorchxLauncher(scheduler="kubernetes", image="nightjar:0.1.0"))


def test_a_killed_rank_is_reported_with_its_host_and_signal_handlers_are_restored(tmp_path: Path) -> None:
    handlers_before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    host_name = socket.gethostname()
    with pytest.raises(LaunchError, match=f"rank [01] on host {host_name} was the first to fail, with signal SIGKILL"):
        launch_ranks(tmp_path, {1: "kill itself"}, launcher=TWO_HOSTS)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers_before
    assert not agents_and_ranks()


def interpreter_with_commands_for_host_1(folder: Path, commands: str) -> str:
    """Return the path of an interpreter that executes shell commands on host 1, and Python on host 0.

    The commands can use the arguments of the agent as $spec and $token.
    """
    script_path = folder / "python"
    spec_argument, token_argument, host_argument = "$3", "$4", "$5"
    script_path.write_text(
        f'#!/bin/sh\nif [ "{host_argument}" = 1 ]; then\n  spec={spec_argument} token={token_argument}\n  {commands}\nfi\n'
        f'exec {sys.executable} "$@"\n'
    )
    script_path.chmod(0o755)
    return str(script_path)


AGENT_COMMAND = f"exec {sys.executable} -m {AGENT_MODULE}"


@pytest.mark.drill
def test_a_missing_host_is_reported_with_the_hosts_that_started(tmp_path: Path) -> None:
    launcher = TWO_HOSTS.model_copy(
        update={
            "python": interpreter_with_commands_for_host_1(tmp_path, "echo no disk left >&2; exec sleep 600"),
            "rendezvous_timeout_s": 20.0,
        }
    )
    with pytest.raises(LaunchError, match=r"1 of 2 hosts started within 20 s: host 0 \(.*\); missing: host 1;") as error_info:
        launch_ranks(tmp_path, {}, launcher=launcher)
    assert "last lines of host 1:\nno disk left" in str(error_info.value)
    assert not agents_and_ranks()


@pytest.mark.drill
def test_a_host_without_the_shared_storage_is_reported_before_the_deadline(tmp_path: Path) -> None:
    python_path = interpreter_with_commands_for_host_1(
        tmp_path, f'mkdir -p {tmp_path}/own; {AGENT_COMMAND} {tmp_path}/own/launch.json "$token" 1 NONE'
    )
    with pytest.raises(InputError, match=r"host 1 \(\S+\) cannot find \S+/own/launch\.json.*same path"):
        launch_ranks(tmp_path, {}, launcher=TWO_HOSTS.model_copy(update={"python": python_path}))


def test_a_host_that_sees_another_folder_of_the_same_name_is_reported(tmp_path: Path) -> None:
    python_path = interpreter_with_commands_for_host_1(tmp_path, f'{AGENT_COMMAND} "$spec" "stale" 1 NONE')
    with pytest.raises(InputError, match=r"host 1 \(\S+\) has another file at .*the folder is not shared"):
        launch_ranks(tmp_path, {}, launcher=TWO_HOSTS.model_copy(update={"python": python_path}))


def test_a_rendezvous_port_in_use_is_reported_with_its_host(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        launcher = TWO_HOSTS.model_copy(update={"rendezvous_port": port})
        with pytest.raises(
            InputError, match=rf"host 0 \(\S+\) cannot listen on .*port {port}: .* in use; .*launcher\.rendezvous_port"
        ):
            launch_ranks(tmp_path, {}, launcher=launcher)


@pytest.mark.drill
def test_a_host_that_cannot_reach_the_first_host_is_reported_with_the_address(tmp_path: Path) -> None:
    ready_file = '"$(dirname "$spec")/ready-0.json"'
    change_port_command = f'while ! [ -f {ready_file} ]; do sleep 0.1; done; sed -i \'s/"port":[0-9]*/"port":9/\' {ready_file}'
    python_path = interpreter_with_commands_for_host_1(
        tmp_path, f'{change_port_command}; {AGENT_COMMAND} "$spec" "$token" 1 NONE'
    )
    launcher = TWO_HOSTS.model_copy(update={"python": python_path, "rendezvous_timeout_s": 25.0})
    with pytest.raises(
        LaunchError, match=r"(could not connect to the other hosts at 127\.0\.0\.1:9|ranks 0, 1 do not run: the)"
    ):
        launch_ranks(tmp_path, {}, launcher=launcher)
    assert not agents_and_ranks()
