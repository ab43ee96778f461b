"""How the kernel and glibc treat a rank that trains on a CPU."""

import ctypes
import os
import sys
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_ON_HEAP = 32 << 20
"""More than this glibc always maps and unmaps."""
KEPT = (1 << 31) - 1


def prepare_rank(*, rank: int, ranks: int) -> None:
    """Calls the functions of this module in a rank's process, before it starts threads. ranks: of this host."""
    keep_freed_memory()
    keep_to_own_cores(rank=rank, ranks=ranks)
    run_as_batch_work()


def keep_freed_memory() -> None:
    """Keeps up to 2 GiB of freed memory in this process.

    By default glibc returns what a step has freed to the kernel, and the next step's tensors are zeroed page by page again.
    """
    library = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(library, "mallopt"):  # not in musl
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_ON_HEAP)
        library.mallopt(M_TRIM_THRESHOLD, KEPT)


def keep_to_own_cores(*, rank: int, ranks: int) -> None:
    """Keeps this process to its share of the host's cores, where there is one for each of its `ranks`.

    A step is a chain of short waits for other ranks; a rank that is moved between cores starts with cold caches after each.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // ranks
    if ranks > 1 and each:
        os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each])


def run_as_batch_work() -> None:
    """Sets the kernel's policy for batch work: a thread that wakes up waits until the one that runs on its core waits itself.

    The threads with which gloo sends to other ranks wake up tens of times in a step, for microseconds. To take the core from
    the trainer each time costs more than what they do there. Threads that this process starts later have the policy too.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return  # not Linux, or a policy was chosen for this process
    with suppress(OSError):  # a sandbox may refuse; the rank is slower then, and as right
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
