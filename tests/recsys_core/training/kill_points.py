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
from tests.gloo import FORK_SERVER_CONTEXT, cpu_process
from tests.recsys_core.training.forked_training import (
    Experiment,
    checkpoint_of,
    export_in_forks,
    train_in_forks,
    without_timings,
)

TRAINING = TrainingConfig(
    epochs=3, batch_size=128, log_every_steps=2, checkpoint_every_steps=3, keep_checkpoints=2, max_attempts=50, seed=5
)
NUM_STEPS = 39
"""Steps of an undisturbed training with TRAINING on the generated log."""
TIMEOUT_S, NUM_LINES_BETWEEN_KILLS = 120.0, 3


class Kill(NamedTuple):
    """A rank that kills itself.

    Attributes:
        point: name of the call in which the rank kills itself, see `patch_kill_point`.
        step: the rank kills itself in the first such call after this number of steps.
    """

    point: str
    rank: int
    step: int = 0


class UndisturbedResult(NamedTuple):
    """Checksums of the last checkpoint by file name, metrics lines without timings, and exported arrays by name."""

    state: dict[str, str]
    lines: list[dict[str, Any]]
    export: dict[str, np.ndarray]


def train_undisturbed(experiment: Experiment, folder: Path) -> UndisturbedResult:
    """Train and export without an interruption."""
    finished_training = train_in_forks(experiment, folder / "work")
    assert finished_training.result.num_steps == NUM_STEPS
    export = export_in_forks(experiment, checkpoint_of(finished_training), folder / "export")
    return UndisturbedResult(
        state_checksums(checkpoint_of(finished_training)), without_timings(finished_training.lines), export
    )


def state_checksums(checkpoint_folder: Path) -> dict[str, str]:
    """Return the checksums of the weights and optimizer states that each rank wrote."""
    manifest = require_manifest(checkpoint_folder, CheckpointManifest)
    return {name: record.sha256 for name, record in manifest.files.items() if name.endswith(".distcp")}


