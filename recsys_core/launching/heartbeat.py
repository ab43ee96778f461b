"""Heartbeats: a file that changes while the ranks work, and a thread that calls a function at a fixed interval."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)
MIN_TIMEOUT_S, UNMEASURED_TIMEOUT_S = 60.0, 600.0
TIMEOUT_FACTOR = 10
"""Factor between the longest duration of an activity and its timeout."""

Activity = Literal["steps", "validation", "checkpoint"]
"""steps: the steps between two lines of metrics.jsonl. checkpoint: from the copy of the state to the commit in the background.
"""


@dataclass(frozen=True)
class HeartbeatFile:
    """A file that the ranks touch or write while they work. Each change of the file is a heartbeat.

    Attributes:
        start_timeout_s: longest time from the start of all ranks to the first heartbeat.
        timeout_s: longest time between two heartbeats. If it is None, the file contains this time.
    """

    path: Path
    start_timeout_s: float
    timeout_s: float | None

    def current_timeout_s(self) -> float:
        """Return `timeout_s`; if it is None, the number in the file, or 600 s if the file has no number."""
        if self.timeout_s is not None:
            return self.timeout_s
        try:
            return float(self.path.read_text())
        except (OSError, ValueError):  # the file is being written, or the ranks only touch it
            return UNMEASURED_TIMEOUT_S

    def mtime_and_size(self) -> tuple[int, int] | None:
        """Return (mtime, size) of the file, or None if the file does not exist.

        Every heartbeat changes at least one of the two values. Compare the result with an earlier
        result, never with a clock: another host may have set the mtime.
        """
        if not self.path.is_file():
            return None
        file_stat = self.path.stat()
        return file_stat.st_mtime_ns, file_stat.st_size


class HeartbeatWriter:
    """Sends a heartbeat when an activity begins, by writing the timeout of the activity to the file. Only rank 0 writes.

    The timeout is ten times the longest duration of the activity so far, but at least `min_timeout_s`. Until the activity has
    ended once, the timeout is 600 s.
    """

    def __init__(self, path: Path, *, is_main: bool, min_timeout_s: float = MIN_TIMEOUT_S) -> None:
        self.path = path
        self._is_main, self._min_timeout_s = is_main, min_timeout_s
        self._max_duration_s_by_activity: dict[Activity, float] = {}

    def begin(self, activity: Activity) -> float:
        """Write the timeout of `activity`; return the start time for `end`."""
        if self._is_main:
            self.path.write_text(f"{self.timeout_s(activity):.0f}")
        return time.perf_counter()

    def end(self, activity: Activity, *, start_time: float) -> None:
        """Record the duration of an activity that started at `start_time`."""
        self.record(activity, time.perf_counter() - start_time)

    def record(self, activity: Activity, duration_s: float) -> None:
        """Record a measured duration of `activity`."""
        self._max_duration_s_by_activity[activity] = max(duration_s, self._max_duration_s_by_activity.get(activity, 0.0))

    def timeout_s(self, activity: Activity) -> float:
        """Return the longest time from the start of `activity` to the next heartbeat."""
        max_duration_s = self._max_duration_s_by_activity.get(activity)
        return UNMEASURED_TIMEOUT_S if max_duration_s is None else max(self._min_timeout_s, TIMEOUT_FACTOR * max_duration_s)


@contextmanager
def heartbeat(send_heartbeat: Callable[[], object], *, interval_s: float) -> Iterator[None]:
    """Call `send_heartbeat` now and every `interval_s` seconds in a daemon thread until the block ends.

    A thread makes the calls, because the block may wait for a slow disk for longer than the timeout of the heartbeat. If a call
    raises OSError, for example because the disk is full, a warning is logged and the next call is made after the interval.
    """
    stop_event = threading.Event()

    def send_until_stop() -> None:
        is_stopped = False
        while not is_stopped:
            try:
                send_heartbeat()
            except OSError as error:
                logger.warning("a heartbeat could not be sent and is repeated after %g s: %s", interval_s, error)
            is_stopped = stop_event.wait(interval_s)

    heartbeat_thread = threading.Thread(target=send_until_stop, name="heartbeat", daemon=True)
    heartbeat_thread.start()
    try:
        yield
    finally:
        stop_event.set()
        heartbeat_thread.join()
