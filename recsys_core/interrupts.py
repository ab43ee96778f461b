"""Signals during a stage: a stage ends with KeyboardInterrupt, also if a library hides the exception of the signal handler."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNAL_RECEIVED = threading.Event()
"""Set by a command that has received SIGINT or SIGTERM. No stage starts while it is set."""


@contextmanager
def raise_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt if a signal arrived before the block, or interrupts a query of the block.

    Python hides an exception in a finalizer, so that a stage may complete after the signal. DuckDB raises a RuntimeError in
    place of the exception of the signal handler.
    """
    if SIGNAL_RECEIVED.is_set():
        raise KeyboardInterrupt("a signal arrived before this stage")
    try:
        yield
    except RuntimeError as error:
        if str(error) == "Query interrupted":
            raise KeyboardInterrupt from error
        raise
