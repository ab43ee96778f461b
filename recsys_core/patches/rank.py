"""Linux settings for ranks on CPUs: core affinity and scheduling policy."""

import os
from contextlib import suppress


def prepare_rank(*, local_rank: int, num_local_ranks: int) -> None:
    """Apply all settings of this module to a rank's process. Call before it starts threads."""
    pin_to_core_share(local_rank=local_rank, num_local_ranks=num_local_ranks)
    use_batch_scheduling()


def pin_to_core_share(*, local_rank: int, num_local_ranks: int) -> None:
    """Pin this process to its share of the host's cores, if there is at least one core per rank.

    A step is a chain of short waits for other ranks; after a move to another core a rank continues with cold caches.
    """
    cores = sorted(os.sched_getaffinity(0))
    cores_per_rank = len(cores) // num_local_ranks
    if num_local_ranks > 1 and cores_per_rank:
        os.sched_setaffinity(0, cores[local_rank * cores_per_rank : (local_rank + 1) * cores_per_rank])


def use_batch_scheduling() -> None:
    """Set the scheduling policy SCHED_BATCH: a thread that wakes up does not preempt the running thread of its core.

    gloo's sender threads wake up tens of times per step for microseconds, and each preemption of the trainer costs more than
    their work. Threads that this process starts later inherit the policy.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return  # not Linux, or the user has set a policy for this process
    with suppress(OSError):  # a sandbox may forbid it; the rank is then slower, with the same results
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
