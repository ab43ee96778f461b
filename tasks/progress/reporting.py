"""Log records of a run: one line per stage, and progress for the terminal."""

import logging
import time
from collections.abc import Mapping
from typing import TypeVar

from recsys_core.manifests import MANIFEST_NAME, Manifest, TrainManifest
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job import Progress

ResultT = TypeVar("ResultT", bound=Manifest | None)
LOG = logging.getLogger("nightjar")
LOG.setLevel(logging.INFO)
logging.getLogger("recsys_core").setLevel(logging.INFO)
PROGRESS_LOG = logging.getLogger("nightjar.steps")
"""Logger of the progress. Its DEBUG records have the attribute `stage`. For a progress bar, they also have `done`,
`total` and `note`.
"""


class StageLog:
    """Log of a running stage, or of a step after the stages. The constructor logs the start."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        PROGRESS_LOG.debug("%s begins", stage, extra={"stage": stage})
        self._start_counter_s, self._start_timestamp_s = time.perf_counter(), time.time()

    def finish(self, manifest: ResultT, summary: str) -> ResultT:
        """Log the end of the stage in one line, and return `manifest`, which is None if the stage has no result.

        The line has the name of the stage, `summary`, and the seconds. Instead of the seconds, the line has "(kept)" if an
        earlier process completed the stage, and "(skipped)" if the stage has no result.
        """
        if manifest is None:
            duration_or_status = "(skipped)"
        # An earlier process completed the stage.
        elif (manifest.folder / MANIFEST_NAME).stat().st_mtime < self._start_timestamp_s:
            duration_or_status = "(kept)"
        else:
            duration_or_status = self._duration
        self._log(summary, duration_or_status)
        return manifest

    def finish_step(self, summary: str) -> None:
        """Log the end of a step without a manifest."""
        self._log(summary, self._duration)

    @property
    def _duration(self) -> str:
        return f"{time.perf_counter() - self._start_counter_s:,.1f} s"

    def _log(self, summary: str, duration_or_status: str) -> None:
        stage_line = (self.stage, summary, duration_or_status)
        LOG.info("%-20s %-70s %s", *stage_line, extra={"stage_line": stage_line})


def show_bar(stage: str, *, num_done: int, num_total: int, note: str) -> None:
    """Update the progress bar of the running stage."""
    PROGRESS_LOG.debug("%s: %s", stage, note, extra={"stage": stage, "done": num_done, "total": num_total, "note": note})


def training_note(progress: Progress, *, validation: Mapping[str, float]) -> str:
    """Return epoch, loss and the first of the `validation` metrics in one line of at most 45 characters."""
    metric_text = "".join(f"  {name} {value:.4f}" for name, value in list(validation.items())[:1])
    return f"epoch {progress.epoch}  loss {progress.loss:.4f}{metric_text}"


def training_summary(train: TrainManifest, *, config: TrainingConfig) -> str:
    """Return steps, loss and throughput of a finished training, whether it stopped early, and its best epoch."""
    summary = f"{train.num_steps:,} steps, loss {train.final_loss:.4f}, {train.samples_per_s:,.0f} samples/s"
    if train.temperature_trials:
        summary += f", temperature {train.temperature:g} of {', '.join(train.temperature_trials)}"
    if train.num_epochs < config.epochs:
        summary += f", stopped early after epoch {train.num_epochs} of {config.epochs}"
    if train.best_epoch is not None and config.validation is not None:
        metric_name = f"{config.validation.metric}@{config.validation.k}"
        summary += f", best epoch {train.best_epoch}: validation {metric_name} {train.validation[metric_name]:.4f}"
    return summary
