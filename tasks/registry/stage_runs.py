"""Nested MLflow runs of the stages of a run: times, sizes and facts from the manifests, logged once after the run."""

import math

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus, RunTag, ViewType
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME, MLFLOW_RUN_NOTE

from recsys_core.manifests import MANIFEST_NAME, Manifest
from tasks.registry.mlflow_client import call_or_warn
from tasks.registry.tracking import open_run
from tasks.runs.context import StageContext
from tasks.runs.results import Results
from tasks.runs.run import Run

STAGE_TAG = "nightjar.stage"
FINGERPRINT_TAG = "nightjar.fingerprint"
STATE_TAG = "nightjar.state"
"""State in which the run ended, such as NotPromoted."""
_FAILED_STATES = ("Failed", "DataRejected")
_MAX_TEXT_LENGTH = 500


def log_run_end(context: StageContext, *, state: str, message: str) -> None:
    """Log how a run ended, and a nested MLflow run for each complete stage that is not logged yet.

    The state becomes a tag. State, message and a link to Prefect become the description. If MLflow does not work, log a
    warning.
    """
    link_text = "" if context.flow_run_url is None else f"\n\n[Flow run in Prefect]({context.flow_run_url})"

    def log(client: MlflowClient) -> None:
        parent_run_id = open_run(client, context)
        _log_stages(client, parent_run_id, context.run)
        description = f"**{state}**: {message}{link_text}"
        client.log_batch(parent_run_id, tags=[RunTag(STATE_TAG, state), RunTag(MLFLOW_RUN_NOTE, description)])
        status = RunStatus.FAILED if state in _FAILED_STATES else RunStatus.FINISHED
        client.set_terminated(parent_run_id, RunStatus.to_string(status))

    call_or_warn(log, workspace=context.run.workspace, warning="could not log the stages to MLflow; the run is not affected")


def _log_stages(client: MlflowClient, parent_run_id: str, run: Run) -> None:
    experiment_id = client.get_run(parent_run_id).info.experiment_id
    filter_string = f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent_run_id}'"
    nested_runs = client.search_runs([experiment_id], filter_string, ViewType.ACTIVE_ONLY)
    logged_fingerprints = {nested_run.data.tags.get(FINGERPRINT_TAG) for nested_run in nested_runs}
    for manifest in Results.read(run):
        if manifest.fingerprint not in logged_fingerprints:
            _log_stage(client, manifest, parent_run_id=parent_run_id, experiment_id=experiment_id)


def _log_stage(client: MlflowClient, manifest: Manifest, *, parent_run_id: str, experiment_id: str) -> None:
    end_ms = int((manifest.folder / MANIFEST_NAME).stat().st_mtime * 1000)
    tags = {
        MLFLOW_PARENT_RUN_ID: parent_run_id,
        MLFLOW_RUN_NAME: manifest.stage,
        STAGE_TAG: manifest.stage,
        FINGERPRINT_TAG: manifest.fingerprint,
    }
    nested_run = client.create_run(experiment_id, start_time=end_ms - int(manifest.seconds * 1000), tags=tags)
    numbers, texts = numbers_and_texts(manifest)
    client.log_batch(
        nested_run.info.run_id,
        metrics=[Metric(name, value, end_ms, 0) for name, value in numbers.items()],
        params=[Param(name, text) for name, text in texts.items()],
    )
    client.set_terminated(nested_run.info.run_id, end_time=end_ms)


def numbers_and_texts(manifest: Manifest) -> tuple[dict[str, float], dict[str, str]]:
    """Return the numbers and the texts of a manifest; the numbers include the size of the stage's files."""
    fields = manifest.model_dump(mode="json", exclude={"files", "fingerprint", "format_version"})
    numbers = {
        field_name: float(value)
        for field_name, value in fields.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    numbers["bytes_on_disk"] = float(sum(record.bytes for record in manifest.files.values()))
    texts = {field_name: str(value)[:_MAX_TEXT_LENGTH] for field_name, value in fields.items() if isinstance(value, str | bool)}
    return numbers, texts
