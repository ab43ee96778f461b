"""The tuning flow: trials of settings on one dataset, compared on the validation split. The test split is never read."""

import time
from functools import partial

from prefect import flow

from flows.prefect_runs import tag_flow_run
from flows.settings.config_file import dump_config, settings_as_yaml, with_settings
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError
from recsys_core.manifests import Dataset, fingerprint_of
from recsys_core.training.train import train
from tasks.progress.reporting import LOG
from tasks.runs.context import StageContext
from tasks.runs.run import Run, new_run_id
from tasks.runs.workspace import Workspace
from tasks.stages.data_stages import ingest
from tasks.tuning.config import label_of, short_label
from tasks.tuning.mlflow_runs import log_study
from tasks.tuning.study import RunningTrial, Study, TrialResult
from tasks.tuning.trial import run_trial

TUNING_FOLDER_NAME = "tuning"
"""Name of the folder of all studies in the workspace."""


@flow(name="tune", flow_run_name="{config.name} tune")
def tune_settings(config: PipelineConfig) -> Study:
    """Search `tuning.ranges` for the settings with the best validation metric. Resume a study of the same config and data."""
    tuning = config.tuning
    assert tuning is not None
    deadline = time.monotonic() + (tuning.timeout_s or float("inf"))
    tag_flow_run(config.name)
    run = Run("data", workspace=config.workspace.absolute(), parent=TUNING_FOLDER_NAME)
    with run.lock():
        dataset = _ingest_with_validation(config, run)
        check_probes(config, dataset)
        study = open_study(config, dataset)
        while len(study.finished_trials) < tuning.trials and time.monotonic() <= deadline:
            trial = study.start_trial()
            result = _plan_and_run_trial(config, trial, dataset, study=study)
            study.finish_trial(trial, result)
            _log_result(trial, result, metric_name=study.metric)
            report_study(config, study, is_done=False)
        report_study(config, study, is_done=True)
    return study


def _ingest_with_validation(config: PipelineConfig, run: Run) -> Dataset:
    dataset = ingest(StageContext(run), config.inputs)
    if dataset.interactions.validation_events == 0:
        raise InputError(
            "tuning compares trials on the validation split, but the split holds no event; set interactions.split, e.g. "
            "{kind: time, validation_days: 1}"
        )
    return dataset


def check_probes(config: PipelineConfig, dataset: Dataset) -> None:
    """Check that a sharding plan for this dataset and cluster can be made with each probe of the ranges.

    Probes are the values of a range that are checked before the first trial, such as its ends. Raise InputError if a probe
    has no plan.
    """
    assert config.tuning is not None
    for key, value_range in config.tuning.ranges.items():
        for probe in value_range.probes:
            try:
                trial_config = with_settings(config, {key: probe})
            except InputError:  # the probe may be valid together with a value of another range
                continue
            try:
                trial_config.training_setup(dataset).make_plan()
            except InputError as error:
                raise InputError(
                    f"tuning.ranges.{key}: {label_of(probe)} contradicts other settings of the file: {error}"
                ) from None


def open_study(config: PipelineConfig, dataset: Dataset) -> Study:
    """Open the study of this config and dataset, or create it.

    Settings that do not affect the results of trials may have changed since the study was created.
    """
    tuning, validation = config.tuning, config.training.validation
    assert tuning is not None and validation is not None
    study_name = fingerprint_of(
        "study",
        config.model,
        config.tables,
        config.loss,
        config.sharding,
        config.training.result_settings(),
        tuning.result_settings(),
        dataset.interactions,
        dataset.embeddings,
        dataset.features,
    )[:12]
    folder = config.workspace.absolute() / TUNING_FOLDER_NAME / study_name
    study = Study(tuning, folder=folder, metric=f"{validation.metric}@{validation.k}", run_id=f"tune-{new_run_id()}")
    dump_config(config, study.config_file)
    LOG.info("%-20s %s, %d of %d trials done", "study", study.folder, len(study.finished_trials), tuning.trials)
    return study


def _plan_and_run_trial(config: PipelineConfig, trial: RunningTrial, dataset: Dataset, *, study: Study) -> TrialResult:
    """Plan and train with the trial's settings. A trial whose settings contradict each other fails without training."""
    assert config.tuning is not None
    folder = study.folder / f"trial-{trial.number}"
    try:
        setup = with_settings(config, trial.settings).training_setup(dataset)
        plan = setup.plan(dataset, folder=folder / "plan")
    except InputError as error:
        return TrialResult(ending="failed", seconds=0, reason=str(error))
    train_trial = partial(train, setup, dataset=dataset, plan=plan, folder=folder / "train")
    best_value_text = "" if study.best_trial is None else f", best {study.best_trial.value:.4f}"
    progress_label = f"trial {trial.number + 1}/{config.tuning.trials}{best_value_text}"
    return run_trial(trial, train_trial, metric=study.metric, folder=folder, label=progress_label)


def _log_result(trial: RunningTrial, result: TrialResult, *, metric_name: str) -> None:
    metric_text = "" if result.value is None else f"{metric_name} {result.value:.4f}, "
    settings_text = ", ".join(f"{key} {short_label(value)}" for key, value in trial.settings.items())
    reason_text = f" ({result.reason.splitlines()[0]})" if result.reason else ""
    line_parts = (
        f"trial {trial.number}",
        f"{metric_text}{result.ending}{reason_text}: {settings_text}",
        f"{result.seconds:,.1f} s",
    )
    LOG.info("%-20s %-70s %s", *line_parts, extra={"stage_line": line_parts})


def report_study(config: PipelineConfig, study: Study, *, is_done: bool) -> None:
    """Write history.png and best.yaml to the study's folder and log the study to MLflow."""
    study.plot_history()
    best_trial = study.best_trial
    if best_trial is not None:
        value_text = f"{study.metric} {best_trial.value:.4f} on the validation split"
        header = f"# trial {best_trial.number} of study {study.name}: {value_text}\n"
        study.best_file.write_text(header + settings_as_yaml(config, best_trial.settings), encoding="utf-8")
    run = Workspace(config.workspace.absolute()).run(study.run_id)
    log_study(StageContext(run, experiment=config.registry.experiment), study, is_done=is_done)
