"""Versions in MLflow's model registry: one per package and run, with signature, requirements and the model's own code."""

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import mlflow.pyfunc
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.entities import Run as MlflowRun
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import AnyType, Array

import recsys_core
from recsys_core.manifests import IdType, PackageManifest
from recsys_core.serving.description import (
    DESCRIPTION_NAME,
    ITEM_COLUMN,
    ITEMS_NAME,
    QUERY_COLUMNS,
    USERS_NAME,
    PackageDescription,
    description_sha256,
    request_columns,
)
from tasks.registry.loading import PACKAGE_SHA256_KEY, PACKAGE_SHA256_TAG, VERSION_KEY, record_logged_model
from tasks.registry.mlflow_client import LOG, RUN_ID_TAG, SQLITE_PREFIX
from tasks.registry.model_card import model_card
from tasks.registry.releases import REFIT_OF_TAG, delete_logged_model
from tasks.runs.context import StageContext

PACKAGE_TAG = "nightjar.package"
"""Fingerprint of the stage `package`."""
MODEL_CODE_FILE = Path(__file__).with_name("pyfunc_model.py")
_SERVING_LIBRARIES = ("mlflow", "numpy", "pandas", "pyarrow", "pydantic", "safetensors", "torch")


def get_or_create_version(
    context: StageContext, *, model_name: str, client: MlflowClient, mlflow_run_id: str, refit_of: str | None = None
) -> ModelVersion:
    """Return the registered version of the run's package. Create it, unless the run created it before an interruption.

    Args:
        refit_of: number of the refitted version; None if the package is no refit.
    """
    run, package = context.run, context.results[PackageManifest]
    mlflow_run = client.get_run(mlflow_run_id)
    return register_package(
        package,
        model_name=model_name,
        client=client,
        mlflow_run=mlflow_run,
        workspace=run.workspace,
        tags={RUN_ID_TAG: run.run_id} | ({} if refit_of is None else {REFIT_OF_TAG: refit_of}),
        description=model_card(context, mlflow_run, model_name=model_name, package=description_of(package), refit_of=refit_of),
    )


