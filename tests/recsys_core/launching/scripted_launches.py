"""Launches of two scripted ranks: on this host, or one on each of two hosts that are this machine twice."""

import json
import sys
from pathlib import Path

import psutil

from recsys_core.launching.config import Launcher, LocalLauncher, TorchxLauncher
from recsys_core.launching.heartbeat import HeartbeatFile
from recsys_core.launching.launch import launch
from recsys_core.launching.messages import AGENT_MODULE, RankLayout
from recsys_core.parent_process import PARENT_VARIABLE

RANKS = "tests.recsys_core.launching.scripted_ranks"
ONE_HOST = LocalLauncher()
TWO_HOSTS = TorchxLauncher(scheduler="local_cwd", env={"OMP_NUM_THREADS": "1"}, rendezvous_timeout_s=120, lease_timeout_s=10)


def agents_and_ranks() -> list[psutil.Process]:
    """Return the agents and ranks below this process; the test suite has other children too."""
    modules = {AGENT_MODULE, RANKS}
    return [process for process in psutil.Process().children(recursive=True) if modules & set(process.cmdline())]


def launch_ranks(
    folder: Path,
    script: dict[int, str],
    *,
    launcher: Launcher = ONE_HOST,
    heartbeat_timeout_s: float = 60.0,
) -> None:
    """Launch two ranks in `folder`. script: rank -> action, see scripted_ranks."""
    num_hosts = 1 if launcher.kind == "local" else 2
    job = folder / "job.json"
    job.write_text(json.dumps({"script": script, "heartbeat": str(folder / "heartbeat")}))
    launch(
        job,
        layout=RankLayout(device="cpu", num_hosts=num_hosts, ranks_per_host=2 // num_hosts),
        folder=folder / "logs",
        heartbeat_file=HeartbeatFile(folder / "heartbeat", start_timeout_s=120, timeout_s=heartbeat_timeout_s),
        launcher=launcher,
        module=RANKS,
    )


REMOTE = TWO_HOSTS.model_copy(update={"env": {"OMP_NUM_THREADS": "1", PARENT_VARIABLE: ""}, "lease_timeout_s": 6.0})
"""Hosts that Linux does not end with the launching process, as if they were other machines."""
REMOTE_LONG_LEASE = REMOTE.model_copy(update={"lease_timeout_s": 60.0})
LAUNCHERS = {"local": ONE_HOST, "torchx": TWO_HOSTS, "remote": REMOTE, "remote, long lease": REMOTE_LONG_LEASE}


if __name__ == "__main__":  # FOLDER, key of LAUNCHERS: a launching process that a test can kill
    launch_ranks(Path(sys.argv[1]), {0: "wait", 1: "wait"}, launcher=LAUNCHERS[sys.argv[2]])
