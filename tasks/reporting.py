"""Reporting of a run: one log line per stage, progress records for the terminal, and artifacts in the Prefect UI."""

import base64
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast
from uuid import UUID

from prefect.artifacts import (
    create_image_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)

from recsys_core.manifests import MANIFEST_NAME, Manifest, TrainManifest
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job_spec import Progress

LOG = logging.getLogger("nightjar")
LOG.setLevel(logging.INFO)
logging.getLogger("recsys_core").setLevel(logging.INFO)
PROGRESS_LOG = logging.getLogger("nightjar.steps")
"""Progress of the run as DEBUG records: `stage`, and for a progress bar `done`, `total` and `note`."""

_PROGRESS_EVERY_S = 5.0


def begin_stage(stage: str) -> Callable[[Manifest | None, str], None]:
    """Report the start of `stage`. Return a function that logs the end of the stage in one line.

    The line has the stage's name, the facts passed to the function, and the seconds, "(kept)" or "(skipped)".
    """
    PROGRESS_LOG.debug("%s begins", stage, extra={"stage": stage})
    start_s, start_timestamp = time.perf_counter(), time.time()

    def finish(manifest: Manifest | None, facts: str) -> None:
        # The manifest of a reused stage was written by an earlier process.
        if manifest is None:
            duration = "(skipped)"
        elif (manifest.folder / MANIFEST_NAME).stat().st_mtime < start_timestamp:
            duration = "(kept)"
        else:
            duration = f"{time.perf_counter() - start_s:,.1f} s"
        LOG.info("%-20s %-70s %s", stage, facts, duration, extra={"stage_line": (stage, facts, duration)})

    return finish


def show_bar(stage: str, *, done: int, total: int, note: str) -> None:
    """Update the progress bar of the running stage."""
    PROGRESS_LOG.debug("%s: %s", stage, note, extra={"stage": stage, "done": done, "total": total, "note": note})


def training_note(progress: Progress, *, validation: Mapping[str, float]) -> str:
    """Return epoch, loss and the first of the `validation` metrics in one line of at most 45 characters."""
    metric = "".join(f"  {name} {value:.4f}" for name, value in list(validation.items())[:1])
    return f"epoch {progress.epoch}  loss {progress.loss:.4f}{metric}"


def training_facts(train: TrainManifest, *, config: TrainingConfig) -> str:
    """Return steps, loss and throughput of a finished training, whether it stopped early, and its best epoch."""
    facts = f"{train.steps:,} steps, loss {train.final_loss:.4f}, {train.samples_per_s:,.0f} samples/s"
    if train.epochs < config.epochs:
        facts += f", stopped early after epoch {train.epochs} of {config.epochs}"
    if train.best_epoch is not None and config.validation is not None:
        name = f"{config.validation.metric}@{config.validation.k}"
        facts += f", best epoch {train.best_epoch}: validation {name} {train.validation[name]:.4f}"
    return facts


class TrainingProgress:
    """The progress of training: sent to the terminal at once, and to a Prefect artifact every few seconds.

    Each update of the artifact is a request. The first failed request ends the updates; training continues.
    """

    def __init__(self) -> None:
        self._artifact_id: UUID | None = None  # None while nothing has been sent, e.g. for a training that is reused
        self._sent_at, self._reachable = -_PROGRESS_EVERY_S, True
        self._validation: Mapping[str, float] = {}

    def send(self, progress: Progress) -> None:
        """Send one line of metrics.jsonl."""
        self._validation = progress.validation or self._validation
        note = training_note(progress, validation=self._validation)
        show_bar("train", done=progress.step, total=progress.total_steps, note=note)
        if time.monotonic() - self._sent_at >= _PROGRESS_EVERY_S:
            self._update(100 * progress.step / progress.total_steps, f"{note}  {progress.samples_per_s:,.0f} samples/s")

    def finish(self, facts: str) -> str:
        """Set the artifact, if there is one, to 100 %, also after early stopping. Return `facts`."""
        if self._artifact_id is not None:
            self._update(100.0, facts)
        return facts

    def _update(self, percent: float, description: str) -> None:
        if not self._reachable:
            return
        self._sent_at = time.monotonic()
        try:
            if self._artifact_id is None:
                self._artifact_id = cast(
                    UUID, create_progress_artifact(percent, key="training-progress", description=description)
                )
            else:
                update_progress_artifact(self._artifact_id, percent, description=description)
        except Exception as error:  # any error of the server or the network
            self._reachable = False
            LOG.warning("Could not update the progress artifact (%s: %s); training continues", type(error).__name__, error)


def show_markdown(key: str, markdown: str) -> None:
    """Create a markdown artifact. A key of lower-case letters and dashes keeps the history over runs in the UI."""
    create_markdown_artifact(markdown, key=key)


def show_image(key: str, png: Path) -> None:
    """Create an image artifact. Prefect stores only an address, so the image is embedded in a data URL."""
    create_image_artifact("data:image/png;base64," + base64.b64encode(png.read_bytes()).decode(), key=key)
