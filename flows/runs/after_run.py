"""Housekeeping at the end of each run, including failed runs. An error in the housekeeping does not fail the run."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from flows import runs
from flows.runs.history_page import write_history_page
from flows.runs.metrics_file import write_metrics_file
from flows.settings.pipeline import PipelineConfig
from recsys_core.manifests import DataReportManifest
from tasks.runs.context import StageContext
from tasks.runs.run_record import RunRecord

LOG = logging.getLogger("nightjar")
T = TypeVar("T")


def after_run(config: PipelineConfig, context: StageContext) -> None:
    """Write the metrics and the page of the last runs, log the stages to MLflow, and remove files of old runs.

    A step that fails logs a warning. After an interruption, only the metrics are written, because the process must end soon.
    The next run then writes the page and removes the files. If `--until` stopped the run before `check_data`, there is no
    MLflow run, and all steps that need MLflow are skipped, because the import of MLflow takes two seconds.
    """
    record = RunRecord.read(context.run)
    _call_or_warn("write the Prometheus metrics", partial(write_metrics_file, config))
    if record is None or record.state == "Interrupted":
        return
    write_page_offline = partial(write_history_page, config)
    if record.state == "StoppedEarly" and DataReportManifest.stage not in record.figures.stage_seconds:
        _call_or_warn("write the page of the last runs", write_page_offline)
        return
    mlflow_steps = runs.mlflow_steps
    has_mlflow = _call_or_warn(
        "log the stages to MLflow and remove files of old runs", partial(mlflow_steps.connect_if_mlflow_exists, context.run)
    )
    write_page = partial(mlflow_steps.write_and_log_history_page, config, context) if has_mlflow else write_page_offline
    _call_or_warn("write the page of the last runs", write_page)
    if has_mlflow:
        _call_or_warn("log the stages to MLflow", partial(mlflow_steps.log_end, context, record))
    if has_mlflow is not None:  # None: MLflow does not answer
        _call_or_warn("remove files of old runs", partial(mlflow_steps.remove_old_runs_and_versions, config, context.run))


def _call_or_warn(description: str, step: Callable[[], T]) -> T | None:
    try:
        return step()
    except Exception as error:  # any error of a library
        LOG.warning("could not %s (%s: %s); the run is not affected", description, type(error).__name__, error)
        return None
