"""Setup of a rank's process: the kernel kills it when its agent dies, and it joins the process group of all ranks.

torch is imported in the last function only, because `register_rank` runs before the import of torch, which takes seconds.
"""

import faulthandler
import os
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from recsys_core.launching.messages import FOLDER_VARIABLE, STORE_VARIABLE, Host, LaunchFolder, RankReport
from recsys_core.termination import die_with_parent

if TYPE_CHECKING:
    import torch

STACK_SIGNAL = signal.SIGUSR1
COLLECTIVE_TIMEOUT_S = 3600.0
"""Longer than usual values of training.heartbeat_timeout_s, so that the launching process detects a hang first."""


def register_rank() -> None:
    """Make the kernel kill this rank when its agent dies, install the stack dump, and report that the rank has started."""
    die_with_parent()
    folder, rank = LaunchFolder(Path(os.environ[FOLDER_VARIABLE])), int(os.environ["RANK"])
    # A C signal handler writes the dump, so it works while Python waits in a collective. The file must stay open.
    faulthandler.register(STACK_SIGNAL, file=folder.stack_path(rank).open("w"))
    host = Host(index=int(os.environ["GROUP_RANK"]), name=platform.node())
    folder.report_start(RankReport(rank=rank, host=host, pid=os.getpid()))


def request_stacks(folder: LaunchFolder, *, host: Host) -> None:
    """Send the stack signal to the ranks of this host that have started. It would kill a rank without a handler."""
    for rank_report in folder.start_reports().values():
        if rank_report.host.index == host.index:
            with suppress(ProcessLookupError):
                os.kill(rank_report.pid, STACK_SIGNAL)


def pin_to_core_share(*, local_rank: int, num_local_ranks: int) -> None:
    """Pin this process to its share of the host's cores, if there is at least one core per rank.

    In each step a rank waits for the other ranks many times. After a wait the kernel may move the rank to another core, whose
    caches do not contain the data of the rank.
    """
    cores = sorted(os.sched_getaffinity(0))
    cores_per_rank = len(cores) // num_local_ranks
    if num_local_ranks > 1 and cores_per_rank:
        os.sched_setaffinity(0, cores[local_rank * cores_per_rank : (local_rank + 1) * cores_per_rank])


def use_batch_scheduling() -> None:
    """Set the scheduling policy SCHED_BATCH: a thread that wakes up does not preempt the thread that is running on its core.

    gloo's sender threads wake up tens of times per step for some microseconds. If a sender thread preempted the trainer, the
    preemption would cost more than the work of the thread. Threads that this process starts later inherit the policy.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return  # not Linux, or the user has set a policy for this process
    with suppress(OSError):  # a sandbox may forbid the policy; the rank is then slower, with the same results
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@dataclass(frozen=True)
class Process:
    """This process: its rank, the number of ranks, and the device it trains on."""

    rank: int
    world_size: int
    device: "torch.device"

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes files such as result.json."""
        return self.rank == 0


@contextmanager
def join_process_group(*, device_type: str) -> Iterator[Process]:
    """Join the group that torchrun's environment variables describe: NCCL and gloo on GPUs, gloo on CPUs."""
    import torch

    dist = torch.distributed
    backend, device, timeout = "gloo", torch.device("cpu"), timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if device_type == "cuda":
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if STORE_VARIABLE in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(os.environ[STORE_VARIABLE], world_size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    yield Process(rank=dist.get_rank(), world_size=dist.get_world_size(), device=device)
    # This call is not in a `finally` block. After an exception, the other ranks would fail on the closed connection before this
    # rank has reported its own error.
    dist.destroy_process_group()
