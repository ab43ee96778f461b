"""MLflow tracking: one MLflow run per nightjar run, reused on resume, with its params, metrics and artifacts."""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Metric, Param, RunStatus, RunTag, ViewType
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME, MLFLOW_RUN_NOTE
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH
from ruamel.yaml import YAML

from recsys_core.errors import InputError, redacted
from recsys_core.evaluation.report import plot_recall
from recsys_core.manifests import (
    DataReportManifest,
    EvaluationManifest,
    ExportManifest,
    IndexManifest,
    PlanManifest,
    TrainManifest,
    fingerprint_of,
)
from tasks.registry.mlflow_client import (
    RUN_ID_TAG,
    RUN_REASON_TAG,
    SQLITE_PREFIX,
    call_or_warn,
    mlflow_exists,
    tracking_uri,
)
from tasks.runs.context import Results, StageContext

UI_URL_VARIABLE = "NIGHTJAR_MLFLOW_UI_URL"
"""Environment variable with the address of the MLflow UI, if the run logs to a database instead of a server."""
PIPELINE_TAG = "nightjar.pipeline"
FLOW_RUN_TAG = "nightjar.prefect_flow_run"
"""Id of the Prefect flow run that started or last resumed the run."""
FLOW_RUN_URL_TAG = "nightjar.prefect_url"
"""Address of the last flow run in the Prefect UI. A flow run without a UI does not change it."""
STATE_TAG = "nightjar.state"
"""State in which the run ended, such as NotPromoted."""
_FAILED_STATES = ("Failed", "DataRejected")
_METRICS_PER_CALL = 900
_PARAMS_PER_CALL = 100
_MAX_SOURCE_PATHS = 100
"""Largest number of input paths that are logged for an MLflow dataset; data_fingerprints.json has all paths."""


def open_mlflow_run(client: MlflowClient, context: StageContext) -> str:
    """Return the id of the run's MLflow run; create the MLflow run and its experiment if they do not exist.

    An existing MLflow run gets the current tags, because a resume has another Prefect flow run.
    """
    value_by_tag = {
        RUN_ID_TAG: context.run.run_id,
        MLFLOW_RUN_NAME: context.run.run_id,
        PIPELINE_TAG: context.pipeline,
        RUN_REASON_TAG: context.options.reason,
        FLOW_RUN_TAG: context.flow_run_id,
        FLOW_RUN_URL_TAG: context.flow_run_url,
    }
    tags = {tag_name: tag_value for tag_name, tag_value in value_by_tag.items() if tag_value}
    with FileLock(context.run.workspace / ".mlflow.lock"):
        experiment = client.get_experiment_by_name(context.experiment)
        if experiment is None:
            # A server chooses the artifact location. A database would store a path relative to the current folder by default,
            # and the location of an existing experiment cannot change.
            has_server = tracking_uri(context.run.workspace).startswith(("http://", "https://"))
            artifact_location = None if has_server else (context.run.workspace.absolute() / "mlartifacts").as_uri()
            experiment_id = client.create_experiment(context.experiment, artifact_location=artifact_location)
        else:
            experiment_id = experiment.experiment_id
        filter_string = f"tags.`{RUN_ID_TAG}` = '{context.run.run_id}'"
        existing_runs = client.search_runs([experiment_id], filter_string, ViewType.ACTIVE_ONLY, max_results=1)
        if existing_runs:
            (mlflow_run,) = existing_runs
            for tag_name, tag_value in tags.items():
                if mlflow_run.data.tags.get(tag_name) != tag_value:
                    client.set_tag(mlflow_run.info.run_id, tag_name, tag_value)
            return str(mlflow_run.info.run_id)
        return str(client.create_run(experiment_id, tags=tags).info.run_id)


def require_own_experiment(context: StageContext) -> None:
    """Raise InputError if the files of the run's experiment are in another workspace, so that new versions would not load.

    This happens to a workspace that was moved or copied, because MLflow stores absolute paths in the workspace's database.
    """
    workspace = context.run.workspace.absolute()
    if tracking_uri(workspace) != f"{SQLITE_PREFIX}{workspace}/mlflow.db" or not mlflow_exists(workspace):
        return
    experiment = call_or_warn(
        lambda client: client.get_experiment_by_name(context.experiment),
        workspace=workspace,
        warning=f"could not read the experiment {context.experiment} from MLflow before the run",
    )
    artifact_folder = Path(url2pathname(urlsplit("" if experiment is None else experiment.artifact_location).path))
    if experiment is not None and not artifact_folder.resolve().is_relative_to((workspace / "mlartifacts").resolve()):
        raise InputError(
            f"{workspace / 'mlflow.db'}: the files of the experiment {context.experiment!r} are in {artifact_folder}, which is "
            f"not below {workspace / 'mlartifacts'}, because the workspace was moved or copied; its versions do not load. Set "
            "workspace to a new folder, or move the workspace back"
        )


