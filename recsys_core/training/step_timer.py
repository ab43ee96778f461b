"""Step times, data-loading times and lookup volume of one rank; optional traces by torch.profiler."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from recsys_core.dataset.batch import Batch
from recsys_core.models.spec import ModelSpec
from recsys_core.training.config import ProfileConfig
from recsys_core.training.job.process_group import Process

FLOAT32_BYTES = 4
PROFILER_WARMUP_STEPS = 2


@dataclass
class StepTimes:
    """Totals since the last reset.

    Attributes:
        num_steps: number of timed steps.
        seconds: duration of the timed steps.
        data_seconds: the part of `seconds` that was spent waiting for the loader.
        embedding_bytes: bytes of embedding rows that all batches, timed or not, look up.
    """

    num_steps: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    embedding_bytes: int = 0

    def mean_ms_by_phase(self) -> dict[str, float]:
        """Return the mean duration of a timed step, and the mean time that a timed step waited for data."""
        num_steps = max(self.num_steps, 1)
        return {"step": 1000 * self.seconds / num_steps, "data": 1000 * self.data_seconds / num_steps}


class StepTimer:
    """Times every step on a CPU; on a GPU only sampled steps, because timing a step waits for the device."""

    def __init__(self, spec: ModelSpec, *, process: Process) -> None:
        self._is_gpu = process.device.type == "cuda"
        self._is_timing = False
        self._tables = list(spec.tables.values())
        self._times = StepTimes()

    def batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches; add the time to wait for each batch to data_seconds."""
        while True:
            start_time = time.perf_counter()
            batch = next(batches, None)
            self._times.data_seconds += (time.perf_counter() - start_time) if self._is_timing else 0.0
            if batch is None:
                return
            self._times.embedding_bytes += self._lookup_bytes(batch)
            yield batch

    @contextmanager
    def step(self, *, is_sampled: bool) -> Iterator[None]:
        """Time the block as one step. On a GPU the step is timed only if `is_sampled`."""
        self._is_timing = is_sampled or not self._is_gpu
        start_time = self._now()
        yield
        if self._is_timing:
            self._times.num_steps += 1
            self._times.seconds += self._now() - start_time
        self._is_timing = False

    def reset(self) -> StepTimes:
        """Return the totals since the last call, and start from zero."""
        step_times, self._times = self._times, StepTimes()
        return step_times

    def _now(self) -> float:
        if self._is_gpu and self._is_timing:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _lookup_bytes(self, batch: Batch) -> int:
        """Return the bytes of the embedding rows that this rank's batch looks up."""
        num_values_by_key: dict[tuple[str, str], int] = {
            (batch_key, feature): num_values
            for batch_key, sparse in batch.sparse.items()
            for feature, num_values in zip(sparse.keys(), sparse.length_per_key(), strict=True)
        }
        num_floats = sum(num_values_by_key.get((table.batch_key, table.feature), 0) * table.dim for table in self._tables)
        return num_floats * FLOAT32_BYTES


def make_profiler(config: ProfileConfig | None, *, folder: Path, process: Process) -> profile | None:
    """Return a profiler that writes rank-<r>.json.gz (chrome://tracing, Perfetto) to `folder`; None without a config.

    The profiler is a context manager; call its step() after each training step.
    """
    if config is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    trace_path = folder / f"rank-{process.rank}.json.gz"
    return profile(
        activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if process.device.type == "cuda" else []),
        schedule=schedule(wait=config.after_steps, warmup=PROFILER_WARMUP_STEPS, active=config.steps, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace_path)),
    )
