"""Training and export killed at 20 points and resumed at each: what comes out is bit-identical to an undisturbed night.

Sixteen times a rank of a fork kills itself exactly where it says; four times torchrun's agent or the whole flow is killed.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest

from recsys_core.manifests import require_manifest, stage_folder
from recsys_core.training import checkpoint as checkpoints
from recsys_core.training.checkpoint import CheckpointManifest
from recsys_core.training.config import TrainingConfig
from recsys_core.training.export_job import RankWriter, run_export
from recsys_core.training.job import ExportJob, TrainJob
from recsys_core.training.loop import CHECKPOINTS_NAME, METRICS_NAME, Training, run_training
from recsys_core.training.meter import Meter
from recsys_core.training.train import train
from recsys_core.training.validation import Validator
from tests.gloo import _CONTEXT, run_ranks
from tests.recsys_core.training.stages import (
    Night,
    _process,
    checkpoint_of,
    export_in_forks,
    export_job,
    ingest,
    night,
    train_in_forks,
    train_job,
    unhurried,
)

TRAINING = TrainingConfig(
    epochs=3, batch_size=128, log_every_steps=2, checkpoint_every_steps=3, keep_checkpoints=2, attempts=9, seed=5
)


class Kill(NamedTuple):
    """The rank that dies, and where: at a call of `place` once `step` steps are done."""

    place: str
    rank: int
    step: int = 0


KILLS = (
    Kill("step", 1, 2),  # before the first checkpoint
    Kill("staged", 0, 3),
    Kill("written", 1, 6),
    Kill("written", 0, 6),
    Kill("hashed", 0, 6),
    Kill("renaming", 0, 6),
    Kill("renamed", 0, 9),
    Kill("measured", 1, 13),  # at the end of the first epoch
    Kill("line", 0, 16),
    Kill("removing", 0, 18),
    Kill("step", 0, 20),
    Kill("staged", 1, 24),
    Kill("step", 1, 26),
    Kill("renaming", 0, 30),
    Kill("result", 0),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Night:
    root = tmp_path_factory.mktemp("night")
    return night(ingest(root), root / "plan", training=TRAINING)


class Undisturbed(NamedTuple):
    state: dict[str, bytes]
    lines: list[dict[str, Any]]
    export: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def undisturbed(made, tmp_path_factory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    trained = train_in_forks(made, folder / "work")
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
    """`call`, but it kills this process before it does its work, or `after` it, once Training has done the steps."""

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
    count = Training._count

    def counts(self: Training, *args: Any, **kwargs: Any) -> None:
        count(self, *args, **kwargs)
        STEPS_DONE[0] = self._done

    Training._count = counts  # type: ignore[method-assign]


def half_a_line(self: Meter, *args: Any, **kwargs: Any) -> None:
    with self._path.open("a") as file:
        file.write('{"step":')


def half_a_folder(path: Path, **_: Any) -> None:
    """Removes one file of a checkpoint that is there."""
    for file in sorted(path.glob("*.distcp")):
        file.unlink()
        die()


def arm(kill: Kill) -> None:
    """Puts the kill into this process."""
    count_steps()
    of_checkpoint = lambda path, *_: "step-" in str(path)  # noqa: E731
    match kill.place:
        case "step":
            Training._count = armed(kill, Training._count, after=True, when=lambda self, *_: self._done == kill.step)
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
            log, half = Meter.log, armed(kill, half_a_line, after=True)
            Meter.log = lambda *args, **rest: (half if STEPS_DONE[0] >= kill.step else log)(*args, **rest)
        case "removing":
            shutil.rmtree = half_a_folder
        case "result":
            Training._write_result = die
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


def test_ranks_killed_at_sixteen_points_leave_a_run_that_ends_as_an_undisturbed_one(made, undisturbed, tmp_path):
    work = tmp_path / "work"
    for kill in KILLS:
        run_ranks(train_and_die, world_size=2, arguments=(train_job(made, work), kill), dies=kill.rank)
    trained = train_in_forks(made, work)
    assert unhurried(trained.lines) == undisturbed.lines
    assert state_in(checkpoint_of(trained)) == undisturbed.state
    out = tmp_path / "export"
    out.mkdir()
    job = export_job(made, checkpoint_of(trained), out)
    run_ranks(export_and_die, world_size=2, arguments=(job, Kill("export", 1)), dies=1)
    exported = export_in_forks(made, checkpoint_of(trained), tmp_path / "again")
    assert exported.keys() == undisturbed.export.keys()
    for name, value in undisturbed.export.items():
        np.testing.assert_array_equal(exported[name], value, err_msg=name)


def flow(made: Night, folder: Path) -> None:
    """What the flow's process does in the train stage."""
    train(
        made.training, model=made.spec, loss=made.loss, **made.data._asdict(), plan=made.plan, folder=folder,
        on_progress=lambda line: None,
    )  # fmt: skip


def agent_below(process: psutil.Process) -> psutil.Process | None:
    return next((one for one in process.children() if "recsys_core.training.agent" in one.cmdline()), None)


def lines_in(work: Path) -> int:
    path = work / METRICS_NAME
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def test_the_agent_and_the_flow_killed_twice_each_leave_a_run_that_ends_as_an_undisturbed_one(made, undisturbed, tmp_path):
    work = tmp_path / "train.work"
    started: set[psutil.Process] = set()
    victims = iter(("agent", "flow", "agent", "flow"))
    lines = 2
    running = _CONTEXT.Process(target=flow, args=(made, tmp_path / "train"))
    running.start()
    for victim in victims:
        deadline = time.monotonic() + 100
        while lines_in(work) < lines or (agent := agent_below(psutil.Process(running.pid))) is None:
            assert running.is_alive() and time.monotonic() < deadline, f"no {lines} lines in {work / METRICS_NAME}"
            time.sleep(0.02)
        lines = lines_in(work) + 3
        started |= {agent, *agent.children(recursive=True)}
        if victim == "agent":
            agent.kill()
        else:
            running.kill()
            running.join()
            running = _CONTEXT.Process(target=flow, args=(made, tmp_path / "train"))
            running.start()
        assert not psutil.wait_procs([one for one in started if one.pid != running.pid], timeout=10)[1]
    running.join(200)
    assert running.exitcode == 0
    assert state_in(tmp_path / "train" / "checkpoint") == undisturbed.state
    assert not (work / CHECKPOINTS_NAME).exists()