def run_address(client: MlflowClient, mlflow_run_id: str) -> str:
    """Return the address of an MLflow run in the UI of an MLflow server; without a server, the database and the run id.

    The UI is at NIGHTJAR_MLFLOW_UI_URL, by default at the address of the server that the run logs to.
    """
    uri = os.environ.get(UI_URL_VARIABLE) or client.tracking_uri
    if not uri.startswith(("http://", "https://")):
        return f"{redacted(uri)}, run {mlflow_run_id}"
    experiment_id = client.get_run(mlflow_run_id).info.experiment_id
    return f"{server_address(uri)}/#/experiments/{experiment_id}/runs/{mlflow_run_id}"


def server_address(uri: str) -> str:
    """Return `uri` without user name, password and final slash."""
    url_parts = urlsplit(uri)
    return url_parts._replace(netloc=url_parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def log_params(client: MlflowClient, mlflow_run_id: str, *, config_file: Path) -> None:
    """Log the settings in `config_file` under dotted names.

    MLflow cannot change the value of a param, so settings that differ in a resumed run are logged as a tag. A value that is too
    long for MLflow, such as a list of many paths, is cut off.
    """
    settings = flatten_settings(YAML(typ="safe", pure=True).load(config_file))
    value_by_name = {name: value[:MAX_PARAM_VAL_LENGTH] for name, value in settings.items()}
    logged_params = client.get_run(mlflow_run_id).data.params
    new_params = [Param(name, value) for name, value in value_by_name.items() if name not in logged_params]
    for start_index in range(0, len(new_params), _PARAMS_PER_CALL):
        client.log_batch(mlflow_run_id, params=new_params[start_index : start_index + _PARAMS_PER_CALL])
    changed_values = {name: value for name, value in value_by_name.items() if logged_params.get(name, value) != value}
    if changed_values:
        client.set_tag(mlflow_run_id, "nightjar.changed_on_resume", json.dumps(changed_values))


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Convert nested settings to strings under dotted names.

    >>> flatten_settings({"model": {"layers": [64, 32]}, "name": "nightly"})
    {'model.layers': '[64, 32]', 'name': 'nightly'}
    """
    value_by_name: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            value_by_name |= flatten_settings(value, f"{prefix}{name}.")
        else:
            value_by_name[prefix + name] = str(value)
    return value_by_name


def log_metrics(client: MlflowClient, mlflow_run_id: str, metrics: Sequence[Metric]) -> None:
    """Log `metrics` in as few calls as MLflow allows."""
    for start_index in range(0, len(metrics), _METRICS_PER_CALL):
        client.log_batch(mlflow_run_id, metrics=metrics[start_index : start_index + _METRICS_PER_CALL])


def as_metrics(value_by_name: Mapping[str, float], *, model_id: str | None = None) -> list[Metric]:
    """Convert values by name to MLflow metrics, which also belong to the logged model `model_id` if it is given.

    "@" is not allowed in a name and becomes "_at_". NaN values are left out.
    """
    now_ms = int(time.time() * 1000)
    return [
        Metric(name.replace("@", "_at_"), value, now_ms, 0, model_id=model_id)
        for name, value in value_by_name.items()
        if not math.isnan(value)
    ]


def log_results(client: MlflowClient, mlflow_run_id: str, context: StageContext, *, model_id: str | None) -> None:
    """Log all metrics, the config, the sharding plan and the plots of a finished run.

    loss.png and indexes.png were written by the stages `train` and `build_index`.

    Args:
        model_id: logged model of the run, to which the metrics belong too; None if the run logs no model.
    """
    run, results = context.run, context.results
    train_manifest, evaluation_manifest, index_manifest = (
        results[TrainManifest],
        results[EvaluationManifest],
        results[IndexManifest],
    )
    recall_by_metric = {f"index/{index_name}/recall": report.recall for index_name, report in index_manifest.reports.items()}
    value_by_metric = {**evaluation_manifest.metrics, **recall_by_metric, "train/final_loss": train_manifest.final_loss}
    if train_manifest.best_epoch is not None:
        value_by_metric["train/best_epoch"] = train_manifest.best_epoch
    if train_manifest.temperature is not None:
        value_by_metric["train/temperature"] = train_manifest.temperature
    value_by_metric |= {f"train/temperature_trials/{name}": value for name, value in train_manifest.temperature_trials.items()}
    value_by_metric |= {
        f"export/{term.replace(' ', '_')}_weight": weight for term, weight in results[ExportManifest].weight_by_term.items()
    }
    log_metrics(client, mlflow_run_id, as_metrics(value_by_metric, model_id=model_id))
    plot_paths = (
        run.folder / "loss.png",
        plot_recall(evaluation_manifest.metrics, path=run.folder / "recall.png"),
        run.folder / "indexes.png",
    )
    for path in (run.config_file, results[PlanManifest].path("plan.json"), *plot_paths):
        client.log_artifact(mlflow_run_id, str(path))


def log_input_files(client: MlflowClient, mlflow_run_id: str, context: StageContext) -> None:
    """Log the input files as MLflow datasets and in data_fingerprints.json; log the data report if it is not logged yet."""
    dataset = context.dataset
    if "data/breaches" not in client.get_run(mlflow_run_id).data.metrics:  # log_data_report_or_warn failed
        log_data_report(client, mlflow_run_id, context.results[DataReportManifest])
    sources_by_dataset_name = {
        manifest.stage.removeprefix("ingest_"): manifest.sources
        for manifest in (dataset.embeddings, dataset.interactions)
        if manifest is not None
    }
    records_by_dataset_name = {
        dataset_name: [source.model_dump() for source in sources] for dataset_name, sources in sources_by_dataset_name.items()
    }
    client.log_dict(mlflow_run_id, records_by_dataset_name, "data_fingerprints.json")
    mlflow_datasets = [
        # MLflow allows 36 characters in a digest.
        Dataset(
            dataset_name,
            fingerprint_of(records_by_dataset_name[dataset_name])[:36],
            "local",
            json.dumps([source.path for source in sources[:_MAX_SOURCE_PATHS]]),
        )
        for dataset_name, sources in sources_by_dataset_name.items()
    ]
    client.log_inputs(mlflow_run_id, [DatasetInput(mlflow_dataset) for mlflow_dataset in mlflow_datasets])


def log_data_report(client: MlflowClient, mlflow_run_id: str, data_report: DataReportManifest) -> None:
    """Log report.html, and the metrics of the data report under the names data/<name>."""
    value_by_metric = {f"data/{name}": value for name, value in data_report.metrics.items()}
    log_metrics(client, mlflow_run_id, as_metrics({**value_by_metric, "data/breaches": float(len(data_report.breaches))}))
    client.log_artifact(mlflow_run_id, str(data_report.path("report.html")), "data_report")


def log_data_report_or_warn(context: StageContext, data_report: DataReportManifest) -> str | None:
    """Log the data report; return the address of the MLflow run.

    If MLflow does not work, log a warning and return None; the report is then logged at registration.
    """

    def log(client: MlflowClient) -> str:
        mlflow_run_id = open_mlflow_run(client, context)
        log_params(client, mlflow_run_id, config_file=context.run.config_file)
        log_data_report(client, mlflow_run_id, data_report)
        client.set_terminated(
            mlflow_run_id, RunStatus.to_string(RunStatus.FAILED if data_report.breaches else RunStatus.FINISHED)
        )
        return run_address(client, mlflow_run_id)

    warning = "could not log the data report to MLflow; it will be logged at registration"
    return call_or_warn(log, workspace=context.run.workspace, warning=warning)


def log_run_end(context: StageContext, *, state: str, message: str) -> None:
    """Log how a run ended, and the metrics stage/<stage>/seconds and stage/<stage>/bytes of each complete stage.

    The state becomes a tag. State, message and a link to Prefect become the description. If MLflow does not work, log a
    warning.
    """
    link_text = "" if context.flow_run_url is None else f"\n\n[Flow run in Prefect]({context.flow_run_url})"
    value_by_metric: dict[str, float] = {}
    for manifest in Results.read(context.run):
        value_by_metric[f"stage/{manifest.stage}/seconds"] = manifest.seconds
        value_by_metric[f"stage/{manifest.stage}/bytes"] = float(sum(record.size_bytes for record in manifest.files.values()))

    def log(client: MlflowClient) -> None:
        mlflow_run_id = open_mlflow_run(client, context)
        log_metrics(client, mlflow_run_id, as_metrics(value_by_metric))
        description = f"**{state}**: {message}{link_text}"
        client.log_batch(mlflow_run_id, tags=[RunTag(STATE_TAG, state), RunTag(MLFLOW_RUN_NOTE, description)])
        status = RunStatus.FAILED if state in _FAILED_STATES else RunStatus.FINISHED
        client.set_terminated(mlflow_run_id, RunStatus.to_string(status))

    warning = "could not log the end of the run to MLflow; the run is not affected"
    call_or_warn(log, workspace=context.run.workspace, warning=warning)
