"""Housekeeping at the end of each run, also of a failed one. None of it can fail the run."""

import logging
from collections.abc import Callable

from flows.config import PipelineConfig
from flows.history_page import write_history_page
from flows.metrics_file import write_metrics_file
from recsys_core.units import format_gib
from tasks.run import Run
from tasks.run_record import RunRecord

LOG = logging.getLogger("nightjar")


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


def _log_to_mlflow(config: PipelineConfig, run: Run) -> None:
    """Log the end of a run that MLflow knows: `check_data` is the first stage that logs to MLflow."""
    record = RunRecord.read(run)
    if record is not None and run.stage_folder("check_data").is_dir():
        from tasks.registry.stage_runs import log_end

        log_end(run, state=record.state, message=record.message)


_CHORES: tuple[tuple[str, Callable[[PipelineConfig, Run], None]], ...] = (
    ("write the Prometheus metrics", write_metrics_file),
    ("write the page of the last runs", write_history_page),
    ("log the stages to MLflow", _log_to_mlflow),
    ("remove files of old runs", _clean),
)
"""Work after each run, in order: its name for a warning, and its function."""


def after_run(config: PipelineConfig, run: Run) -> None:
    """Do the work that follows each run; log a warning where it fails.

    After an interruption only the metrics are written, because the process must end at once. The next run makes up for it.
    """
    record = RunRecord.read(run)
    is_interrupted = record is None or record.state == "Interrupted"
    for name, chore in _CHORES[:1] if is_interrupted else _CHORES:
        try:
            chore(config, run)
        except Exception as error:  # any error of a library
            LOG.warning("could not %s (%s: %s); the run is not affected", name, type(error).__name__, error)
