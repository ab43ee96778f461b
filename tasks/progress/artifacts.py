"""Artifacts of a run in the Prefect UI: pages, images, links, and the progress of the training.

The key of an artifact contains the name of the pipeline, so two pipelines on one server have separate histories. Outside a flow
run, nothing is sent. If an artifact cannot be sent within half a minute, a warning is logged, and the run continues.
"""

import base64
import hashlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast
from uuid import UUID

from prefect.artifacts import (
    create_image_artifact,
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from recsys_core.training.job import Progress
from tasks.progress.reporting import LOG, show_bar, training_note
from tasks.runs.context import StageContext

_MAX_RETRIES = 4
"""Largest number of retries of a request. The pauses before them are 2, 4, 8 and 16 s, in which a server can restart."""
_PROGRESS_INTERVAL_S = 5.0
_PROGRESS_PAUSE_S = 30.0
"""Pause after a failed update of the progress."""


def artifact_key(pipeline: str, artifact_name: str) -> str:
    """Return `<pipeline>-<artifact name>` in the characters that Prefect allows: lower-case letters, digits and dashes.

    If the name of the pipeline has other characters, the start of a hash is added, because two names may differ only in these
    characters.

    >>> artifact_key("films", "metrics")
    'films-metrics'
    >>> artifact_key("Films (EU)", "metrics")
    'films-eu-f044-metrics'
    """
    slug = re.sub(r"[^a-z0-9]+", "-", pipeline.lower()).strip("-")
    hash_suffix = "" if slug == pipeline else hashlib.sha256(pipeline.encode()).hexdigest()[:4]
    return "-".join(key_part for key_part in (slug, hash_suffix, artifact_name) if key_part)


def show_markdown(context: StageContext, artifact_name: str, markdown: str) -> None:
    """Create a markdown artifact."""
    _send(context, artifact_name, lambda key: create_markdown_artifact(markdown, key=key))


def show_image(context: StageContext, artifact_name: str, png_path: Path) -> None:
    """Create an image artifact. Prefect stores only an address, so the image is embedded in a data URL."""
    data_url = "data:image/png;base64," + base64.b64encode(png_path.read_bytes()).decode()
    _send(context, artifact_name, lambda key: create_image_artifact(data_url, key=key))


def link_mlflow_run(context: StageContext, address: str) -> None:
    """Create an artifact with a link to the MLflow run. If a browser cannot open the address, the artifact shows it as text."""
    if address.startswith(("http://", "https://")):
        _send(context, "mlflow-run", lambda key: create_link_artifact(address, link_text="MLflow run", key=key))
    else:
        show_markdown(context, "mlflow-run", f"MLflow run: `{address}`")


def _send(
    context: StageContext,
    artifact_name: str,
    create_artifact: Callable[[str], object],
    *,
    num_retries: int = _MAX_RETRIES,
    log_level: int = logging.WARNING,
) -> UUID | None:
    """Send an artifact with `create_artifact`. Return its id; None if the artifact was not sent.

    Args:
        create_artifact: function that takes the key, sends the artifact, and returns its id.
        log_level: level of the log record about an artifact that was not sent.
    """
    if context.flow_run_id is None:
        return None
    key = artifact_key(context.pipeline, artifact_name)
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: min(num_retries, PREFECT_CLIENT_MAX_RETRIES.value())}):
            return cast(UUID, create_artifact(key))
    except Exception as error:  # any error of the server or the network
        LOG.log(
            log_level, "could not send the artifact %s to Prefect (%s: %s); the run continues", key, type(error).__name__, error
        )
        return None


class TrainingProgress:
    """The progress of training, sent to the terminal immediately, and to a Prefect artifact every few seconds.

    The thread that supervises the training waits for each request, so a request is retried only once. After a failed update,
    the next update is sent after _PROGRESS_PAUSE_S. A second failure in a row causes no warning.
    """

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._artifact_id: UUID | None = None  # None before the first update
        self._next_update_s, self._has_last_update_failed = 0.0, False
        self._validation_metrics: Mapping[str, float] = {}

    def send(self, progress: Progress) -> None:
        """Send one line of metrics.jsonl."""
        self._validation_metrics = progress.validation or self._validation_metrics
        progress_text = training_note(progress, validation=self._validation_metrics)
        show_bar("train", num_done=progress.step, num_total=progress.total_steps, note=progress_text)
        if time.monotonic() >= self._next_update_s:
            description = f"{progress_text}  {progress.samples_per_s:,.0f} samples/s"
            was_sent = self._update(100 * progress.step / progress.total_steps, description, num_retries=1)
            self._next_update_s = time.monotonic() + (_PROGRESS_INTERVAL_S if was_sent else _PROGRESS_PAUSE_S)

    def finish(self, summary: str) -> str:
        """Set an existing artifact to 100 % and the text `summary`, also after early stopping. Return `summary`."""
        if self._artifact_id is not None:
            self._update(100.0, summary, num_retries=_MAX_RETRIES)
        return summary

    def _update(self, percent: float, description: str, *, num_retries: int) -> bool:
        """Create or update the artifact; return whether it was sent."""

        def create_or_update(key: str) -> UUID:
            if self._artifact_id is None:
                return cast(UUID, create_progress_artifact(percent, key=key, description=description))
            update_progress_artifact(self._artifact_id, percent, description=description)
            return self._artifact_id

        log_level = logging.DEBUG if self._has_last_update_failed else logging.WARNING
        sent_artifact_id = _send(
            self._context, "training-progress", create_or_update, num_retries=num_retries, log_level=log_level
        )
        self._artifact_id, self._has_last_update_failed = sent_artifact_id or self._artifact_id, sent_artifact_id is None
        return sent_artifact_id is not None
