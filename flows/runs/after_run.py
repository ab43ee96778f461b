"""Housekeeping at the end of each run, including failed runs. An error in the housekeeping does not fail the run."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from flows.runs.history_page import write_history_page
from flows.runs.metrics_file import write_metrics_file
from flows.settings.pipeline import PipelineConfig
from recsys_core.manifests import DataReportManifest
from recsys_core.units import format_gib
from tasks.registry.mlflow_client import call_or_warn, connect, mlflow_exists
from tasks.registry.releases import champion_of
from tasks.registry.tracking import log_run_end, open_mlflow_run
from tasks.retention.clean import clean
from tasks.runs.context import StageContext
from tasks.runs.run import Run
from tasks.runs.run_record import RunRecord

LOG = logging.getLogger("nightjar")
MLFLOW_TIMEOUT_S = 10.0
"""Time limit for the first request to MLflow after a run. If MLflow does not answer in time, no further request is sent."""
T = TypeVar("T")


def after_run(config: PipelineConfig, context: StageContext) -> None:
    """Write the metrics file and the page of the last runs, log the stages to MLflow, and remove files of old runs.

    A step that fails logs a warning. After an interruption, only the metrics are written, because the process must end soon.
    The next run then writes the page and removes the files. If `--until` stopped the run before `check_data`, there is no
    MLflow run, and all steps that need MLflow are skipped.
    """
    record = RunRecord.read(context.run)
    _run_step_or_warn("write the Prometheus metrics", partial(write_metrics_file, config))
    if record is None or record.state == "Interrupted":
        return
    write_page_offline = partial(write_history_page, config)
    if record.state == "StoppedEarly" and not _has_mlflow_run(record):
        _run_step_or_warn("write the page of the last runs", write_page_offline)
        return
    has_mlflow = _run_step_or_warn(
        "log the stages to MLflow and remove files of old runs", partial(_connect_if_mlflow_exists, context.run)
    )
    write_page = partial(write_and_log_history_page, config, context) if has_mlflow else write_page_offline
    _run_step_or_warn("write the page of the last runs", write_page)
    if has_mlflow and _has_mlflow_run(record):
        log_end = partial(log_run_end, context, state=record.state, message=record.message)
        _run_step_or_warn("log the stages to MLflow", log_end)
    if has_mlflow is not None:  # None: MLflow does not answer
        _run_step_or_warn("remove files of old runs", partial(_remove_old_runs_and_versions, config, context.run))


def write_and_log_history_page(config: PipelineConfig, context: StageContext) -> None:
    """Write <workspace>/index.html with the champion of the registry, and log the page to the MLflow run of `context`, if any.

    If MLflow does not answer, the page shows the newest promoted version as champion, and is not logged.
    """
    record, call_mlflow = RunRecord.read(context.run), partial(call_or_warn, workspace=context.run.workspace)
    # A list, because None means that MLflow does not answer. The list is [None] if the model has no champion.
    champion_list = call_mlflow(
        lambda client: [champion_of(client, config.registry.model_name)],
        warning="could not read the champion for the page of the last runs; the page is not logged to MLflow",
    )
    if champion_list is None:
        write_history_page(config)
        return
    champion_version = None if champion_list[0] is None else str(champion_list[0].version)
    page_path = write_history_page(config, find_champion=lambda _: champion_version)
    if record is None or not _has_mlflow_run(record):
        return
    call_mlflow(
        lambda client: client.log_artifact(
            record.figures.mlflow_run_id or open_mlflow_run(client, context), str(page_path), "history"
        ),
        warning="could not log the page of the last runs to MLflow",
    )


def _run_step_or_warn(description: str, step: Callable[[], T]) -> T | None:
    try:
        return step()
    except Exception as error:  # any error of a library
        LOG.warning("could not %s (%s: %s); the run is not affected", description, type(error).__name__, error)
        return None


def _connect_if_mlflow_exists(run: Run) -> bool:
    """Send a test request to MLflow. Return False if no server is set and the workspace has no database.

    Raises TrackingServerError if MLflow does not answer within MLFLOW_TIMEOUT_S.
    """
    if not mlflow_exists(run.workspace):
        return False
    connect(run.workspace, timeout_s=MLFLOW_TIMEOUT_S)
    return True


def _has_mlflow_run(record: RunRecord) -> bool:
    """Return whether a run has an MLflow run, which the stage `check_data` creates."""
    return DataReportManifest.stage in record.figures.stage_seconds


def _remove_old_runs_and_versions(config: PipelineConfig, run: Run) -> None:
    """Remove the model versions that retention does not keep, and files of old runs."""
    removals = clean(run.workspace, config.retention, model_name=config.registry.model_name)
    if removals.run_removals or removals.versions:
        LOG.info(
            "removed files of %d old runs and %d old model versions: %s",
            len(removals.run_removals),
            len(removals.versions),
            format_gib(removals.freed_bytes, digits=3),
        )
