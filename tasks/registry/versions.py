"""Versions in MLflow's model registry: one per package and run, with signature, requirements and the model's own code."""

from importlib import metadata
from pathlib import Path

import mlflow
import pandas as pd
import pyarrow.parquet as pq
from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.models.model import ModelInfo
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import AnyType, Array

import recsys_core
from recsys_core.data_report.limits import describe_held_out_users
from recsys_core.dataset.layout import vocabulary_file
from recsys_core.evaluation.report import metric_table
from recsys_core.manifests import DataReportManifest, EvaluationManifest, InteractionsManifest, PackageManifest
from recsys_core.serving.package import description_sha256
from tasks.registry.config import RegistryConfig
from tasks.registry.loading import PACKAGE_SHA256_KEY, PACKAGE_SHA256_TAG, record_logged_model
from tasks.registry.mlflow_client import LOG, RUN_ID_TAG, SQLITE_PREFIX, tracking_uri
from tasks.registry.releases import delete_logged_model
from tasks.runs.context import StageContext
from tasks.runs.run import Run

PACKAGE_TAG = "nightjar.package"
_MODEL_CODE_FILE = Path(__file__).with_name("pyfunc_model.py")
_SERVING_LIBRARIES = ("mlflow", "numpy", "pandas", "pyarrow", "pydantic", "safetensors", "torch")


def get_or_create_version(
    package: PackageManifest,
    *,
    config: RegistryConfig,
    client: MlflowClient,
    mlflow_run_id: str,
    interactions: InteractionsManifest,
    run: Run,
    description: str,
) -> ModelVersion:
    """Return the registered version of `package`. Create it, unless this run created it before an interruption.

    description: text in Markdown, which MLflow shows on the page of the version.
    """
    model_name = config.model_name
    tags = {RUN_ID_TAG: run.run_id, PACKAGE_TAG: package.fingerprint, PACKAGE_SHA256_TAG: description_sha256(package)}
    # Two runs in one workspace may create the same model at the same time.
    with FileLock(run.workspace / ".mlflow.lock"):
        try:
            client.create_registered_model(model_name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
    versions = client.search_model_versions(f"name = '{model_name}'")
    for version in versions:
        if tags.items() <= version.tags.items():
            return version
    _delete_unregistered_models(client, mlflow_run_id, registered_uris={version.source for version in versions})
    mlflow.set_tracking_uri(tracking_uri(run.workspace))
    logged_model = _log_model(package, mlflow_run_id=mlflow_run_id, interactions=interactions)
    if client.tracking_uri.startswith(SQLITE_PREFIX):
        record_logged_model(logged_model.model_uri, client=client, workspace=run.workspace)
    return client.create_model_version(
        model_name,
        logged_model.model_uri,
        run_id=mlflow_run_id,
        tags=tags,
        model_id=logged_model.model_id,
        description=description,
    )


def version_description(context: StageContext, *, client: MlflowClient, mlflow_run_id: str) -> str:
    """Return the period and sizes of the data, the test metrics, and a link to the MLflow run, in Markdown."""
    interactions, results = context.dataset.interactions, context.results
    period = f" from {interactions.first_time} to {interactions.last_time}" if interactions.first_time else ""
    num_events = interactions.train_events + interactions.validation_events + interactions.test_events
    table = metric_table(results[EvaluationManifest].metrics)
    metrics_text = ", ".join(
        f"{name} {value:.4f}" for name, value in zip(table.columns, table.rows["model"], strict=True) if value is not None
    )
    experiment_id = client.get_run(mlflow_run_id).info.experiment_id
    return "\n\n".join(
        (
            f"Data: {num_events:,} events{period}, {interactions.num_users:,} users, {interactions.num_items:,} items, "
            f"{describe_held_out_users(results[DataReportManifest].metrics)}",
            f"Test metrics over the full catalogue: {metrics_text}",
            f"Run {context.run.run_id}: [MLflow run](#/experiments/{experiment_id}/runs/{mlflow_run_id})",
        )
    )


def _delete_unregistered_models(client: MlflowClient, mlflow_run_id: str, *, registered_uris: set[str | None]) -> None:
    """Delete the models that an interrupted attempt logged but did not register. An error is logged as a warning."""
    experiment_id = client.get_run(mlflow_run_id).info.experiment_id
    for model in client.search_logged_models([experiment_id], f"source_run_id = '{mlflow_run_id}'"):
        if model.model_uri not in registered_uris:
            try:
                delete_logged_model(client, model)
            except Exception as error:  # e.g. an artifact store that does not allow it
                LOG.warning("could not delete %s, which has no version (%s: %s)", model.model_uri, type(error).__name__, error)


def _log_model(package: PackageManifest, *, mlflow_run_id: str, interactions: InteractionsManifest) -> ModelInfo:
    with mlflow.start_run(run_id=mlflow_run_id):
        return mlflow.pyfunc.log_model(
            name="retriever",
            python_model=str(_MODEL_CODE_FILE),
            code_paths=[str(Path(recsys_core.__file__).parent)],
            artifacts={"package": str(package.folder / "package")},
            model_config={PACKAGE_SHA256_KEY: description_sha256(package)},
            pip_requirements=pinned_requirements(),
            signature=signature_for(interactions),
            input_example=_input_example(interactions),
        )


def signature_for(interactions: InteractionsManifest) -> ModelSignature:
    """Return the signature. Inputs: user_id and an optional history. Outputs: item ids and scores, or an error.

    The inputs have type Any: with a stricter type, a single null or value of another type would make MLflow reject the
    whole request.
    """
    item_type = DataType.long if interactions.item_id_type == "int64" else DataType.string
    return ModelSignature(
        inputs=Schema([ColSpec(AnyType(), "user_id"), ColSpec(AnyType(), "history", required=False)]),
        outputs=Schema(
            [
                ColSpec(Array(item_type), "item_ids"),
                ColSpec(Array(DataType.double), "scores"),
                ColSpec(DataType.string, "error", required=False),
            ]
        ),
        params=ParamSchema([ParamSpec("k", DataType.long, 10), ParamSpec("exclude_stored_history", DataType.boolean, True)]),
    )


def _input_example(interactions: InteractionsManifest) -> pd.DataFrame:
    user_ids = pq.read_table(interactions.path(vocabulary_file("user")), columns=["id"])["id"]
    return pd.DataFrame({"user_id": user_ids.slice(0, 2).to_pylist()})


def pinned_requirements() -> list[str]:
    """Return the libraries that serving imports, as name==version of a package on PyPI.

    Serving runs on a CPU, so faiss-gpu is replaced by faiss-cpu of the same version.
    """
    version_by_library = {library: metadata.version(library) for library in _SERVING_LIBRARIES}
    installed_libraries = {distribution.name for distribution in metadata.distributions()}
    version_by_library["faiss-cpu"] = metadata.version("faiss-cpu" if "faiss-cpu" in installed_libraries else "faiss-gpu")
    # A local version such as 2.14.1+cpu is not on PyPI.
    return [f"{library}=={version.partition('+')[0]}" for library, version in sorted(version_by_library.items())]
