"""Which of a rank's threads goes first on a CPU."""

import os
from contextlib import suppress


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
