"""The tuning flow: trials of settings on one dataset, compared on the validation split. The test split is never read."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from prefect import flow

from flows.prefect_runs import name_flow_run
from flows.settings.config_file import dump_config, settings_as_yaml, with_settings
from flows.settings.pipeline import PipelineConfig
from flows.settings.suggested import default_ranges, first_trials
from recsys_core.disk import write_text
from recsys_core.errors import InputError
from recsys_core.manifests import Dataset, fingerprint_of
from recsys_core.training.train import train
from tasks.progress.reporting import LOG
from tasks.runs.context import StageContext
from tasks.runs.run import Run
from tasks.stages.data_stages import ingest
from tasks.tuning.config import TuningConfig, format_setting_value
from tasks.tuning.study import (
    BudgetSpent,
    FinishedTrial,
    fail_trial,
    finished_trials,
    log_missing_trials,
    log_study,
    log_trial,
    open_study,
    plot_history,
    remove_all_but_metrics_and_logs,
    run_trial,
    start_trial,
)
from tasks.tuning.suggestions import DataFacts, suggestions

TUNING_FOLDER_NAME = "tuning"
"""Name of the folder of all studies in the workspace."""


@dataclass(frozen=True)
class StudyResult:
    """The finished trials of a study, the best first, and its folder with best.yaml and history.png."""

    folder: Path
    metric: str
    trials: list[FinishedTrial]

    @property
    def best_trial(self) -> FinishedTrial | None:
        """The complete trial with the highest metric, the first one if several are equal; None if no trial is complete."""
        return self.trials[0] if self.trials and self.trials[0].ending == "complete" else None

    @property
    def best_file(self) -> Path:
        """File with the settings of the best trial."""
        return self.folder / "best.yaml"

    @property
    def history_file(self) -> Path:
        """Plot of the metric by trial."""
        return self.folder / "history.png"


@flow(name="tune")
def tune_settings(config: PipelineConfig) -> StudyResult:
    """Search `tuning.ranges` for the settings with the best validation metric. Resume a study of the same config and data."""
    validation, workspace, tuning = config.training.validation, config.workspace.absolute(), config.tuning or TuningConfig()
    assert validation is not None
    metric = f"{validation.metric}@{validation.k}"
    deadline_s = time.monotonic() + (tuning.timeout_s or float("inf"))
    name_flow_run(config.name, "tune")
    data_run = Run("data", workspace=workspace, parent_name=TUNING_FOLDER_NAME)
    with data_run.lock():
        dataset = ingest(StageContext(data_run), config.input_config)
        if dataset.interactions.num_validation_events == 0:
            raise InputError(
                "tuning compares trials on the validation split, but the split holds no event; set interactions.split, e.g. "
                "{kind: time, validation_days: 1}"
            )
        config, first_settings = with_search_space(config, dataset)
        run = Run(_study_name(config, dataset), workspace=workspace, parent_name=TUNING_FOLDER_NAME)
        context = StageContext(run, experiment=config.registry.experiment)
        study = open_study(run.folder)
        dump_config(config, run.config_file)
        study_result = StudyResult(run.folder, metric, finished_trials(study))
        LOG.info("%-20s %s, %d of %d trials done", "study", run.folder, len(study_result.trials), tuning.trials)
        if study_result.trials:
            # The process may have been killed after the end of a trial, but before its files were removed or it was logged.
            for trial in study_result.trials:
                remove_all_but_metrics_and_logs(run.folder / f"trial-{trial.number}")
            log_missing_trials(context, study_result.trials, metric=metric)
            _write_reports(config, study, study_result)
        while len(study_result.trials) < tuning.trials and time.monotonic() <= deadline_s:
            try:
                trial_number = _run_next_trial(
                    config, study, dataset, study_result, first_settings=first_settings, deadline_s=deadline_s
                )
            except BudgetSpent:
                LOG.info("%-20s the time is over; the same command continues the last trial", "study")
                break
            study_result = StudyResult(run.folder, metric, finished_trials(study))
            trial = next(trial for trial in study_result.trials if trial.number == trial_number)
            _log_trial_line(trial, metric=metric)
            log_trial(context, trial, metric=metric)
            _write_reports(config, study, study_result)
        report_files = [path for path in (run.config_file, study_result.best_file, study_result.history_file) if path.is_file()]
        log_study(context, best_trial=study_result.best_trial, metric=metric, paths=report_files)
    return study_result


def with_search_space(config: PipelineConfig, dataset: Dataset) -> tuple[PipelineConfig, list[dict[str, Any]]]:
    """Return the config with the ranges of the search, and the settings of the first trials.

    If the file has ranges, they are used, and the sampler also chooses the first trials. Otherwise the ranges are chosen to fit
    the data.
    """
    tuning = config.tuning or TuningConfig()
    if tuning.ranges:
        return config, []
    suggestion_list = suggestions(DataFacts.of(dataset, config.interactions.split))
    ranges = default_ranges(config, suggestion_list)
    config = config.model_copy(update={"tuning": tuning.model_copy(update={"ranges": ranges})})
    return config, first_trials(config, suggestion_list, ranges)


def _study_name(config: PipelineConfig, dataset: Dataset) -> str:
    """Return a name with a hash of the data and of all settings that affect the results of trials."""
    assert config.tuning is not None
    fingerprint = fingerprint_of(
        "tune",
        config.model,
        config.tables,
        config.loss,
        config.sharding,
        config.training.result_settings(),
        config.tuning.result_settings(),
        dataset.interactions,
        dataset.embeddings,
        dataset.features,
        dataset.log_vectors,
    )
    return f"tune-{fingerprint[:12]}"


def _run_next_trial(
    config: PipelineConfig,
    study: optuna.Study,
    dataset: Dataset,
    study_result: StudyResult,
    *,
    first_settings: Sequence[Mapping[str, Any]],
    deadline_s: float,
) -> int:
    """Plan and train with the settings of the next trial; return its number.

    A trial whose settings contradict each other fails without training. Raise BudgetSpent if the deadline has passed.
    """
    assert config.tuning is not None
    trial = start_trial(study, config.tuning, first_settings=first_settings)
    folder = study_result.folder / f"trial-{trial.number}"
    try:
        setup = with_settings(config, trial.user_attrs["settings"]).training_setup(dataset)
        plan = setup.plan(dataset, folder=folder / "plan")
    except InputError as error:
        fail_trial(study, trial, reason=str(error))
        return trial.number
    best_value_text = "" if study_result.best_trial is None else f", best {study_result.best_trial.value:.4f}"
    run_trial(
        study,
        trial,
        partial(train, setup, dataset=dataset, plan=plan, folder=folder / "train"),
        metric=study_result.metric,
        startup_trials=config.tuning.startup_trials,
        deadline_s=deadline_s,
        folder=folder,
        label=f"trial {trial.number + 1}/{config.tuning.trials}{best_value_text}",
    )
    return trial.number


def _log_trial_line(trial: FinishedTrial, *, metric: str) -> None:
    metric_text = "" if trial.value is None else f"{metric} {trial.value:.4f}, "
    settings_text = ", ".join(f"{key} {format_setting_value(value)}" for key, value in trial.settings.items())
    reason_text = f" ({trial.reason.splitlines()[0]})" if trial.reason else ""
    result_text = f"{metric_text}{trial.ending}{reason_text}: {settings_text}"
    line_parts = (f"trial {trial.number}", result_text, f"{trial.seconds:,.1f} s")
    LOG.info("%-20s %-70s %s", *line_parts, extra={"stage_line": line_parts})


def _write_reports(config: PipelineConfig, study: optuna.Study, study_result: StudyResult) -> None:
    """Write history.png and best.yaml to the study's folder."""
    plot_history(study, metric=f"{study_result.metric} on the validation split", path=study_result.history_file)
    best_trial = study_result.best_trial
    if best_trial is not None:
        value_text = f"{study_result.metric} {best_trial.value:.4f} on the validation split"
        header = f"# trial {best_trial.number} of study {study_result.folder.name}: {value_text}\n"
        write_text(study_result.best_file, header + settings_as_yaml(config, best_trial.settings))
