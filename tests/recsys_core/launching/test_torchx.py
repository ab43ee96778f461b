"""TorchX: what would be submitted, and two hosts that are this machine twice, with all that can go wrong between them."""

import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from recsys_core.errors import InputError, LaunchError
from recsys_core.launching.config import MountConfig, TorchxLauncher
from recsys_core.launching.messages import LaunchFolder, Order
from tests.recsys_core.launching.launches import TWICE_HERE, agents_and_ranks, launch_ranks

pytest.importorskip("torchx")
from torchx.runner import get_runner

from recsys_core.launching.torchx import request_of

ROOT = Path(__file__).resolve().parents[3]
REQUESTS = Path(__file__).parent / "requests"
FOLDER = Path("/shared/workspace/runs/20261121-020000-ab12/train.work/logs/attempt-1")
ORDER = Order(
    token="0123456789abcdef",
    versions={},
    module="recsys_core.training",
    job=FOLDER.parents[1] / "job.json",
    device="cuda",
    num_nodes=2,
    processes_per_node=8,
    rendezvous_port=29500,
    rendezvous_timeout_s=300,
    lease_timeout_s=60,
)


@pytest.fixture(autouse=True)
def hosts_find_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def submitted(launcher: TorchxLauncher) -> str:
    with get_runner() as runner:
        return str(request_of(ORDER, LaunchFolder(FOLDER), launcher=launcher, runner=runner))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a stand-in for Slurm, which is found on the PATH."""
    tools, state = tmp_path / "bin", tmp_path / "slurm"
    tools.mkdir()
    state.mkdir()
    for name in ("sbatch", "srun", "sacct", "scancel", "sinfo"):
        tool = tools / name
        tool.write_text(f"#!{sys.executable}\n{(Path(__file__).parent / 'slurm.py').read_text()}")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(state))
    return state


def test_the_request_to_slurm_is_one_task_per_host_with_its_gpus_and_number(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["nightjar"])  # TorchX notes the command in the script
    launcher = TorchxLauncher(
        scheduler="slurm",
        args={"partition": "gpu", "time": "04:00:00"},
        python="/shared/nightjar/.venv/bin/python",
        cpus=64,
        memory_gb=512,
        env={"NCCL_SOCKET_IFNAME": "ib0"},
        rendezvous_port=29500,
    )
    assert submitted(launcher) == (REQUESTS / "slurm.txt").read_text()


SLURM = TWICE_HERE.model_copy(update={"scheduler": "slurm", "interface": "lo", "args": {"partition": "gpu"}})


@pytest.mark.drill
def test_a_batch_script_starts_hosts_that_meet_and_end_well(slurm: Path, tmp_path: Path) -> None:
    launch_ranks(tmp_path, {}, launcher=SLURM)
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["2", "2"]
    assert (slurm / "100.state").read_text() == "COMPLETED"


@pytest.mark.drill
def test_a_batch_job_whose_ranks_fall_silent_is_cancelled_and_their_functions_are_told(slurm: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"gave no sign of life for 2 s.*\n.*\n.*wait_forever"):
        launch_ranks(tmp_path, {1: "hang"}, launcher=SLURM, heartbeat_timeout_s=2)
    assert (slurm / "100.state").read_text() == "CANCELLED"
    agents = [host.pid for host in LaunchFolder(tmp_path / "logs").joined().values()]
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in agents if psutil.pid_exists(pid)], timeout=10)
    assert not alive


def test_the_request_to_kubernetes_is_a_job_of_one_pod_per_host_with_the_shared_volume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("kubernetes")
    from torchx.schedulers import kubernetes_scheduler

    monkeypatch.setattr(kubernetes_scheduler, "make_unique", lambda name: f"{name}-x")
    monkeypatch.setenv("USER", "night")
    launcher = TorchxLauncher(
        scheduler="kubernetes",
        args={"namespace": "recsys", "queue": "nightly"},
        image="nightjar:0.1.0",
        cpus=64,
        memory_gb=512,
        mounts=(MountConfig(src="nightjar-shared", dst="/shared"),),
        rendezvous_port=29500,
    )
    assert submitted(launcher) == (REQUESTS / "kubernetes.yaml").read_text()


def test_a_scheduler_that_torchx_has_not_is_refused_with_those_it_has() -> None:
    with pytest.raises(InputError, match=r"launcher\.scheduler is slrum, but TorchX has .*kubernetes, .*slurm"):
        submitted(TorchxLauncher(scheduler="slrum"))


def test_a_setting_that_the_scheduler_requires_is_named() -> None:
    with pytest.raises(InputError, match=r"launcher\.scheduler kubernetes refuses the request .*queue.*args are none"):
        submitted(TorchxLauncher(scheduler="kubernetes", image="nightjar:0.1.0"))


def test_the_culprit_is_named_with_its_host_and_the_signal_handlers_stay_ours(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    host = socket.gethostname()
    with pytest.raises(LaunchError, match=f"rank [01] on host {host} was the first to fail, with signal SIGKILL"):
        launch_ranks(tmp_path, {1: "kill"}, launcher=TWICE_HERE)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert not agents_and_ranks()


def second_host(folder: Path, instead: str) -> str:
    """An interpreter for the hosts that does `instead` on node 1, as a host that is not like the others."""
    script = folder / "python"
    order, token, node = "$3", "$4", "$5"
    script.write_text(
        f'#!/bin/sh\nif [ "{node}" = 1 ]; then\n  order={order} token={token}\n  {instead}\nfi\nexec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


AGENT = f"exec {sys.executable} -m recsys_core.launching.agent"


@pytest.mark.drill
def test_a_host_that_does_not_come_is_named_with_those_that_came(tmp_path: Path) -> None:
    launcher = TWICE_HERE.model_copy(
        update={"python": second_host(tmp_path, "echo no disk left >&2; exec sleep 600"), "rendezvous_timeout_s": 20.0}
    )
    with pytest.raises(LaunchError, match=r"1 of 2 hosts started within 20 s: node 0 \(host .*\); missing: node 1;") as caught:
        launch_ranks(tmp_path, {}, launcher=launcher)
    assert "last lines of node 1:\nno disk left" in str(caught.value)
    assert not agents_and_ranks()


@pytest.mark.drill
def test_a_host_without_the_shared_storage_says_so_before_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = second_host(tmp_path, f'mkdir -p {tmp_path}/own; {AGENT} {tmp_path}/own/launch.json "$token" 1 NONE')
    with pytest.raises(InputError, match=r"host \S+ \(node 1\) does not see \S+/own/launch\.json.*same path"):
        launch_ranks(tmp_path, {}, launcher=TWICE_HERE.model_copy(update={"python": python}))


def test_a_host_that_sees_another_folder_under_the_same_name_says_so(tmp_path: Path) -> None:
    python = second_host(tmp_path, f'{AGENT} "$order" "stale" 1 NONE')
    with pytest.raises(InputError, match=r"host \S+ \(node 1\) sees another .*it is not the same folder"):
        launch_ranks(tmp_path, {}, launcher=TWICE_HERE.model_copy(update={"python": python}))


def test_a_host_with_another_version_is_named_with_both(tmp_path: Path) -> None:
    other = (
        "import recsys_core, sys; recsys_core.__version__ = '0.0.9'; sys.argv = ['agent', '$order', '$token', '1', 'NONE']; "
    )
    other += "import runpy; runpy.run_module('recsys_core.launching.agent', run_name='__main__')"
    python = second_host(tmp_path, f'exec {sys.executable} -c "{other}"')
    with pytest.raises(InputError, match=r"host \S+ \(node 1\) runs nightjar 0\.0\.9 where the run has \d"):
        launch_ranks(tmp_path, {}, launcher=TWICE_HERE.model_copy(update={"python": python}))


def test_a_rendezvous_port_that_is_in_use_is_named_with_its_host(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = TWICE_HERE.model_copy(update={"rendezvous_port": port})
        with pytest.raises(InputError, match=rf"port {port} on host \S+ \(node 0\) .* in use; .*launcher\.rendezvous_port"):
            launch_ranks(tmp_path, {}, launcher=launcher)


@pytest.mark.drill
def test_a_host_that_cannot_reach_the_first_one_says_where_it_tried(tmp_path: Path) -> None:
    first = '"$(dirname "$order")/joined-0.json"'
    moved = f'while ! [ -f {first} ]; do sleep 0.1; done; sed -i \'s/"port":[0-9]*/"port":9/\' {first}'
    python = second_host(tmp_path, f'{moved}; {AGENT} "$order" "$token" 1 NONE')
    launcher = TWICE_HERE.model_copy(update={"python": python, "rendezvous_timeout_s": 25.0})
    with pytest.raises(LaunchError, match=r"(did not meet the others at 127\.0\.0\.1:9|ranks 0, 1 do not run: the hosts)"):
        launch_ranks(tmp_path, {}, launcher=launcher)
    assert not agents_and_ranks()
