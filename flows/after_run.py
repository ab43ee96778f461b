"""Housekeeping at the end of each run, also of a failed one. None of it can fail the run."""

import logging
from collections.abc import Callable
from functools import partial

from flows.config import PipelineConfig
from flows.history_page import write_history_page
from flows.metrics_file import write_metrics_file
from recsys_core.units import format_gib
from tasks.run import Run
from tasks.run_record import RunRecord

LOG = logging.getLogger("nightjar")
MLFLOW_TIMEOUT_S = 10.0
"""Deadline of MLflow's first answer after a run. Without this answer, no later work waits for MLflow."""


def after_run(config: PipelineConfig, run: Run) -> None:
    """Do the work that follows each run; log a warning where it fails.

    After an interruption only the metrics are written, because the process must end at once. The next run makes up for it.
    """
    record = RunRecord.read(run)
    _try("write the Prometheus metrics", partial(write_metrics_file, config, run))
    if record is None or record.state == "Interrupted":
        return
    try:
        has_mlflow = _find_mlflow(run)
    except Exception as error:  # any error of a library
        LOG.warning("could not log the stages to MLflow and remove files of old runs; the run is not affected (%s)", error)
        _try("write the page of the last runs", partial(write_history_page, config, run, has_mlflow=False))
        return
    _try("write the page of the last runs", partial(write_history_page, config, run, has_mlflow=has_mlflow))
    if has_mlflow:
        _try("log the stages to MLflow", partial(_log_to_mlflow, run, record))
    _try("remove files of old runs", partial(_clean, config, run))


def _try(description: str, chore: Callable[[], None]) -> None:
    try:
        chore()
    except Exception as error:  # any error of a library
        LOG.warning("could not %s (%s: %s); the run is not affected", description, type(error).__name__, error)


def _find_mlflow(run: Run) -> bool:
    """Return whether there is an MLflow, which answers; False if there is neither a server nor a database in the workspace.

    Raises TrackingServerError if MLflow does not answer within MLFLOW_TIMEOUT_S.
    """
    from tasks.registry.mlflow_client import connect, is_created

    if not is_created(run.workspace):
        return False
    connect(run.workspace, timeout_s=MLFLOW_TIMEOUT_S)
    return True


def _log_to_mlflow(run: Run, record: RunRecord) -> None:
    """Log the end of a run that MLflow knows: `check_data` is the first stage that logs to MLflow."""
    if run.stage_folder("check_data").is_dir():
        from tasks.registry.stage_runs import log_end

        log_end(run, state=record.state, message=record.message)


def _clean(config: PipelineConfig, run: Run) -> None:
    from tasks.retention.clean import clean

    removals = clean(run.workspace, config.retention, model_name=config.registry.model_name)
    if removals.runs or removals.versions:
        LOG.info(
            "removed files of %d old runs and %d old model versions: %s",
            len(removals.runs),
            len(removals.versions),
            format_gib(removals.bytes, digits=3),
        )
