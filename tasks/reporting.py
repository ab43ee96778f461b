"""What a person sees of a run: a line per stage in the log, and artifacts in the Prefect UI."""

import base64
import logging
import time
from collections.abc import Callable
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
STEPS = logging.getLogger("nightjar.steps")
"""Where a run is, for a terminal that draws it: DEBUG records with `stage`, and with `done`, `total`, `note` for a bar."""

_PROGRESS_EVERY_S = 5.0


def begin(stage: str) -> Callable[[Manifest, str], None]:
    """Announces `stage`; the returned function logs its one line: name, facts, seconds or "(kept)"."""
    STEPS.debug("%s begins", stage, extra={"stage": stage})
    started, started_at = time.perf_counter(), time.time()

    def finish(manifest: Manifest, facts: str) -> None:
        # A stage that was reused carries the manifest of an earlier process.
        kept = (manifest.folder / MANIFEST_NAME).stat().st_mtime < started_at
        took = "(kept)" if kept else f"{time.perf_counter() - started:,.1f} s"
        LOG.info("%-20s %-70s %s", stage, facts, took, extra={"stage_line": (stage, facts, took)})

    return finish


def show_bar(stage: str, *, done: int, total: int, note: str) -> None:
    """Draws the progress of the running stage in the terminal."""
    STEPS.debug("%s: %s", stage, note, extra={"stage": stage, "done": done, "total": total, "note": note})


def training_note(progress: Progress) -> str:
    """The state of training in a few words."""
    return f"epoch {progress.epoch}  loss {progress.loss:.4f}  {progress.samples_per_s:,.0f} samples/s"


def training_facts(train: TrainManifest, *, config: TrainingConfig) -> str:
    """Steps, loss and speed of a finished training, whether it stopped early, and the best epoch with its metric."""
    facts = f"{train.steps:,} steps, loss {train.final_loss:.4f}, {train.samples_per_s:,.0f} samples/s"
    if train.epochs < config.epochs:
        facts += f", stopped early after epoch {train.epochs} of {config.epochs}"
    if train.best_epoch is not None and config.validation is not None:
        name = f"{config.validation.metric}@{config.validation.k}"
        facts += f", best epoch {train.best_epoch}: validation {name} {train.validation[name]:.4f}"
    return facts


class TrainingProgress:
    """Training's progress, to the terminal at once and to a Prefect artifact every few seconds: each update is a request.

    An update that the Prefect server does not take ends the updates, not the training.
    """

    def __init__(self) -> None:
        self._artifact_id: UUID | None = None  # none for a training that is kept
        self._sent_at, self._reachable = -_PROGRESS_EVERY_S, True

    def send(self, progress: Progress) -> None:
        """Takes one line of metrics.jsonl."""
        show_bar("train", done=progress.step, total=progress.total_steps, note=training_note(progress))
        if time.monotonic() - self._sent_at >= _PROGRESS_EVERY_S:
            self._update(100 * progress.step / progress.total_steps, training_note(progress))

    def finish(self, facts: str) -> str:
        """Set the artifact to 100 %, also where training stopped early; a training that is kept has none. Return `facts`."""
        if self._artifact_id is not None:
            self._update(100.0, facts)
        return facts

    def _update(self, percent: float, words: str) -> None:
        if not self._reachable:
            return
        self._sent_at = time.monotonic()
        try:
            if self._artifact_id is None:
                self._artifact_id = cast(UUID, create_progress_artifact(percent, key="training-progress", description=words))
            else:
                update_progress_artifact(self._artifact_id, percent, description=words)
        except Exception as error:  # whatever the server or the network throws
            self._reachable = False
            LOG.warning("Prefect takes no progress (%s: %s); training goes on", type(error).__name__, error)


def show_markdown(key: str, markdown: str) -> None:
    """A markdown artifact; `key` in lower case and dashes, so that the UI keeps its history over nights."""
    create_markdown_artifact(markdown, key=key)


def show_image(key: str, png: Path) -> None:
    """A picture artifact. Prefect stores an address only, so the picture travels inside it."""
    create_image_artifact("data:image/png;base64," + base64.b64encode(png.read_bytes()).decode(), key=key)
