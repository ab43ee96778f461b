"""Termination of processes: a child process ends with its parent (PR_SET_PDEATHSIG), and a stage ends after a signal.

This module imports only the standard library, because a child calls `die_with_parent` as early as possible.
"""

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "NIGHTJAR_PARENT_PID"
STDOUT_FD = 1
SIGNAL_RECEIVED = threading.Event()
"""Set by a command that has received SIGINT or SIGTERM. No stage starts while it is set."""


def parent_environment() -> dict[str, str]:
    """Return the environment variable that identifies this process as the parent of a child."""
    return {PARENT_VARIABLE: str(os.getpid())}


def die_with_parent() -> None:
    """Make Linux kill this process when its parent ends, or immediately if the parent has already ended.

    The parent is the process that put `parent_environment()` into the environment of this process. Without that variable,
    nothing happens.
    """
    parent_pid = os.environ.get(PARENT_VARIABLE)
    if not parent_pid or sys.platform != "linux":
        return
    _set_death_signal()
    if os.getppid() != int(parent_pid):
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_stdout_reader() -> None:
    """Make Linux kill this process when its parent ends, or immediately if stdout is a pipe without a reader.

    Use this function in a child whose parent reads the child's stdout, but does not set the variable of `parent_environment`.
    """
    if sys.platform != "linux":
        return
    _set_death_signal()
    poller = select.poll()
    poller.register(STDOUT_FD, 0)  # POLLERR is always reported
    if any(events & select.POLLERR for _, events in poller.poll(0)):  # the parent ended before the death signal was set
        os.kill(os.getpid(), signal.SIGKILL)


def _set_death_signal() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def raise_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt if a signal arrived before the block, or interrupts a query of the block.

    The exception of a signal handler may be lost: Python ignores an exception in a finalizer and continues with the stage, and
    DuckDB raises a RuntimeError instead.
    """
    if SIGNAL_RECEIVED.is_set():
        raise KeyboardInterrupt("a signal arrived before this stage")
    try:
        yield
    except RuntimeError as error:
        if str(error) == "Query interrupted":
            raise KeyboardInterrupt from error
        raise