def register_package(
    package: PackageManifest,
    *,
    model_name: str,
    client: MlflowClient,
    mlflow_run: MlflowRun,
    workspace: Path,
    tags: Mapping[str, str],
    description: str,
) -> ModelVersion:
    """Log a package as a model of an MLflow run and register it with `tags`, unless an earlier call has done so.

    The version also gets two tags with the fingerprint and the checksum of the package.
    """
    tags = {**tags, PACKAGE_TAG: package.fingerprint, PACKAGE_SHA256_TAG: description_sha256(package)}
    # Two runs in one workspace may create the same model at the same time.
    with FileLock(workspace / ".mlflow.lock"):
        try:
            client.create_registered_model(model_name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
    versions = client.search_model_versions(f"name = '{model_name}'")
    for version in versions:
        if tags.items() <= version.tags.items():
            return version
    _delete_unregistered_models(client, mlflow_run, registered_uris={version.source for version in versions})
    logged_model = _log_model(package, client=client, mlflow_run=mlflow_run)
    if client.tracking_uri.startswith(SQLITE_PREFIX):
        record_logged_model(logged_model.model_uri, client=client, workspace=workspace)
    return client.create_model_version(
        model_name,
        logged_model.model_uri,
        run_id=mlflow_run.info.run_id,
        tags=tags,
        model_id=logged_model.model_id,
        description=description,
    )


def _delete_unregistered_models(client: MlflowClient, mlflow_run: MlflowRun, *, registered_uris: set[str | None]) -> None:
    """Delete the models that an interrupted call logged but did not register. An error is logged as a warning."""
    run_info = mlflow_run.info
    for model in client.search_logged_models([run_info.experiment_id], f"source_run_id = '{run_info.run_id}'"):
        if model.model_uri not in registered_uris:
            try:
                delete_logged_model(client, model)
            except Exception as error:  # e.g. an artifact store that does not allow deletions
                LOG.warning("could not delete %s, which has no version (%s: %s)", model.model_uri, type(error).__name__, error)


def _log_model(package: PackageManifest, *, client: MlflowClient, mlflow_run: MlflowRun) -> LoggedModel:
    """Log the package as a model of the MLflow run.

    `mlflow.pyfunc.log_model` would read the history of each metric of the run, and load the model in this process.
    """
    run_id = mlflow_run.info.run_id
    model = client.create_logged_model(
        mlflow_run.info.experiment_id, "retriever", source_run_id=run_id, params=mlflow_run.data.params
    )
    with TemporaryDirectory(prefix="nightjar-") as folder_name:
        mlflow.pyfunc.save_model(
            f"{folder_name}/model",
            mlflow_model=Model(
                artifact_path=model.artifact_location, run_id=run_id, model_uuid=model.model_id, model_id=model.model_id
            ),
            python_model=str(MODEL_CODE_FILE),
            code_paths=[str(Path(recsys_core.__file__).parent)],
            artifacts={"package": str(package.folder / "package")},
            model_config={
                PACKAGE_SHA256_KEY: description_sha256(package),
                VERSION_KEY: "",
            },  # the number of the version is not known yet
            pip_requirements=pinned_requirements(),
            signature=signature_for(description_of(package), item_id_type=_item_id_type(package)),
            input_example=_input_example(package),
        )
        client.log_model_artifacts(model.model_id, f"{folder_name}/model")
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
    return client.finalize_logged_model(model.model_id, "READY")


def description_of(package: PackageManifest) -> PackageDescription:
    """Return the content of package.json."""
    return PackageDescription.model_validate_json(package.path(f"package/{DESCRIPTION_NAME}").read_bytes())


def signature_for(package: PackageDescription, *, item_id_type: IdType) -> ModelSignature:
    """Return the signature. Inputs: user_id, history and features, or item_id. Outputs: item ids and scores, or an error.

    The inputs have type Any: with a stricter type, a single null or value of another type would make MLflow reject the
    whole request.
    """
    item_id_data_type = DataType.long if item_id_type == "int64" else DataType.string
    feature_columns = [name for names in request_columns(package.features).values() for name in names if name is not None]
    input_columns = dict.fromkeys((*QUERY_COLUMNS, *feature_columns, ITEM_COLUMN))
    return ModelSignature(
        inputs=Schema([ColSpec(AnyType(), name, required=False) for name in input_columns]),
        outputs=Schema(
            [
                ColSpec(Array(item_id_data_type), "item_ids"),
                ColSpec(Array(DataType.double), "scores"),
                ColSpec(DataType.string, "version"),
                ColSpec(DataType.string, "space_id"),
                ColSpec(DataType.string, "fallback", required=False),
                ColSpec(DataType.long, "num_unknown_items"),
                ColSpec(DataType.string, "error", required=False),
                ColSpec(Array(DataType.double), "query_vector", required=False),
                ColSpec(Array(Array(DataType.double)), "item_vectors", required=False),
            ]
        ),
        params=ParamSchema(
            [
                ParamSpec("k", DataType.long, 10),
                ParamSpec("exclude_seen", DataType.boolean, True),
                ParamSpec("exclude_stored_history", DataType.boolean, True),
                ParamSpec("exclude", item_id_data_type, [], (-1,)),
                ParamSpec("min_score", DataType.double, None),
                ParamSpec("popularity_weight", DataType.double, None),
                ParamSpec("filter", DataType.string, ""),
                ParamSpec("with_vectors", DataType.boolean, False),
            ]
        ),
    )


def _item_id_type(package: PackageManifest) -> IdType:
    schema = pq.read_schema(package.path(f"package/{ITEMS_NAME}"))
    return "int64" if pa.types.is_integer(schema.field("item_id").type) else "string"


def _input_example(package: PackageManifest) -> pd.DataFrame:
    """Return two users of the package. If the package has no users, return a history of two items."""
    if description_of(package).users == "stored":
        with pa.memory_map(str(package.path(f"package/{USERS_NAME}"))) as file:
            return pd.DataFrame({"user_id": pa.ipc.open_file(file).get_batch(0)["user_id"].slice(0, 2).to_pylist()})
    item_ids = pq.read_table(package.path(f"package/{ITEMS_NAME}"), columns=["item_id"])["item_id"]
    return pd.DataFrame({"history": [item_ids.slice(0, 2).to_pylist()]})


def pinned_requirements() -> list[str]:
    """Return the libraries that serving imports, each as <package on PyPI>==<version>.

    Serving runs on a CPU, so faiss-gpu is replaced by faiss-cpu of the same version.
    """
    libraries = (*_SERVING_LIBRARIES, "faiss-cpu")
    version_by_library = {library: _installed_version(library) for library in libraries}
    # PyPI has no local versions such as 2.14.1+cpu.
    return [f"{library}=={version.partition('+')[0]}" for library, version in sorted(version_by_library.items())]


def _installed_version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return metadata.version(library.replace("faiss-cpu", "faiss-gpu"))
