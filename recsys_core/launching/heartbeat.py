"""Heartbeats: a file that changes while the ranks work, and a thread that calls a function at a fixed interval."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HeartbeatFile:
    """A file that the ranks touch or extend while they work. Each change of the file is a heartbeat.

    start_timeout_s: longest time from the start of all ranks to the first heartbeat. timeout_s: longest time between two
    heartbeats.
    """

    path: Path
    start_timeout_s: float
    timeout_s: float

    def state(self) -> tuple[int, int] | None:
        """Return (mtime, size) of the file, or None if it does not exist. Every heartbeat changes this state.

        Compare the state with an earlier state, never with a clock: another host may have set the mtime.
        """
        if not self.path.is_file():
            return None
        status = self.path.stat()
        return status.st_mtime_ns, status.st_size


@contextmanager
def heartbeat(beat: Callable[[], object], *, interval_s: float) -> Iterator[None]:
    """Call `beat` now and every `interval_s` seconds in a daemon thread until the block ends.

    A thread makes the calls, because the block may wait for a slow disk for longer than the timeout of the heartbeat.
    """
    stop = threading.Event()

    def run() -> None:
        beat()
        while not stop.wait(interval_s):
            beat()

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
