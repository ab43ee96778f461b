"""Linux settings for ranks on CPUs: core affinity and scheduling policy."""

import os
from contextlib import suppress


def prepare_rank(*, local_rank: int, num_local_ranks: int) -> None:
    """Apply all settings of this module to a rank's process. Call before it starts threads."""
    pin_to_core_share(local_rank=local_rank, num_local_ranks=num_local_ranks)
    use_batch_scheduling()


def pin_to_core_share(*, local_rank: int, num_local_ranks: int) -> None:
    """Pin this process to its share of the host's cores, if there is at least one core per rank.

    In each step a rank waits for the other ranks many times. After a wait the kernel may move the rank to another core, where
    the caches do not contain its data.
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
    with suppress(OSError):  # a sandbox may forbid it; the rank is then slower, with the same results
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
