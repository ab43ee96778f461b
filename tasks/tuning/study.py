"""Hyperparameter search: an Optuna study in a sqlite file, its trials, and their MLflow runs.

An interrupted trial is resumed under its number, and every trial has a sampler with its own seed. An interrupted study
therefore tries the same settings as a study that is not interrupted.
"""

import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import optuna
from matplotlib import pyplot
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME
from optuna.trial import FrozenTrial, TrialState
from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.config import Frozen
from recsys_core.errors import InputError, StageError
from recsys_core.manifests import TrainManifest, create_own_folder
from recsys_core.seeds import trial_seed
from recsys_core.training.job import METRICS_FILE, Progress
from tasks.progress.reporting import show_bar, training_note
from tasks.registry.mlflow_client import call_or_warn
from tasks.registry.tracking import as_metrics, log_metrics, log_params, open_mlflow_run
from tasks.runs.context import StageContext
from tasks.tuning.config import RangeConfig, TuningConfig, label_of

TrialEnding = Literal["complete", "pruned", "failed"]
ENDING_BY_STATE: dict[TrialState, TrialEnding] = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
"""Endings, in the order in which the trials are listed."""
REDUCTION_FACTOR = 2
"""After 1, 2, 4, ... epochs, a trial continues if it is among the best half of the trials that reached this epoch."""
_STATUS_BY_ENDING = {"complete": RunStatus.FINISHED, "pruned": RunStatus.KILLED, "failed": RunStatus.FAILED}


class BudgetSpent(Exception):
    """The time of the study is over. The running trial is interrupted, and a resumed study continues it."""


class FinishedTrial(Frozen):
    """A trial that is complete, pruned or failed.

    Attributes:
        settings: values of the searched settings.
        value: metric of a complete trial's best epoch, or of a pruned trial's last epoch; None if the trial failed.
        seconds: duration of the training since its last start; 0 if the trial failed before its training.
        reason: why the trial failed.
        epochs: metric by epoch (1-based).
    """

    number: int
    settings: dict[str, Any]
    ending: TrialEnding
    value: float | None
    seconds: float
    reason: str
    epochs: dict[int, float]

    @classmethod
    def of(cls, trial: FrozenTrial) -> Self:
        """Return the result of a finished trial of Optuna."""
        return cls(
            number=trial.number,
            settings=trial.user_attrs["settings"],
            ending=ENDING_BY_STATE[trial.state],
            value=trial.value,
            # Optuna's own duration includes interruptions, and is wrong if daylight saving time begins or ends in a trial.
            seconds=trial.user_attrs.get("seconds", 0.0),
            reason=trial.user_attrs.get("reason", ""),
            epochs=trial.intermediate_values,
        )


def open_study(folder: Path) -> optuna.Study:
    """Open the study in `folder`, or create it. A study searches for the highest metric."""
    create_own_folder(folder)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(
        storage=f"sqlite:///{folder / 'study.db'}",
        study_name=folder.name,
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION_FACTOR),
    )


def finished_trials(study: optuna.Study) -> list[FinishedTrial]:
    """Return complete trials in descending order of the metric, then pruned trials, then failed trials."""
    trials = map(FinishedTrial.of, study.get_trials(deepcopy=False, states=tuple(ENDING_BY_STATE)))
    endings = [*ENDING_BY_STATE.values()]
    return sorted(trials, key=lambda trial: (endings.index(trial.ending), -(trial.value or 0.0), trial.number))


