"""Where the time of a step goes, and how much the lookups read."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torchrec.optim.keyed import KeyedOptimizer

from recsys_core.data.batch import Batch
from recsys_core.models.spec import ModelSpec
from recsys_core.training.process import Process

FLOAT32_BYTES = 4


@dataclass
class StepTimes:
    """Seconds and bytes of the steps since they were last taken; `compute` is what is left of a step.

    data: waiting for the loader. comms: waiting for other ranks; the dense gradients' sum, which torch waits for inside the
    backward pass, counts as compute. optimizer: of the layers; tables are updated in the backward pass.
    """

    steps: int = 0
    seconds: float = 0.0
    data: float = 0.0
    comms: float = 0.0
    optimizer: float = 0.0
    embedding_bytes: int = 0

    def milliseconds(self) -> dict[str, float]:
        """Mean of a step, by what it was spent on."""
        known = {"data": self.data, "comms": self.comms, "optimizer": self.optimizer}
        known["compute"] = self.seconds - sum(known.values())
        return {name: 1000 * value / max(self.steps, 1) for name, value in known.items()}


class StepClock:
    """Measures every step on a CPU. On a GPU it measures the few that it is told to: measuring one waits for the device."""

    def __init__(self, spec: ModelSpec, *, process: Process) -> None:
        self._waits = process.device.type == "cuda"
        self._running = False
        self._tables = list(spec.tables.values())
        self.times = StepTimes()

    def batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; the time until each is there counts as data."""
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            self.times.data += (time.perf_counter() - started) if self._running else 0.0
            if batch is None:
                return
            self.times.embedding_bytes += self._bytes_of(batch)
            yield batch

    @contextmanager
    def listening(self, optimizer: KeyedOptimizer) -> Iterator[None]:
        """Within, waiting for a collective counts as comms and optimizer.step() as optimizer."""
        wait, step = dist.Work.wait, optimizer.step
        dist.Work.wait = self._timed("comms", wait)  # type: ignore[method-assign]
        optimizer.step = self._timed("optimizer", step)
        try:
            yield
        finally:
            dist.Work.wait = wait  # type: ignore[method-assign]
            optimizer.step = step

    @contextmanager
    def step(self, *, is_sample: bool) -> Iterator[None]:
        """Around one step; is_sample: a GPU's is measured."""
        self._running = is_sample or not self._waits
        started = self._now()
        yield
        if self._running:
            self.times.steps += 1
            self.times.seconds += self._now() - started
        self._running = False

    def take(self) -> StepTimes:
        """What was measured since the last call."""
        taken, self.times = self.times, StepTimes()
        return taken

    def _timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            # A checkpoint is written by a thread that waits for other ranks too. On a GPU the backward pass has its own thread.
            if not self._running or not (self._waits or threading.current_thread() is threading.main_thread()):
                return call(*args, **kwargs)
            started = self._now()
            try:
                return call(*args, **kwargs)
            finally:
                setattr(self.times, what, getattr(self.times, what) + self._now() - started)

        return timed

    def _now(self) -> float:
        if self._waits and self._running:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _bytes_of(self, batch: Batch) -> int:
        """Embedding rows that this rank's batch looks up, in bytes."""
        values: dict[tuple[str, str], int] = {
            (keys, key): count
            for keys, sparse in batch.sparse.items()
            for key, count in zip(sparse.keys(), sparse.length_per_key(), strict=True)
        }
        numbers = 0
        for table in self._tables:
            numbers += values.get((table.sparse, table.feature), 0) * table.dim
        return numbers * FLOAT32_BYTES
