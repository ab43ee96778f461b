"""Training and export that kill themselves at a given point, and the result of an undisturbed run."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from recsys_core.manifests import require_manifest, stage_folder
from recsys_core.training import checkpoint as checkpoints
from recsys_core.training.checkpoint import CheckpointManifest
from recsys_core.training.config import TrainingConfig
from recsys_core.training.export import RankWriter, run_export
from recsys_core.training.job_spec import METRICS_NAME, ExportJob, TrainJob
from recsys_core.training.loop import Trainer, run_training
from recsys_core.training.metrics_log import MetricsLog
from recsys_core.training.train import train
from recsys_core.training.validation import Validator
from tests.gloo import _CONTEXT
from tests.recsys_core.training.forked_training import (
    Night,
    _process,
    checkpoint_of,
    export_in_forks,
    train_in_forks,
    unhurried,
)

TRAINING = TrainingConfig(
    epochs=3, batch_size=128, log_every_steps=2, checkpoint_every_steps=3, keep_checkpoints=2, max_attempts=50, seed=5
)
STEPS = 39
PATIENCE_S, LINES_BETWEEN = 120.0, 3


class Kill(NamedTuple):
    """The rank that dies, and where: at a call of `place` once `step` steps are done."""

    place: str
    rank: int
    step: int = 0


class Undisturbed(NamedTuple):
    state: dict[str, str]
    lines: list[dict[str, Any]]
    export: dict[str, np.ndarray]


def undisturbed_night(made: Night, folder: Path) -> Undisturbed:
    trained = train_in_forks(made, folder / "work")
    assert trained.result.steps == STEPS
    export = export_in_forks(made, checkpoint_of(trained), folder / "export")
    return Undisturbed(state_in(checkpoint_of(trained)), unhurried(trained.lines), export)


def state_in(checkpoint: Path) -> dict[str, str]:
    """What each rank wrote: weights and optimizer state, tables and layers."""
    manifest = require_manifest(checkpoint, CheckpointManifest)
    return {name: record.sha256 for name, record in manifest.files.items() if name.endswith(".distcp")}


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def armed(kill: Kill, call: Callable[..., Any], *, after: bool = False, when: Callable[..., bool] = lambda *_: True) -> Any:
    """`call`, but it kills this process before it does its work, or `after` it, once the Trainer has done the steps."""

    def calls(*args: Any, **kwargs: Any) -> Any:
        if not after and STEPS_DONE[0] >= kill.step and when(*args):
            die()
        found = call(*args, **kwargs)
        if after and STEPS_DONE[0] >= kill.step and when(*args):
            die()
        return found

    return calls


STEPS_DONE = [0]


def count_steps() -> None:
    """Keeps STEPS_DONE in this process."""
    train_step = Trainer._train_step

    def counted_step(self: Trainer, *args: Any, **kwargs: Any) -> None:
        train_step(self, *args, **kwargs)
        STEPS_DONE[0] = self.step

    Trainer._train_step = counted_step  # type: ignore[method-assign]


def half_a_line(self: MetricsLog, *args: Any, **kwargs: Any) -> None:
    with self._path.open("a") as file:
        file.write('{"step":')


def half_a_folder(path: Path, **_: Any) -> None:
    """Removes one file of a checkpoint that is there."""
    for file in sorted(path.glob("*")):
        file.unlink()
        die()


def arm(kill: Kill) -> None:
    """Puts the kill into this process."""
    count_steps()
    of_checkpoint = lambda path, *_: "step-" in str(path)  # noqa: E731
    match kill.place:
        case "step":
            Trainer._train_step = armed(kill, Trainer._train_step, after=True, when=lambda self, *_: self.step >= kill.step)
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
            MetricsLog.write_line = lambda *args, **rest: (half if STEPS_DONE[0] >= kill.step else write_line)(*args, **rest)
        case "removing":
            shutil.rmtree = half_a_folder
        case "result":
            Trainer._write_result = die
        case "export":
            RankWriter.write = armed(kill, RankWriter.write, after=True)


def train_and_die(rank: int, job: TrainJob, kill: Kill) -> None:
    if rank == kill.rank:
        arm(kill)
    run_training(job, process=_process(rank))


def export_and_die(rank: int, job: ExportJob, kill: Kill) -> None:
    if rank == kill.rank:
        arm(kill)
    run_export(job, process=_process(rank))


def flow(made: Night, folder: Path) -> None:
    """What the flow's process does in the train stage."""
    train(
        made.training, model=made.spec, loss=made.loss, dataset=made.data, plan=made.plan, folder=folder,
        on_progress=lambda line: None,
    )  # fmt: skip


def agent_below(process: psutil.Process) -> psutil.Process | None:
    return next((one for one in process.children() if "recsys_core.launching.agent" in one.cmdline()), None)


def lines_in(work: Path) -> int:
    path = work / METRICS_NAME
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def train_through_kills(made: Night, folder: Path, *, victims: Sequence[str]) -> None:
    """Runs the stage in `folder` and kills torchrun's agent, a rank or the flow, one after the other, a few lines apart.

    A flow that was killed is started again. All that ever ran below one has to be gone ten seconds after each kill.
    """
    work = folder.with_name(folder.name + ".work")

    def start() -> Any:
        process = _CONTEXT.Process(target=flow, args=(made, folder))
        process.start()
        return process

    running, lines = start(), 2
    for victim in victims:
        deadline = time.monotonic() + PATIENCE_S
        agent = None
        while agent is None or lines_in(work) < lines or len(agent.children()) < 2:
            assert running.is_alive() and time.monotonic() < deadline, f"{victim}: no {lines} lines in {work / METRICS_NAME}"
            time.sleep(0.01)
            agent = agent_below(psutil.Process(running.pid))
        lines = lines_in(work) + LINES_BETWEEN
        below = [agent, *agent.children(recursive=True)]
        if victim == "flow":
            running.kill()
            running.join()
            running = start()
        else:
            (agent if victim == "agent" else agent.children()[0]).kill()
        assert not psutil.wait_procs(below, timeout=10)[1], f"{victim} was killed, but not all below it ended"
    running.join(PATIENCE_S)
    assert running.exitcode == 0
