"""Log records of a run: one line per stage, and progress for the terminal."""

import logging
import time
from collections.abc import Callable, Mapping

from recsys_core.manifests import MANIFEST_NAME, Manifest, TrainManifest
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job_spec import Progress

LOG = logging.getLogger("nightjar")
LOG.setLevel(logging.INFO)
logging.getLogger("recsys_core").setLevel(logging.INFO)
PROGRESS_LOG = logging.getLogger("nightjar.steps")
"""Progress of the run as DEBUG records: `stage`, and for a progress bar `done`, `total` and `note`."""


def begin_stage(stage: str) -> Callable[[Manifest | None, str], None]:
    """Report the start of `stage`. Return a function that logs the end of the stage in one line.

    The line has the name of the stage, the facts passed to the function, and the seconds. A stage that an earlier start of the
    run completed has "(kept)" instead of the seconds, and a stage without a result has "(skipped)".
    """
    PROGRESS_LOG.debug("%s begins", stage, extra={"stage": stage})
    start_s, start_timestamp = time.perf_counter(), time.time()

    def finish(manifest: Manifest | None, facts: str) -> None:
        # An earlier process wrote the manifest of a kept stage.
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
