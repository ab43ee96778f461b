"""Contestants that are all up and run one at a time, a window of steps each, in turns.

A machine's speed changes from one second to the next. Contestants that follow each other within seconds feel the same of it,
so a round of windows gives ratios that can be compared where runs of minutes, one after the other, cannot.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """A rank's side: the parent's word is waited for before each window, and answered with the seconds that it took."""

    def __init__(self, pipe: Connection, *, window: int, windows: int) -> None:
        self._pipe = pipe
        self.window, self.windows = window, windows

    @property
    def steps(self) -> int:
        """In all windows."""
        return self.window * self.windows

    def paced(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches of all windows. A window lasts from when its first batch is asked for to when the next window's is."""
        coming = iter(batches)
        for _ in range(self.windows):
            self._pipe.recv()
            started = time.perf_counter()
            yield from islice(coming, self.window)
            self._pipe.send(time.perf_counter() - started)


def run_window(pipes: Sequence[Connection]) -> float:
    """Seconds that the slowest rank of one contestant took."""
    for pipe in pipes:
        pipe.send(None)
    return max(float(pipe.recv()) for pipe in pipes)


def take_turns(contestants: Mapping[str, Sequence[Connection]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant's window in each round. The pipes lead to its ranks."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, pipes in contestants.items():
            seconds[name].append(run_window(pipes))
    return seconds