def kill_this_process(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # until the signal arrives


def killing_call(
    kill: Kill, call: Callable[..., Any], *, after: bool = False, when: Callable[..., bool] = lambda *_: True
) -> Any:
    """Return a function that replaces `call`: it calls `call`, and kills this process.

    The process is killed before the call, or after it if `after` is True. It is killed only after `kill.step` steps, and only
    if `when` is True for the positional arguments.
    """

    def call_or_kill(*args: Any, **kwargs: Any) -> Any:
        if not after and NUM_STEPS_DONE[0] >= kill.step and when(*args):
            kill_this_process()
        return_value = call(*args, **kwargs)
        if after and NUM_STEPS_DONE[0] >= kill.step and when(*args):
            kill_this_process()
        return return_value

    return call_or_kill


NUM_STEPS_DONE = [0]
"""Number of steps of this process, in a list that the patched functions change."""


def count_steps() -> None:
    """Patch the training loop so that it counts its steps in NUM_STEPS_DONE."""
    check_loss = loop.raise_if_not_finite  # called after each step

    def check_loss_and_count(loss: torch.Tensor, *, step: int, **options: Any) -> None:
        check_loss(loss, step=step, **options)
        NUM_STEPS_DONE[0] = step

    loop.raise_if_not_finite = check_loss_and_count  # type: ignore[assignment]


def write_half_a_line(self: MetricsLog, *args: Any, **kwargs: Any) -> None:
    with self._path.open("a") as file:
        file.write('{"step":')


def remove_half_a_folder(path: Path, **_: Any) -> None:
    """Remove one file of the folder `path` and kill this process."""
    for file_path in sorted(path.glob("*")):
        file_path.unlink()
        kill_this_process()


def patch_kill_point(kill: Kill) -> None:
    """Patch the function that `kill.point` names, so that a call of it kills this process."""
    count_steps()
    is_checkpoint = lambda path, *_: "step-" in str(path)  # noqa: E731
    match kill.point:
        case "step":
            loop.raise_if_not_finite = killing_call(kill, loop.raise_if_not_finite, after=True)
        case "staged":
            checkpoints.async_save = killing_call(kill, checkpoints.async_save, after=True)
        case "written":
            os.fsync = killing_call(kill, os.fsync)
        case "hashed":
            stage_folder.record_file = killing_call(kill, stage_folder.record_file, after=True, when=is_checkpoint)
        case "renaming":
            Path.rename = killing_call(kill, Path.rename, when=is_checkpoint)
        case "renamed":
            Path.rename = killing_call(kill, Path.rename, after=True, when=is_checkpoint)
        case "measured":
            Validator.measure = killing_call(kill, Validator.measure, after=True)
        case "line":
            write_line, write_half_and_kill = MetricsLog.write_line, killing_call(kill, write_half_a_line, after=True)
            MetricsLog.write_line = lambda *args, **options: (
                write_half_and_kill if NUM_STEPS_DONE[0] >= kill.step else write_line
            )(*args, **options)
        case "removing":
            shutil.rmtree = remove_half_a_folder
        case "result":
            loop.Trainer._write_result = kill_this_process
        case "export":
            RankWriter.write = killing_call(kill, RankWriter.write, after=True)


def train_and_die(rank: int, job: TrainJob, kill: Kill) -> None:
    if rank == kill.rank:
        patch_kill_point(kill)
    loop.run_training(job, process=cpu_process(rank))


def export_and_die(rank: int, job: ExportJob, kill: Kill) -> None:
    if rank == kill.rank:
        patch_kill_point(kill)
    run_export(job, process=cpu_process(rank))


def run_train_stage(experiment: Experiment, folder: Path) -> None:
    """Run the train stage as the process of the flow does."""
    train(
        TrainingSetup(experiment.spec, experiment.training, experiment.loss),
        dataset=experiment.dataset, plan=experiment.plan,
        folder=folder, on_progress=lambda line: None,
    )  # fmt: skip


def agent_of(flow_process: psutil.Process) -> psutil.Process | None:
    return next((child for child in flow_process.children() if "recsys_core.launching" in child.cmdline()), None)


def num_metrics_lines(work_folder: Path) -> int:
    path = work_folder / METRICS_FILE
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def train_through_kills(experiment: Experiment, folder: Path, *, victims: Sequence[str]) -> None:
    """Run the train stage in `folder`, and kill the processes in `victims` one after another.

    The training writes at least NUM_LINES_BETWEEN_KILLS metrics lines between two kills. A killed flow is started again. After
    each kill, the agent and its ranks must end within ten seconds.

    Args:
        victims: names of processes: "agent" (torchrun's agent), "rank" or "flow".
    """
    work_folder = folder.with_name(folder.name + ".work")

    def start_flow() -> Any:
        process = FORK_SERVER_CONTEXT.Process(target=run_train_stage, args=(experiment, folder))
        process.start()
        return process

    flow_process, num_expected_lines = start_flow(), 2
    for victim in victims:
        deadline = time.monotonic() + TIMEOUT_S
        agent = None
        while agent is None or num_metrics_lines(work_folder) < num_expected_lines or len(agent.children()) < 2:
            assert flow_process.is_alive() and time.monotonic() < deadline, (
                f"{victim}: no {num_expected_lines} lines in {work_folder}"
            )
            time.sleep(0.01)
            agent = agent_of(psutil.Process(flow_process.pid))
        num_expected_lines = num_metrics_lines(work_folder) + NUM_LINES_BETWEEN_KILLS
        agent_and_ranks = [agent, *agent.children(recursive=True)]
        if victim == "flow":
            flow_process.kill()
            flow_process.join()
            flow_process = start_flow()
        else:
            (agent if victim == "agent" else agent.children()[0]).kill()
        assert not psutil.wait_procs(agent_and_ranks, timeout=10)[1], f"{victim} was killed, but the agent or a rank still runs"
    flow_process.join(TIMEOUT_S)
    assert flow_process.exitcode == 0
