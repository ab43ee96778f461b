"""One attempt: processes on one host or many, started together, watched together, and always ended.

A failed attempt is never restarted in place (torchrun's own restart is not to be relied on: pytorch/pytorch#135712,
#167288); the caller launches a new one from the last verified checkpoint.
"""

import itertools
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType

import torch

from recsys_core.errors import InputError
from recsys_core.launching.config import Launcher, LocalLauncher
from recsys_core.launching.heartbeat import heartbeat
from recsys_core.launching.host_group import Group
from recsys_core.launching.local import start_here
from recsys_core.launching.messages import LaunchFolder, Order, running_versions
from recsys_core.launching.monitor import Deadline, Phase, Watch
from recsys_core.sharding.plan_file import PlanFile

RENEWALS_PER_LEASE = 20


def launch(
    job: Path,
    *,
    plan: PlanFile,
    logs: Path,
    start_timeout_s: float,
    heartbeat_timeout_s: float,
    alive: Path,
    poll: Callable[[], None] = lambda: None,
    launcher: Launcher = LocalLauncher(),  # noqa: B008  it is frozen
    module: str = "recsys_core.training",
) -> None:
    """Runs `python -m <module> <job>` as the ranks that `plan` wants, where `launcher` says; returns when all ended well.

    Args:
        job: JSON of a TrainJob or ExportJob.
        logs: new folder for what hosts and ranks write; with many hosts all of them see it, `job` and `alive`.
        start_timeout_s: from when all ranks run until the first sign of life.
        alive: file that the ranks touch while they work.
        poll: called about five times a second.

    Raises:
        InputError: the plan needs more processes or hosts than there are, a host is not fit to take part, or a rank found
            its input wrong.
        StageError: a rank gave up for a reason of its own, such as a loss that is not finite.
        LaunchError: hosts did not meet, or a rank failed or fell silent; names host and rank, exit code or signal, its
            traceback or last lines, or the functions that the ranks were in.
    """
    check_capacity(plan, launcher=launcher)
    logs.mkdir(parents=True)
    folder = LaunchFolder(logs.absolute())
    order = Order(
        token=secrets.token_hex(8),
        versions=running_versions(),
        module=module,
        job=job.absolute(),
        device=plan.device,
        num_nodes=plan.num_nodes,
        processes_per_node=plan.processes_per_node,
        interface=None if launcher.kind == "local" else launcher.network,
        rendezvous_port=0 if launcher.kind == "local" else launcher.rendezvous_port,
        rendezvous_timeout_s=launcher.rendezvous_timeout_s,
        lease_timeout_s=None if launcher.kind == "local" else launcher.lease_timeout_s,
    )
    deadlines: dict[Phase, Deadline] = {
        "queue": Deadline(0.0 if launcher.kind == "local" else launcher.queue_timeout_s, "launcher.queue_timeout_s"),
        "meeting": Deadline(launcher.rendezvous_timeout_s, "launcher.rendezvous_timeout_s"),
        "start": Deadline(start_timeout_s, "training.start_timeout_s"),
        "work": Deadline(heartbeat_timeout_s, "training.heartbeat_timeout_s"),
    }
    watch = Watch(order, folder, deadlines=deadlines, alive=alive)
    folder.write("launch.json", order)
    with _unwinding_on_sigterm(), _lease(order, folder), _start(order, folder, launcher=launcher) as group:
        try:
            watch.until_end(group, poll=poll)
        finally:
            group.end()
            poll()


def check_capacity(plan: PlanFile, *, launcher: Launcher) -> None:
    """InputError unless the launcher can start the processes that `plan` was made for, as far as this host can tell."""
    if launcher.kind != "local":
        return
    if plan.num_nodes != 1:
        raise InputError(
            f"plan.json: made for {plan.num_nodes} hosts, but launcher.kind is local, which starts processes on one; "
            "set launcher.kind to torchx, or sharding.cluster.num_nodes to 1"
        )
    if plan.device == "cuda" and torch.cuda.device_count() < plan.processes_per_node:
        raise InputError(
            f"plan.json: wants {plan.processes_per_node} GPUs on this host, but there are {torch.cuda.device_count()}; "
            "set sharding.cluster.processes_per_node, or device to cpu"
        )


def _start(order: Order, folder: LaunchFolder, *, launcher: Launcher) -> AbstractContextManager[Group]:
    if launcher.kind == "local":
        return start_here(order, folder)
    try:
        from recsys_core.launching.torchx import submit
    except ImportError as error:
        raise InputError(
            f"launcher.kind is torchx, but the package {error.name} is not installed; run pip install 'nightjar[torchx]'"
        ) from None
    return submit(order, folder, launcher=launcher)


def _lease(order: Order, folder: LaunchFolder) -> AbstractContextManager[None]:
    """Raise the counter in `lease` while the block runs; hosts elsewhere end when the counter stops."""
    if order.lease_timeout_s is None:
        return nullcontext()
    count = itertools.count()
    return heartbeat(
        lambda: folder.renew_lease(order.token, next(count)), interval_s=order.lease_timeout_s / RENEWALS_PER_LEASE
    )


@contextmanager
def _unwinding_on_sigterm() -> Iterator[None]:
    """SIGTERM, where nobody handles it, ends this process by an exception, so that what it started is ended first."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
