"""Launches of tests.recsys_core.training.ranks: two ranks on one host, or one on each of two that are this machine twice."""

import json
import sys
from pathlib import Path

import psutil

from recsys_core.launching.config import Launcher, LocalLauncher, TorchxLauncher
from recsys_core.launching.launch import launch
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.parent_process import PARENT_VARIABLE
from recsys_core.sharding.config import ClusterConfig, ShardingConfig
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.sharding.planner import make_plan

RANKS = "tests.recsys_core.training.ranks"
HERE = LocalLauncher()
TWICE_HERE = TorchxLauncher(scheduler="local_cwd", env={"OMP_NUM_THREADS": "1"}, rendezvous_timeout_s=120, lease_timeout_s=10)


def plan_of(*, nodes: int, processes: int) -> PlanFile:
    """Of a small model, for so many ranks."""
    return make_plan(
        ShardingConfig(cluster=ClusterConfig(device="cpu", num_nodes=nodes, processes_per_node=processes)),
        model=ModelSpec.sized(TwoTowerConfig(), num_users=9, num_items=9),
        batch_size=1,
    )


def agents_and_ranks() -> list[psutil.Process]:
    """Those that run below this process; the test suite has children of its own besides."""
    modules = {"recsys_core.launching.agent", RANKS}
    return [one for one in psutil.Process().children(recursive=True) if modules & set(one.cmdline())]


def launch_ranks(
    folder: Path,
    does: dict[int, str],
    *,
    launcher: Launcher = HERE,
    heartbeat_timeout_s: float = 60.0,
) -> None:
    """Launches two ranks in `folder`, which do what `does` says."""
    nodes = 1 if launcher.kind == "local" else 2
    job = folder / "job.json"
    job.write_text(json.dumps({"does": does, "alive": str(folder / "alive")}))
    launch(
        job,
        plan=plan_of(nodes=nodes, processes=2 // nodes),
        logs=folder / "logs",
        start_timeout_s=120,
        heartbeat_timeout_s=heartbeat_timeout_s,
        alive=folder / "alive",
        launcher=launcher,
        module=RANKS,
    )


FAR = TWICE_HERE.model_copy(update={"env": {"OMP_NUM_THREADS": "1", PARENT_VARIABLE: ""}, "lease_timeout_s": 6.0})
"""Hosts that Linux does not end with the launching process, as if they were elsewhere."""
FAR_LONG_LEASE = FAR.model_copy(update={"lease_timeout_s": 60.0})
LAUNCHERS = {"local": HERE, "torchx": TWICE_HERE, "far": FAR, "far, long lease": FAR_LONG_LEASE}


if __name__ == "__main__":  # FOLDER, key of LAUNCHERS: a process of its own, to be killed
    launch_ranks(Path(sys.argv[1]), {0: "wait", 1: "wait"}, launcher=LAUNCHERS[sys.argv[2]])
