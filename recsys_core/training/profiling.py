"""torch's profiler around a few steps of a training, for who wants to see what a step is made of."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from recsys_core.training.config import ProfileConfig
from recsys_core.training.process import Process

WARM_UP_STEPS = 2
_INIT, _ENTER, _EXIT = record_function.__init__, record_function.__enter__, record_function.__exit__


@contextmanager
def profiled(config: ProfileConfig | None, *, folder: Path, process: Process) -> Iterator[Callable[[], None]]:
    """Yields what is to be called after each step; leaves rank-<r>.json.gz (chrome://tracing, Perfetto) in `folder`."""
    mark_for_profilers_alone()
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


def mark_for_profilers_alone() -> None:
    """From here on torch's record_function does nothing in this process while no profiler runs.

    TorchRec marks some forty parts of a step with it; a mark goes through the dispatcher twice whether anybody looks or not.
    """
    record_function.__init__ = _init  # type: ignore[method-assign, assignment]
    record_function.__enter__ = _enter  # type: ignore[method-assign]
    record_function.__exit__ = _exit  # type: ignore[method-assign]


def _init(mark: record_function, name: str, args: str | None = None) -> None:
    mark.name, mark.args, mark.record = name, args, None


def _enter(mark: record_function) -> record_function:
    if not profiler._is_profiler_enabled:
        return mark
    _INIT(mark, mark.name, mark.args)
    return _ENTER(mark)  # type: ignore[no-any-return, no-untyped-call]


def _exit(mark: record_function, *error: Any) -> None:
    if mark.record is not None:
        _EXIT(mark, *error)
        mark.record = None
