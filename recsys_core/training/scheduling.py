"""Which cores a rank runs on, and which of its threads goes first there."""

import os
from contextlib import suppress


def keep_to_own_cores(*, rank: int, ranks: int) -> None:
    """Keeps this process to its share of the host's cores, where there is one for each of its `ranks`.

    A rank's step is a chain of short waits for others: moved between cores by the kernel it finds its caches cold after each.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // ranks
    if ranks > 1 and each:
        os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each])


def let_running_threads_go_on() -> None:
    """Has a thread that wakes up wait until the one that runs on its core waits itself: the kernel's policy for batch work.

    The threads with which gloo talks to other ranks wake up tens of times in a step, for microseconds. Taking the core from the
    trainer each time costs more than what they do there, and it is seldom what the trainer waits for. The threads that this
    process starts from here on go by it too.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return  # not Linux, or somebody chose a policy
    with suppress(OSError):  # a sandbox may refuse; the rank is slower then, and as right
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
