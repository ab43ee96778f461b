"""Processes that end with the one that started them. Imports nothing heavy: it has to run first."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "NIGHTJAR_PARENT_PID"


def as_parent() -> dict[str, str]:
    """The environment entry by which a child process knows this one."""
    return {PARENT_VARIABLE: str(os.getpid())}


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent dies, also if that has happened already.

    The parent is the process that put `as_parent()` into the environment; without it, or where it is empty, nothing is asked.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)
