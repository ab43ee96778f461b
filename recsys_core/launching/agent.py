"""One host of a launch: python -m recsys_core.launching.agent ORDER TOKEN NODE HEAD_VARIABLE.

Looks whether it sees the launching process's folder, whether it runs the same versions and has the devices; then runs
torchrun, and writes down what became of its ranks. It and its ranks end with the launching process.
"""

import json
import os
import platform
import sys
import time
from pathlib import Path

import psutil

from recsys_core.disk import disk_full_error, is_disk_full
from recsys_core.launching.config import LOOPBACK
from recsys_core.launching.messages import (
    FOLDER_VARIABLE,
    NODE_VARIABLE,
    Failure,
    Joined,
    LaunchFolder,
    Order,
    Unfit,
    running_versions,
    wait_for,
)
from recsys_core.launching.network import LOOPBACK_ADDRESS, Meeting, listen, network_of
from recsys_core.parent_process import as_parent, die_with_parent
from recsys_core.preflight import cgroup_limits, oom_kills

SAYS = "nightjar agent:"
"""How a line starts that an agent prints because it has nowhere else to say it."""
STORAGE_WAIT_S = 15.0
UNFIT = 3


def main(order_file: str, token: str, node: str, head_variable: str) -> int:
    """The exit code: 0 if all ranks of this host ended well. head_variable: environment entry with the first host's name."""
    die_with_parent()
    host, folder = platform.node(), LaunchFolder(Path(order_file).parent)
    installed = psutil.virtual_memory().total
    memory = min(cgroup_limits().memory_bytes or installed, installed)
    killed_before = oom_kills()
    try:
        order = _read_order(folder.order, token=token, node=int(node), host=host)
        meeting = _join(order, folder=folder, node=int(node), host=host, head=os.environ.get(head_variable))
        os.environ.update(as_parent() | {FOLDER_VARIABLE: str(folder.path), NODE_VARIABLE: node})
        cores = len(psutil.Process().cpu_affinity() or [1])
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // order.processes_per_node)))
        os.environ["PYTHONUNBUFFERED"] = "1"
        from recsys_core.launching.torchrun import run_ranks

        failed = run_ranks(order, folder=folder, node=int(node), host=host, meeting=meeting)
    except _NotShared as error:
        sys.stderr.write(f"{SAYS} {error}\n")
        return UNFIT
    except Unfit as error:
        _give_up(folder, Failure(node=int(node), host=host, reason=str(error), retryable=error.retryable))
        return UNFIT
    if failed:
        killed = oom_kills()
        counted = None if killed is None or killed_before is None else killed - killed_before
        _give_up(folder, Failure(node=int(node), host=host, ranks=failed, oom_kills=counted, memory_bytes=memory))
        return 1
    (folder.path / f"done-{node}").touch()
    return 0


class _NotShared(Exception):
    """The order is not there, is another one, or nothing can be written beside it."""


def _read_order(path: Path, *, token: str, node: int, host: str) -> Order:
    """The order. Raises Unfit where it is of other versions and might not be understood."""
    ways_out = "workspace has to lie on storage that all hosts mount at the same path"
    if not wait_for(path, timeout_s=STORAGE_WAIT_S):
        raise _NotShared(f"host {host} (node {node}) does not see {path}, which the launching process wrote; {ways_out}")
    raw = json.loads(path.read_bytes())
    if raw["token"] != token:
        raise _NotShared(
            f"host {host} (node {node}) sees another {path} than the launching process wrote (token {raw['token']}, not "
            f"{token}): it is not the same folder; {ways_out}"
        )
    ours = running_versions()
    if raw["versions"] != ours:
        other = sorted(name for name in ours.keys() | raw["versions"].keys() if ours.get(name) != raw["versions"].get(name))
        told = ", ".join(f"{name} {ours.get(name)} where the run has {raw['versions'].get(name)}" for name in other)
        raise Unfit(f"host {host} (node {node}) runs {told}; use the same image or environment on all hosts")
    return Order.model_validate(raw)


def _join(order: Order, *, folder: LaunchFolder, node: int, host: str, head: str | None) -> Meeting:
    """Where the hosts meet, once the first host is there."""
    if not order.job.is_file():
        raise Unfit(f"host {host} (node {node}) does not see {order.job}; the workspace must be the same path on all hosts")
    if order.device == "cuda":
        from torch import cuda

        if cuda.device_count() < order.processes_per_node:
            raise Unfit(
                f"host {host} (node {node}): the plan wants {order.processes_per_node} GPUs per host, but this one has "
                f"{cuda.device_count()}; set sharding.cluster.processes_per_node, or ask the scheduler for more"
            )
    interface, address, listener = LOOPBACK, LOOPBACK_ADDRESS, None
    if order.num_nodes > 1:
        interface, address = network_of(order, node=node, host=host, head=(head or "").split(",")[0].strip())
        listener = listen(order, address, host=host) if node == 0 else None
    port = 0 if listener is None else listener.getsockname()[1]
    try:
        folder.write(f"joined-{node}.json", Joined(node=node, host=host, pid=os.getpid(), address=address, port=port))
    except FileExistsError:
        raise Unfit(f"host {host} (node {node}) was started a second time for the same attempt; start a new one") from None
    except OSError as error:
        if is_disk_full(error):
            raise _NotShared(str(disk_full_error(folder.path, needed=f"host {host} (node {node}) has to write here"))) from None
        raise _NotShared(
            f"host {host} (node {node}) cannot write into {folder.path}: {error.strerror}; mount the workspace writable there"
        ) from None
    if order.lease_timeout_s is not None and not _is_wanted(order, folder, timeout_s=order.lease_timeout_s):
        raise Unfit(f"host {host} (node {node}) started too late: the process that asked for it is gone", retryable=True)
    if not wait_for(folder.path / "joined-0.json", timeout_s=order.rendezvous_timeout_s):
        raise Unfit(f"node 0 did not start within {order.rendezvous_timeout_s:g} s of {host} (node {node})", retryable=True)
    first = Joined.model_validate_json((folder.path / "joined-0.json").read_bytes())
    return Meeting(interface=interface, address=address, endpoint=(first.address, first.port), listener=listener)


def _is_wanted(order: Order, folder: LaunchFolder, *, timeout_s: float) -> bool:
    """Whether the lease moves: a request may leave the scheduler's queue long after its run was killed."""
    first, deadline = folder.lease_of(order.token), time.monotonic() + timeout_s
    while folder.lease_of(order.token) in (first, None):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _give_up(folder: LaunchFolder, failure: Failure) -> None:
    try:
        folder.write(f"failure-{failure.node}.json", failure)
    except OSError:  # the host has given up already, or cannot write
        sys.stderr.write(f"{SAYS} {failure.reason}\n")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
