"""How long a step takes, how long it waits for data, and how much the lookups read."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from recsys_core.data.batch import Batch
from recsys_core.models.spec import ModelSpec
from recsys_core.training.config import ProfileConfig
from recsys_core.training.process_group import Process

FLOAT32_BYTES = 4


@dataclass
class StepTimes:
    """Seconds and bytes of the steps since they were last taken. data: the part of `seconds` spent waiting for the loader."""

    steps: int = 0
    seconds: float = 0.0
    data: float = 0.0
    embedding_bytes: int = 0

    def milliseconds(self) -> dict[str, float]:
        """Mean of a step: all of it, and what of it is waiting for data."""
        return {name: 1000 * value / max(self.steps, 1) for name, value in (("step", self.seconds), ("data", self.data))}


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
            numbers += values.get((table.batch_key, table.feature), 0) * table.dim
        return numbers * FLOAT32_BYTES


WARM_UP_STEPS = 2


@contextmanager
def profiled(config: ProfileConfig | None, *, folder: Path, process: Process) -> Iterator[Callable[[], None]]:
    """Yields what is to be called after each step; leaves rank-<r>.json.gz (chrome://tracing, Perfetto) in `folder`."""
    if config is None:
        yield lambda: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / f"rank-{process.rank}.json.gz"
    devices = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if process.device.type == "cuda" else [])
    when = schedule(wait=config.after_steps, warmup=WARM_UP_STEPS, active=config.steps, repeat=1)
    with profile(
        activities=devices, schedule=when, on_trace_ready=lambda done: done.export_chrome_trace(str(trace))
    ) as running:
        yield running.step
