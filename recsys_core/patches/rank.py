"""Linux and glibc settings for ranks on CPUs: memory allocation, core affinity and scheduling policy."""

import ctypes
import os
import sys
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAX_HEAP_BYTES = 32 << 20
"""glibc's upper limit of M_MMAP_THRESHOLD: larger blocks are always mapped and unmapped."""
MAX_TRIM_BYTES = (1 << 31) - 1


def prepare_rank(*, local_rank: int, num_local_ranks: int) -> None:
    """Apply all settings of this module to a rank's process. Call before it starts threads."""
    retain_freed_memory()
    pin_to_core_share(local_rank=local_rank, num_local_ranks=num_local_ranks)
    use_batch_scheduling()


def retain_freed_memory() -> None:
    """Keep up to 2 GiB of freed memory in this process.

    By default glibc returns the freed tensors of a step to the kernel, which zeroes the pages again in the next step.
    """
    library = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(library, "mallopt"):  # not in musl
        library.mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, MAX_TRIM_BYTES)


def pin_to_core_share(*, local_rank: int, num_local_ranks: int) -> None:
    """Pin this process to its share of the host's cores, if there is at least one core per rank.

    A step is a chain of short waits for other ranks; after a move to another core a rank continues with cold caches.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // num_local_ranks
    if num_local_ranks > 1 and share:
        os.sched_setaffinity(0, cores[local_rank * share : (local_rank + 1) * share])


def use_batch_scheduling() -> None:
    """Set the scheduling policy SCHED_BATCH: a thread that wakes up does not preempt the running thread of its core.

    gloo's sender threads wake up tens of times per step for microseconds, and each preemption of the trainer costs more than
    their work. Threads that this process starts later inherit the policy.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return  # not Linux, or the user has set a policy for this process
    with suppress(OSError):  # a sandbox may forbid it; the rank is then slower, with the same results
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
