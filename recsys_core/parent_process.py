"""Child processes that end when their parent ends (PR_SET_PDEATHSIG). Imports are light: this runs before anything else."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "NIGHTJAR_PARENT_PID"


def as_parent() -> dict[str, str]:
    """Return the environment variable that identifies this process as the parent of a child."""
    return {PARENT_VARIABLE: str(os.getpid())}


def die_with_parent() -> None:
    """Let Linux kill this process when its parent dies, or at once if the parent has died already.

    The parent is the process that put `as_parent()` into the environment. Without that variable nothing happens.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)
