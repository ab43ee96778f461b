"""Steps that need MLflow, after a run or after a change of the champion. The import of MLflow takes two seconds."""

import logging
from functools import partial

from flows.runs.history_page import write_history_page
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


def connect_if_mlflow_exists(run: Run) -> bool:
    """Return True after a test request to MLflow; False if no server is set and the workspace has no database.

    Raises TrackingServerError if MLflow does not answer within MLFLOW_TIMEOUT_S.
    """
    if not mlflow_exists(run.workspace):
        return False
    connect(run.workspace, timeout_s=MLFLOW_TIMEOUT_S)
    return True


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
    if record is None or not has_mlflow_run(record):
        return
    call_mlflow(
        lambda client: client.log_artifact(
            record.figures.mlflow_run_id or open_mlflow_run(client, context), str(page_path), "history"
        ),
        warning="could not log the page of the last runs to MLflow",
    )


def has_mlflow_run(record: RunRecord) -> bool:
    """Return whether a run has an MLflow run, which the stage `check_data` creates."""
    return DataReportManifest.stage in record.figures.stage_seconds


def log_end(context: StageContext, record: RunRecord) -> None:
    """Log to MLflow how the run ended, if it has an MLflow run."""
    if has_mlflow_run(record):
        log_run_end(context, state=record.state, message=record.message)


def remove_old_runs_and_versions(config: PipelineConfig, run: Run) -> None:
    """Remove model versions and files of runs that retention does not keep."""
    removals = clean(run.workspace, config.retention, model_name=config.registry.model_name)
    if removals.run_removals or removals.versions:
        LOG.info(
            "removed files of %d old runs and %d old model versions: %s",
            len(removals.run_removals),
            len(removals.versions),
            format_gib(removals.freed_bytes, digits=3),
        )
