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

    def mtime_and_size(self) -> tuple[int, int] | None:
        """Return (mtime, size) of the file, or None if the file does not exist.

        Every heartbeat changes at least one of the two values. Compare the result with an earlier
        result, never with a clock: another host may have set the mtime.
        """
        if not self.path.is_file():
            return None
        file_stat = self.path.stat()
        return file_stat.st_mtime_ns, file_stat.st_size


@contextmanager
def heartbeat(beat: Callable[[], object], *, interval_s: float) -> Iterator[None]:
    """Call `beat` now and every `interval_s` seconds in a daemon thread until the block ends.

    A thread makes the calls, because the block may wait for a slow disk for longer than the timeout of the heartbeat.
    """
    stop_event = threading.Event()

    def beat_until_stop() -> None:
        beat()
        while not stop_event.wait(interval_s):
            beat()

    thread = threading.Thread(target=beat_until_stop, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()
