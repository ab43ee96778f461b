"""torch's profiler around a few steps of a training, for who wants to see what a step is made of."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from recsys_core.training.config import ProfileConfig
from recsys_core.training.process_group import Process

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