def start_trial(study: optuna.Study, config: TuningConfig, *, first_settings: Sequence[Mapping[str, Any]] = ()) -> optuna.Trial:
    """Resume the interrupted trial, or start a new trial. Store the settings in the user attribute `settings` of the trial.

    Args:
        first_settings: settings of the first trials, in order. The sampler chooses the settings of later trials.
    """
    interrupted_trials = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    trial_number = interrupted_trials[0].number if interrupted_trials else len(study.get_trials(deepcopy=False))
    sampler: optuna.samplers.BaseSampler = optuna.samplers.TPESampler(seed=trial_seed(config.seed, trial=trial_number))
    if trial_number < len(first_settings):
        fixed_values = {
            name: value if config.ranges[name].choices is None else label_of(value)
            for name, value in first_settings[trial_number].items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the class is marked as experimental
            sampler = optuna.samplers.PartialFixedSampler(fixed_values, sampler)
    study.sampler = sampler
    trial = optuna.Trial(study, interrupted_trials[0]._trial_id) if interrupted_trials else study.ask()
    trial.set_user_attr("settings", {name: _suggest(trial, name, value_range) for name, value_range in config.ranges.items()})
    return trial


def _suggest(trial: optuna.Trial, setting_name: str, value_range: RangeConfig) -> Any:
    """Return the value of a setting in a trial; the sampler draws the value if the trial does not have it yet."""
    if value_range.choices is not None:  # the study stores labels, because Optuna cannot store a list
        choice_by_label = {label_of(choice): choice for choice in value_range.choices}
        return choice_by_label[trial.suggest_categorical(setting_name, [*choice_by_label])]
    assert value_range.low is not None and value_range.high is not None
    if isinstance(value_range.low, int):
        step = int(value_range.step or 1)
        return trial.suggest_int(setting_name, value_range.low, int(value_range.high), log=value_range.log, step=step)
    return trial.suggest_float(setting_name, value_range.low, value_range.high, log=value_range.log, step=value_range.step)


@task(name="run_trial", task_run_name="trial-{trial.number}", cache_policy=NO_CACHE)
def run_trial(
    study: optuna.Study,
    trial: optuna.Trial,
    train: Callable[..., TrainManifest],
    *,
    metric: str,
    startup_trials: int,
    deadline_s: float,
    folder: Path,
    label: str,
) -> None:
    """Train, report the metric after each epoch, stop early if the trial is pruned, and record how the trial ended.

    Args:
        deadline_s: time of `time.monotonic` after which the trial is interrupted if another trial is complete.
        startup_trials: number of complete trials before which no trial is pruned.
        train: trains in `folder / "train"` with the settings of the trial. Its argument on_progress takes a Progress.
        metric: name of the validation metric, such as ndcg@10.
        label: name of the trial in the terminal.

    Raises:
        InputError: the validation split has no targets, so the study ends.
        BudgetSpent: the deadline has passed. The files of the trial are kept.
    """

    last_validation: dict[str, float] = {}
    num_complete_trials = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
    can_prune = num_complete_trials >= startup_trials
    start_s = time.monotonic()

    def on_progress(progress: Progress) -> None:
        if metric in progress.validation:
            last_validation[metric] = progress.validation[metric]
            with warnings.catch_warnings():  # a resumed trial reports some epochs again, which Optuna ignores with a warning
                warnings.simplefilter("ignore", UserWarning)
                trial.report(progress.validation[metric], progress.epoch)
            # Call `should_prune` also for a trial that must not be pruned, because the call stores the value for later trials.
            if trial.should_prune() and can_prune and progress.step < progress.total_steps:
                raise optuna.TrialPruned
        if num_complete_trials and time.monotonic() > deadline_s and progress.step < progress.total_steps:
            raise BudgetSpent
        note = training_note(progress, validation=last_validation)
        show_bar(label, num_done=progress.step, num_total=progress.total_steps, note=note)

    def save_duration() -> None:
        trial.set_user_attr("seconds", time.monotonic() - start_s)

    try:
        manifest = train(on_progress=on_progress)
    except optuna.TrialPruned:  # raised in on_progress, so the launcher has ended all ranks
        save_duration()
        study.tell(trial, state=TrialState.PRUNED)
    except StageError as error:
        save_duration()
        fail_trial(study, trial, reason=str(error))
    else:
        if metric not in manifest.validation:
            raise InputError(
                "tuning compares trials on the validation split, but no user in the split has a target; set "
                "interactions.split so that the validation split holds events"
            )
        save_duration()
        study.tell(trial, manifest.validation[metric])
    remove_all_but_metrics_and_logs(folder)


def fail_trial(study: optuna.Study, trial: optuna.Trial, *, reason: str) -> None:
    """Record that a trial failed."""
    trial.set_user_attr("reason", reason)
    study.tell(trial, state=TrialState.FAIL)


def remove_all_but_metrics_and_logs(folder: Path) -> None:
    """Move metrics.jsonl to the trial's folder, keep the logs, and remove all other files of the training.

    Nothing is moved or removed if a folder of the training is a link.
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


def plot_history(study: optuna.Study, *, metric: str, path: Path) -> None:
    """Write a plot of the metric by trial, and of the best metric so far, to `path`."""
    pyplot.switch_backend("Agg")  # Optuna draws with pyplot, which would open a window on a desktop
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the function is marked as experimental
        optuna.visualization.matplotlib.plot_optimization_history(study, target_name=metric)
    pyplot.savefig(path)
    pyplot.close()


def log_trial(context: StageContext, trial: FinishedTrial, *, metric: str) -> None:
    """Log a finished trial to MLflow, as a child of the study's run. Log a warning if MLflow does not work."""

    def log(client: MlflowClient) -> None:
        parent_run_id = open_mlflow_run(client, context)
        tags = {MLFLOW_PARENT_RUN_ID: parent_run_id, MLFLOW_RUN_NAME: f"trial-{trial.number}", "nightjar.reason": trial.reason}
        experiment_id, start_ms = client.get_run(parent_run_id).info.experiment_id, int((time.time() - trial.seconds) * 1000)
        run_info = client.create_run(experiment_id, start_time=start_ms, tags=tags).info
        metric_name = f"validation/{metric.replace('@', '_at_')}"
        epoch_metrics = [Metric(metric_name, value, run_info.start_time, epoch) for epoch, value in trial.epochs.items()]
        best_metrics = [] if trial.value is None else as_metrics({f"validation/best/{metric}": trial.value})
        # MLflow rejects the quotes of a name such as tables."item.brand".dim.
        params = [Param(setting.replace('"', ""), str(value)) for setting, value in trial.settings.items()]
        client.log_batch(run_info.run_id, metrics=[*epoch_metrics, *best_metrics], params=params)
        client.set_terminated(run_info.run_id, RunStatus.to_string(_STATUS_BY_ENDING[trial.ending]))

    call_or_warn(
        log, workspace=context.run.workspace, warning=f"could not log trial {trial.number} to MLflow; tuning continues"
    )


def log_missing_trials(context: StageContext, trials: Iterable[FinishedTrial], *, metric: str) -> None:
    """Log the finished trials that MLflow does not have, because the process was killed or MLflow did not work."""

    def find_logged_names(client: MlflowClient) -> set[str]:
        parent_run_id = open_mlflow_run(client, context)
        experiment_id = client.get_run(parent_run_id).info.experiment_id
        filter_string = f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent_run_id}'"
        logged_names: set[str] = set()
        page_token: str | None = None
        while page_token != "":
            page = client.search_runs([experiment_id], filter_string, page_token=page_token)
            for child_run in page:
                if RunStatus.is_terminated(RunStatus.from_string(child_run.info.status)):
                    logged_names.add(str(child_run.info.run_name))
                else:  # the process was killed while it logged this trial
                    client.delete_run(child_run.info.run_id)
            page_token = page.token or ""
        return logged_names

    logged_names = call_or_warn(
        find_logged_names, workspace=context.run.workspace, warning="could not read the trials in MLflow; tuning continues"
    )
    if logged_names is not None:
        for trial in trials:
            if f"trial-{trial.number}" not in logged_names:
                log_trial(context, trial, metric=metric)


def log_study(context: StageContext, *, best_trial: FinishedTrial | None, metric: str, paths: Iterable[Path]) -> None:
    """Log the config, the value of the best trial and the files `paths` to the study's MLflow run, and end the MLflow run."""

    def log(client: MlflowClient) -> None:
        run_id = open_mlflow_run(client, context)
        log_params(client, run_id, config_file=context.run.config_file)
        if best_trial is not None and best_trial.value is not None:
            log_metrics(client, run_id, as_metrics({f"validation/best/{metric}": best_trial.value}))
        for path in paths:
            client.log_artifact(run_id, str(path))
        client.set_terminated(run_id, RunStatus.to_string(RunStatus.FINISHED if best_trial else RunStatus.FAILED))

    call_or_warn(log, workspace=context.run.workspace, warning="could not log the study to MLflow")
