"""One trial of `nightjar tune`: a training with the settings it tries, of which only the metrics and the logs are kept."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optuna import TrialPruned
from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.errors import InputError, StageError
from recsys_core.launching.config import Launcher
from recsys_core.manifests import Dataset, PlanManifest
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.training import train as train_core
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job_spec import Progress
from recsys_core.training.loop import METRICS_NAME
from tasks.reporting import show_bar, training_note
from tasks.tuning.study import Attempt, Ending, Result


@dataclass(frozen=True)
class TrialSetup:
    """What a trial trains. metric: what it is measured by, e.g. ndcg@10; folder: its own."""

    training: TrainingConfig
    loss: LossConfig
    model: ModelSpec
    plan: PlanManifest
    dataset: Dataset
    launcher: Launcher
    metric: str
    folder: Path


@task(name="try_settings", task_run_name="trial-{attempt.number}", cache_policy=NO_CACHE)
def try_settings(attempt: Attempt, setup: TrialSetup, *, stage: str) -> Result:
    """torchrun -> the best epoch's metric. stage: what the terminal calls it. InputError of a rank ends the whole tuning."""
    started = time.monotonic()
    measured: dict[int, float] = {}
    ending: Ending = "complete"
    reason = ""

    def on_progress(progress: Progress) -> None:
        show_bar(stage, done=progress.step, total=progress.total_steps, note=training_note(progress))
        if setup.metric in progress.validation:
            measured[progress.epoch] = progress.validation[setup.metric]
            attempt.report(progress.epoch, measured[progress.epoch])
            if progress.step < progress.total_steps:
                attempt.require_hope()

    try:
        best = train_trial(setup, on_progress=on_progress)
    except TrialPruned:  # raised in on_progress: the launcher has ended all processes of the training
        ending, best = "pruned", None
    except StageError as error:
        ending, reason, best = "failed", str(error), None
    keep_metrics(setup.folder)
    value = max(measured.values(), default=None) if best is None else best
    return Result(ending=ending, value=value, seconds=time.monotonic() - started, reason=reason)


def train_trial(setup: TrialSetup, *, on_progress: Callable[[Progress], None]) -> float:
    """The metric of the best epoch. Raises what training and `on_progress` raise, and InputError if nothing was measured."""
    manifest = train_core.train(
        setup.training,
        model=setup.model,
        loss=setup.loss,
        dataset=setup.dataset,
        plan=setup.plan,
        folder=setup.folder / "train",
        on_progress=on_progress,
        launcher=setup.launcher,
    )
    if setup.metric not in manifest.validation:
        raise InputError(
            "tuning compares trials on the validation split, but no user in it has a target; set interactions.split so that "
            "it holds some"
        )
    return manifest.validation[setup.metric]


def keep_metrics(folder: Path) -> None:
    """Moves metrics.jsonl out of the training's folders and removes all else but logs: no model of a trial is used."""
    train, work = folder / "train", folder / "train.work"
    for made in (train, work):
        if (made / METRICS_NAME).is_file():
            (made / METRICS_NAME).replace(folder / METRICS_NAME)
    shutil.rmtree(train, ignore_errors=True)
    for path in work.glob("*"):
        if path.is_dir() and path.name != "logs":
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
