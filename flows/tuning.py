"""The tuning: trials of settings on one ingest. The validation split decides; nothing here reads the test split."""

import time
from pathlib import Path

from prefect import flow

from flows.cli.tune import shortened
from flows.config import PipelineConfig
from flows.config_file import dump_config, to_paste, with_settings
from flows.nightly import ingest
from recsys_core.errors import InputError
from recsys_core.manifests import Dataset, fingerprint_of
from recsys_core.models.spec import ModelSpec
from recsys_core.sharding.lookup_stats import measure_lookups
from recsys_core.sharding.planner import make_plan, plan_sharding
from tasks.reporting import LOG
from tasks.run import Run, new_run_id
from tasks.tuning.config import TuningConfig, label_of
from tasks.tuning.mlflow_runs import deliver_study
from tasks.tuning.study import Attempt, Result, Study, plot_history
from tasks.tuning.trial import TrialSetup, try_settings

PLACE = "tuning"
"""Folder of the workspace."""


@flow(name="tune", flow_run_name="tune-{config.name}")
def tune_settings(config: PipelineConfig) -> Study:
    """Searches the ranges in `tuning` for the settings that validate best; goes on with a study of the same config and data."""
    tuning, started = config.tuning, time.monotonic()
    assert tuning is not None and config.training.validation is not None
    run = Run("data", workspace=config.workspace.absolute(), experiment=config.registry.experiment, parent=PLACE)
    with run.lock():
        data = read_data(config, run)
        check_values(config, tuning, data)
        study = open_study(config, tuning, data, workspace=run.workspace)
        while len(study.tried) < tuning.trials and not (tuning.timeout_s and time.monotonic() - started > tuning.timeout_s):
            attempt = study.next()
            result = try_one(config, attempt, data, study=study, trials=tuning.trials)
            study.end(attempt, result)
            announce(attempt, result, metric=study.metric)
            report(config, study, done=False)
        report(config, study, done=True)
    return study


def read_data(config: PipelineConfig, run: Run) -> Dataset:
    """Ingest the data as a run does; InputError if the validation split is empty."""
    dataset = ingest(config, run)
    if dataset.interactions.validation_events == 0:
        raise InputError(
            "tuning compares trials on the validation split, but it holds no event; set interactions.split so that it does, "
            "e.g. {kind: time, validation_days: 1}"
        )
    return dataset


def spec_of(config: PipelineConfig, data: Dataset) -> ModelSpec:
    """Return the model of `config`; InputError if it does not fit the data."""
    return ModelSpec.of(config.model, dataset=data, tables=config.tables, loss=config.loss)


def check_values(config: PipelineConfig, tuning: TuningConfig, data: Dataset) -> None:
    """InputError for a value of a range that, alone, fits neither the data nor the cluster: no hour is spent before that."""
    for name, wish in tuning.ranges.items():
        for probe in wish.probes:
            try:
                tried = with_settings(config, {name: probe})
            except InputError:  # it needs another setting that varies too
                continue
            try:
                make_plan(
                    tried.sharding,
                    model=spec_of(tried, data),
                    batch_size=tried.training.batch_size,
                    optimizer=tried.training.table_optimizer,
                )
            except InputError as error:
                raise InputError(
                    f"tuning.ranges.{name}: {label_of(probe)} does not go with the other settings of the file: {error}"
                ) from None


def open_study(config: PipelineConfig, tuning: TuningConfig, data: Dataset, *, workspace: Path) -> Study:
    """The study of this config on these data; what does not change a trial's result may have changed since."""
    assert config.training.validation is not None
    training = config.training.result_settings()
    search = tuning.model_dump(exclude={"trials", "timeout_s"})
    name = fingerprint_of(
        "study",
        config.model,
        config.tables,
        config.loss,
        config.sharding,
        training,
        search,
        data.interactions,
        data.embeddings,
        data.features,
    )[:12]
    metric = f"{config.training.validation.metric}@{config.training.validation.k}"
    study = Study(tuning, folder=workspace / PLACE / name, metric=metric, run_id=f"tune-{new_run_id()}")
    dump_config(config, study.config_file)
    LOG.info("%-20s %s, %d of %d trials done", "study", study.folder, len(study.tried), tuning.trials)
    return study


def try_one(config: PipelineConfig, attempt: Attempt, data: Dataset, *, study: Study, trials: int) -> Result:
    """How a trial ends; one whose settings contradict each other, though each alone is good, fails at once."""
    folder = study.folder / f"trial-{attempt.number}"
    try:
        tried = with_settings(config, attempt.settings)
        model = spec_of(tried, data)
        lookup_stats = measure_lookups(
            model,
            batch_size=tried.training.batch_size,
            loss=tried.loss,
            dataset=data,
        )
        plan = plan_sharding(
            tried.sharding,
            model=model,
            batch_size=tried.training.batch_size,
            optimizer=tried.training.table_optimizer,
            lookup_stats=lookup_stats,
            folder=folder / "plan",
        )
    except InputError as error:
        return Result(ending="failed", seconds=0, reason=str(error))
    setup = TrialSetup(
        training=tried.training,
        loss=tried.loss,
        model=model,
        plan=plan,
        dataset=data,
        launcher=config.launcher,
        metric=study.metric,
        folder=folder,
    )
    best = "" if study.best is None else f", best {study.best.value:.4f}"
    return try_settings(attempt, setup, stage=f"trial {attempt.number + 1} of {trials}{best}")


def announce(attempt: Attempt, result: Result, *, metric: str) -> None:
    """A line in the log."""
    measured = "" if result.value is None else f"{metric} {result.value:.4f}, "
    settings = ", ".join(f"{name} {shortened(value)}" for name, value in attempt.settings.items())
    reason = f" ({result.reason.splitlines()[0]})" if result.reason else ""
    took = f"{result.seconds:,.1f} s"
    LOG.info("%-20s %-70s %s", f"trial {attempt.number}", f"{measured}{result.ending}{reason}: {settings}", took)


def report(config: PipelineConfig, study: Study, *, done: bool) -> None:
    """best.yaml and history.png in the study's folder, and all trials so far to MLflow."""
    best, files = study.best, [study.config_file, plot_history(study, path=study.history_file)]
    if best is not None:
        words = f"# trial {best.number} of study {study.name}: {study.metric} {best.value:.4f} on the validation split\n"
        study.best_file.write_text(words + to_paste(config, best.settings), encoding="utf-8")
        files.append(study.best_file)
    run = Run(study.run_id, workspace=config.workspace.absolute(), experiment=config.registry.experiment)
    deliver_study(run, study.tried, metric=study.metric, best=best, config_file=study.config_file, files=files, done=done)
