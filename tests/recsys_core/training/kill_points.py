"""Training and export that are killed at a given point, and the result of an undisturbed run."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from recsys_core.manifests import require_manifest, stage_folder
from recsys_core.training import checkpoint as checkpoints
from recsys_core.training import loop
from recsys_core.training.checkpoint import CheckpointManifest
from recsys_core.training.config import TrainingConfig
from recsys_core.training.export.export import RankWriter, run_export
from recsys_core.training.job import METRICS_FILE, ExportJob, TrainJob
from recsys_core.training.metrics_log import MetricsLog
from recsys_core.training.setup import TrainingSetup
from recsys_core.training.train import train
from recsys_core.training.validation import Validator
from tests.gloo import _CONTEXT
from tests.recsys_core.training.forked_training import (
    Experiment,
    _process,
    checkpoint_of,
    export_in_forks,
    train_in_forks,
    without_timings,
)

TRAINING = TrainingConfig(
    epochs=3, batch_size=128, log_every_steps=2, checkpoint_every_steps=3, keep_checkpoints=2, max_attempts=50, seed=5
)
NUM_STEPS = 39
PATIENCE_S, LINES_BETWEEN = 120.0, 3


class Kill(NamedTuple):
    """The rank that is killed, and the call that kills it: `place`, once `step` steps are done."""

    place: str
    rank: int
    step: int = 0


class Undisturbed(NamedTuple):
    state: dict[str, str]
    lines: list[dict[str, Any]]
    export: dict[str, np.ndarray]


def train_undisturbed(experiment: Experiment, folder: Path) -> Undisturbed:
    trained = train_in_forks(experiment, folder / "work")
    assert trained.result.num_steps == NUM_STEPS
    export = export_in_forks(experiment, checkpoint_of(trained), folder / "export")
    return Undisturbed(state_in(checkpoint_of(trained)), without_timings(trained.lines), export)


def state_in(checkpoint: Path) -> dict[str, str]:
    """Return the checksums of the weights and optimizer states that each rank wrote."""
    manifest = require_manifest(checkpoint, CheckpointManifest)
    return {name: record.sha256 for name, record in manifest.files.items() if name.endswith(".distcp")}


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def armed(kill: Kill, call: Callable[..., Any], *, after: bool = False, when: Callable[..., bool] = lambda *_: True) -> Any:
    """Return `call` as a function that kills this process before the call (or `after` it), once `kill.step` steps are done."""

    def calls(*args: Any, **kwargs: Any) -> Any:
        if not after and STEPS_DONE[0] >= kill.step and when(*args):
            die()
        result = call(*args, **kwargs)
        if after and STEPS_DONE[0] >= kill.step and when(*args):
            die()
        return result

    return calls


STEPS_DONE = [0]


def count_steps() -> None:
    """Count the steps of this process in STEPS_DONE."""
    check_loss = loop.raise_if_not_finite  # called after each step

    def counted_check(loss: torch.Tensor, *, step: int, **options: Any) -> None:
        check_loss(loss, step=step, **options)
        STEPS_DONE[0] = step

    loop.raise_if_not_finite = counted_check  # type: ignore[assignment]


def half_a_line(self: MetricsLog, *args: Any, **kwargs: Any) -> None:
    with self._path.open("a") as file:
        file.write('{"step":')


def half_a_folder(path: Path, **_: Any) -> None:
    """Remove one file of the checkpoint in `path` and die."""
    for file in sorted(path.glob("*")):
        file.unlink()
        die()


def arm(kill: Kill) -> None:
    """Patch the call that `kill.place` names, so that it kills this process."""
    count_steps()
    of_checkpoint = lambda path, *_: "step-" in str(path)  # noqa: E731
    match kill.place:
        case "step":
            loop.raise_if_not_finite = armed(kill, loop.raise_if_not_finite, after=True)
        case "staged":
            checkpoints.async_save = armed(kill, checkpoints.async_save, after=True)
        case "written":
            os.fsync = armed(kill, os.fsync)
        case "hashed":
            stage_folder.record_file = armed(kill, stage_folder.record_file, after=True, when=of_checkpoint)
        case "renaming":
            Path.rename = armed(kill, Path.rename, when=of_checkpoint)
        case "renamed":
            Path.rename = armed(kill, Path.rename, after=True, when=of_checkpoint)
        case "measured":
            Validator.measure = armed(kill, Validator.measure, after=True)
        case "line":
            write_line, half = MetricsLog.write_line, armed(kill, half_a_line, after=True)
            MetricsLog.write_line = lambda *args, **options: (half if STEPS_DONE[0] >= kill.step else write_line)(
                *args, **options
            )
        case "removing":
            shutil.rmtree = half_a_folder
        case "result":
            loop.Trainer._write_result = die
        case "export":
            RankWriter.write = armed(kill, RankWriter.write, after=True)


def train_and_die(rank: int, job: TrainJob, kill: Kill) -> None:
    if rank == kill.rank:
        arm(kill)
    loop.run_training(job, process=_process(rank))


def export_and_die(rank: int, job: ExportJob, kill: Kill) -> None:
    if rank == kill.rank:
        arm(kill)
    run_export(job, process=_process(rank))


def flow(experiment: Experiment, folder: Path) -> None:
    """Run the train stage as the process of the flow does."""
    train(
        TrainingSetup(experiment.spec, experiment.training, experiment.loss),
        dataset=experiment.data, plan=experiment.plan,
        folder=folder, on_progress=lambda line: None,
    )  # fmt: skip


def agent_below(process: psutil.Process) -> psutil.Process | None:
    return next((child for child in process.children() if "recsys_core.launching" in child.cmdline()), None)


def lines_in(work: Path) -> int:
    path = work / METRICS_FILE
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def train_through_kills(experiment: Experiment, folder: Path, *, victims: Sequence[str]) -> None:
    """Run the train stage in `folder` and kill torchrun's agent, a rank or the flow in turn, LINES_BETWEEN metrics lines apart.

    A killed flow is started again. Ten seconds after each kill no process below the killed one may be running.
    """
    work = folder.with_name(folder.name + ".work")

    def start() -> Any:
        process = _CONTEXT.Process(target=flow, args=(experiment, folder))
        process.start()
        return process

    flow_process, num_lines = start(), 2
    for victim in victims:
        deadline = time.monotonic() + PATIENCE_S
        agent = None
        while agent is None or lines_in(work) < num_lines or len(agent.children()) < 2:
            assert flow_process.is_alive() and time.monotonic() < deadline, f"{victim}: no {num_lines} lines in {work}"
            time.sleep(0.01)
            agent = agent_below(psutil.Process(flow_process.pid))
        num_lines = lines_in(work) + LINES_BETWEEN
        descendants = [agent, *agent.children(recursive=True)]
        if victim == "flow":
            flow_process.kill()
            flow_process.join()
            flow_process = start()
        else:
            (agent if victim == "agent" else agent.children()[0]).kill()
        assert not psutil.wait_procs(descendants, timeout=10)[1], f"{victim} was killed, but not all processes below it ended"
    flow_process.join(PATIENCE_S)
    assert flow_process.exitcode == 0
