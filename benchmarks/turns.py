"""Interleaved timing of several trainers. In each round, each trainer runs alone for a window of steps.

All trainers start before the first round. The speed of a machine can change within seconds. The windows of one round follow
each other closely, so the ratio of their durations is reliable. The ratio of two separate runs of several minutes is not.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from multiprocessing.connection import Connection
from typing import TypeVar

BatchT = TypeVar("BatchT")


class Turns:
    """The turns of one rank: it waits for the parent before each window, and sends back the seconds of the window."""

    def __init__(self, pipe: Connection, *, window_steps: int, num_windows: int) -> None:
        self._pipe = pipe
        self.window_steps, self.num_windows = window_steps, num_windows

    @property
    def num_steps(self) -> int:
        """Number of steps in all windows."""
        return self.window_steps * self.num_windows

    def pace(self, batches: Iterable[BatchT]) -> Iterator[BatchT]:
        """Yield the batches of all windows. A window ends when the trainer requests the first batch of the next one."""
        batch_iterator = iter(batches)
        for _ in range(self.num_windows):
            self._pipe.recv()
            start_s = time.perf_counter()
            yield from islice(batch_iterator, self.window_steps)
            self._pipe.send(time.perf_counter() - start_s)


def run_window(pipes: Sequence[Connection]) -> float:
    """Run a window of one contestant, and return the seconds of its slowest rank."""
    for pipe in pipes:
        pipe.send(None)
    return max(float(pipe.recv()) for pipe in pipes)


def take_turns(pipes_by_name: Mapping[str, Sequence[Connection]], *, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contestant in each round. pipes_by_name: pipes to the ranks of each contestant."""
    seconds_by_name: dict[str, list[float]] = {name: [] for name in pipes_by_name}
    for _ in range(rounds):
        for name, pipes in pipes_by_name.items():
            seconds_by_name[name].append(run_window(pipes))
    return seconds_by_name
