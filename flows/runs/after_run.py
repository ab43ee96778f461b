"""Housekeeping at the end of each run, including failed runs. An error in the housekeeping does not fail the run."""

import logging
from collections.abc import Callable
from functools import partial

from flows.runs.history_page import write_history_page
from flows.runs.metrics_file import write_metrics_file
from flows.settings.pipeline import PipelineConfig
from recsys_core.manifests import DataReportManifest
from recsys_core.units import format_gib
from tasks.runs.context import StageContext
from tasks.runs.run import Run
from tasks.runs.run_record import RunRecord

LOG = logging.getLogger("nightjar")
MLFLOW_TIMEOUT_S = 10.0
"""Time limit for the first request to MLflow after a run. If MLflow does not answer in time, no further request is sent."""


def after_run(config: PipelineConfig, context: StageContext) -> None:
    """Write the metrics and the page of the last runs, log the stages to MLflow, and remove files of old runs.

    A step that fails logs a warning. After an interruption, only the metrics are written, because the process must end at once.
    The next run then writes the page and removes the files. A run that --until stops before `check_data` has no MLflow run.
    After such a run, all steps that need MLflow are skipped, because the import of MLflow takes two seconds.
    """
    run = context.run
    record = RunRecord.read(run)
    _call_or_warn("write the Prometheus metrics", partial(write_metrics_file, config))
    if record is None or record.state == "Interrupted":
        return
    if record.state == "StoppedEarly" and DataReportManifest.stage not in record.figures.stage_seconds:
        _call_or_warn("write the page of the last runs", partial(write_history_page, config, context, has_mlflow=False))
        return
    try:
        has_mlflow = _is_mlflow_available(run)
    except Exception as error:  # any error of a library
        LOG.warning("could neither log the stages to MLflow nor remove files of old runs; the run is not affected (%s)", error)
        _call_or_warn("write the page of the last runs", partial(write_history_page, config, context, has_mlflow=False))
        return
    _call_or_warn("write the page of the last runs", partial(write_history_page, config, context, has_mlflow=has_mlflow))
    if has_mlflow:
        _call_or_warn("log the stages to MLflow", partial(_log_to_mlflow, context, record))
    _call_or_warn("remove files of old runs", partial(_remove_old_files, config, run))


def _call_or_warn(description: str, step: Callable[[], None]) -> None:
    try:
        step()
    except Exception as error:  # any error of a library
        LOG.warning("could not %s (%s: %s); the run is not affected", description, type(error).__name__, error)


def _is_mlflow_available(run: Run) -> bool:
    """Return whether the run can log to MLflow; False if there is neither a server nor a database in the workspace.

    Raises TrackingServerError if MLflow does not answer within MLFLOW_TIMEOUT_S.
    """
    from tasks.registry.mlflow_client import connect, mlflow_exists

    if not mlflow_exists(run.workspace):
        return False
    connect(run.workspace, timeout_s=MLFLOW_TIMEOUT_S)
    return True


def _log_to_mlflow(context: StageContext, record: RunRecord) -> None:
    """Log the end of a run that has an MLflow run. The stage `check_data` creates the MLflow run."""
    if context.folder(DataReportManifest).is_dir():
        from tasks.registry.tracking import log_run_end

        log_run_end(context, state=record.state, message=record.message)


def _remove_old_files(config: PipelineConfig, run: Run) -> None:
    from tasks.retention.clean import clean

    removals = clean(run.workspace, config.retention, model_name=config.registry.model_name)
    if removals.run_removals or removals.versions:
        LOG.info(
            "removed files of %d old runs and %d old model versions: %s",
            len(removals.run_removals),
            len(removals.versions),
            format_gib(removals.freed_bytes, digits=3),
        )
