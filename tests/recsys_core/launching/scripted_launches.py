"""Launches of two scripted ranks, on one host or on two hosts. Both hosts are this machine."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from recsys_core.launching.config import Launcher, LocalLauncher, TorchxLauncher
from recsys_core.launching.heartbeat import HeartbeatFile
from recsys_core.launching.launch import launch
from recsys_core.launching.messages import AGENT_MODULE, RankLayout
from recsys_core.termination import PARENT_VARIABLE

RANK_MODULE = "tests.recsys_core.launching.scripted_ranks"
ONE_HOST = LocalLauncher()
TWO_HOSTS = TorchxLauncher(scheduler="local_cwd", env={"OMP_NUM_THREADS": "1"}, rendezvous_timeout_s=120, lease_timeout_s=10)


def agents_and_ranks() -> list[psutil.Process]:
    """Return the agents and ranks below this process, which may have other children too."""
    modules, matching_processes = {AGENT_MODULE, RANK_MODULE}, list[psutil.Process]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # the process has ended, or is a zombie
            if modules & set(process.cmdline()):
                matching_processes.append(process)
    return matching_processes


def launch_ranks(
    folder: Path,
    action_by_rank: dict[int, str],
    *,
    launcher: Launcher = ONE_HOST,
    heartbeat_timeout_s: float = 60.0,
) -> None:
    """Launch two ranks that perform the actions of scripted_ranks.py, with all files in `folder`."""
    num_hosts = 1 if launcher.kind == "local" else 2
    job_path = folder / "job.json"
    job_path.write_text(json.dumps({"action_by_rank": action_by_rank, "heartbeat_path": str(folder / "heartbeat")}))
    launch(
        job_path,
        layout=RankLayout(device="cpu", num_hosts=num_hosts, ranks_per_host=2 // num_hosts),
        folder=folder / "logs",
        heartbeat_file=HeartbeatFile(folder / "heartbeat", start_timeout_s=120, timeout_s=heartbeat_timeout_s),
        launcher=launcher,
        module=RANK_MODULE,
    )


REMOTE_LAUNCHER = TWO_HOSTS.model_copy(update={"env": {"OMP_NUM_THREADS": "1", PARENT_VARIABLE: ""}, "lease_timeout_s": 6.0})
"""Launcher of hosts that do not end with the launching process, as if they were other machines."""
REMOTE_LAUNCHER_WITH_LONG_LEASE = REMOTE_LAUNCHER.model_copy(update={"lease_timeout_s": 60.0})
LAUNCHER_BY_NAME = {
    "local": ONE_HOST,
    "torchx": TWO_HOSTS,
    "remote": REMOTE_LAUNCHER,
    "remote, long lease": REMOTE_LAUNCHER_WITH_LONG_LEASE,
}


if __name__ == "__main__":  # a launching process that a test can kill
    folder, launcher_name = sys.argv[1:]
    launch_ranks(Path(folder), {0: "wait", 1: "wait"}, launcher=LAUNCHER_BY_NAME[launcher_name])
