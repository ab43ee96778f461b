"""Heartbeat thread: calls a function at a fixed interval while a block runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def heartbeat(beat: Callable[[], object], *, interval_s: float) -> Iterator[None]:
    """Call `beat` now and every `interval_s` seconds in a daemon thread until the block ends.

    A thread, because the block itself may wait for a slow disk or server for longer than the reader of the beats allows.
    """
    ended = threading.Event()

    def run() -> None:
        beat()
        while not ended.wait(interval_s):
            beat()

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
