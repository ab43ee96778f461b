"""One trial of `nightjar tune`: a training that keeps only its metrics and logs."""

import shutil
import time
from pathlib import Path
from typing import Protocol

from optuna import TrialPruned
from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.errors import InputError, StageError
from recsys_core.manifests import TrainManifest
from recsys_core.training.job.job_spec import METRICS_FILE, Progress
from tasks.progress.reporting import show_bar, training_note
from tasks.tuning.study import RunningTrial, TrialEnding, TrialResult


class OnProgress(Protocol):
    """Takes each line of metrics.jsonl as it appears."""

    def __call__(self, progress: Progress) -> None: ...


class TrainFunction(Protocol):
    """Trains with the trial's settings. It is recsys_core.training.train with all arguments bound except on_progress."""

    def __call__(self, *, on_progress: OnProgress) -> TrainManifest: ...


@task(name="run_trial", task_run_name="trial-{trial.number}", cache_policy=NO_CACHE)
def run_trial(trial: RunningTrial, train: TrainFunction, *, metric: str, folder: Path, label: str) -> TrialResult:
    """Train, report `metric` after each epoch, and stop early if the trial is pruned.

    Args:
        metric: name of the validation metric, such as ndcg@10.
        folder: the trial's folder; `train` writes to `folder / "train"`.
        label: name of the trial in the terminal.

    Raises:
        InputError: no trial is possible with the data; the study ends.
    """
    start_s = time.monotonic()
    value_by_epoch: dict[int, float] = {}
    ending: TrialEnding = "complete"
    reason = ""

    def on_progress(progress: Progress) -> None:
        if metric in progress.validation:
            value_by_epoch[progress.epoch] = progress.validation[metric]
            trial.report(progress.epoch, progress.validation[metric])
            if progress.step < progress.total_steps:
                trial.raise_if_pruned()
        validation = {} if not value_by_epoch else {metric: [*value_by_epoch.values()][-1]}
        note = training_note(progress, validation=validation)
        show_bar(label, num_done=progress.step, num_total=progress.total_steps, note=note)

    try:
        manifest = train(on_progress=on_progress)
    except TrialPruned:  # raised in on_progress: the launcher has ended all processes of the training
        ending, metric_value = "pruned", max(value_by_epoch.values(), default=None)
    except StageError as error:
        ending, reason, metric_value = "failed", str(error), max(value_by_epoch.values(), default=None)
    else:
        if metric not in manifest.validation:
            raise InputError(
                "tuning compares trials on the validation split, but no user in the split has a target; set "
                "interactions.split so that the validation split holds events"
            )
        metric_value = manifest.validation[metric]
    _remove_all_but_metrics_and_logs(folder)
    return TrialResult(ending=ending, value=metric_value, seconds=time.monotonic() - start_s, reason=reason)


def _remove_all_but_metrics_and_logs(folder: Path) -> None:
    """Move metrics.jsonl to the trial's folder, keep the logs, and remove all other files of the training.

    Files behind a link are left alone.
    """
    train_folder, work_folder = folder / "train", folder / "train.work"
    if train_folder.is_symlink() or work_folder.is_symlink():
        return
    for source_folder in (train_folder, work_folder):
        if (source_folder / METRICS_FILE).is_file():
            (source_folder / METRICS_FILE).replace(folder / METRICS_FILE)
    shutil.rmtree(train_folder, ignore_errors=True)
    for path in work_folder.glob("*"):
        if path.is_dir() and path.name != "logs":
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
