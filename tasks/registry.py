"""Versions in MLflow's model registry: made once per package, looked at, and given their alias."""

import json
from datetime import UTC, datetime
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
from recsys_core.errors import InputError, redacted
from recsys_core.manifests import InteractionsManifest, PackageManifest
from recsys_core.serving.package import description_sha256
from tasks.config import RegistryConfig
from tasks.mlflow_client import RUN_ID_TAG, tracking_uri
from tasks.model_uri import PACKAGE_SHA256, PACKAGE_SHA256_TAG
from tasks.run import Run

PACKAGE_TAG = "nightjar.package"
SMOKE_TAG = "nightjar.smoke"
REASONS_TAG = "nightjar.reasons"
METRICS_TAG = "nightjar.metrics"
ALARM_TAG = "nightjar.alarm"
"""On a version that was compared while the champion did not load: what was wrong."""
BROKEN_TAG = "nightjar.broken"
"""On a version that did not load when another one was compared with it: the last line of its process."""
FORMER_CHAMPION_TAG = "nightjar.champion_until"
"""On a version that loaded when another one replaced it as champion: seconds since 1970."""
_MODEL_CODE = Path(__file__).with_name("pyfunc_model.py")
_NEEDED_TO_SERVE = ("mlflow", "numpy", "pandas", "pyarrow", "pydantic", "safetensors", "torch")


def version_for(
    package: PackageManifest,
    *,
    config: RegistryConfig,
    client: MlflowClient,
    mlflow_run_id: str,
    interactions: InteractionsManifest,
    run: Run,
) -> ModelVersion:
    """The registered version of `package` that this run made, now or before it was interrupted."""
    model_name = config.model_name
    tags = {RUN_ID_TAG: run.run_id, PACKAGE_TAG: package.fingerprint, PACKAGE_SHA256_TAG: description_sha256(package)}
    # Two runs in one workspace may register the same model at the same time.
    with FileLock(run.workspace / ".mlflow.lock"):
        try:
            client.create_registered_model(model_name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
    for version in client.search_model_versions(f"name = '{model_name}'"):
        if tags.items() <= version.tags.items():
            return version
    mlflow.set_tracking_uri(tracking_uri(run.workspace))
    logged = _log_model(package, mlflow_run_id=mlflow_run_id, interactions=interactions)
    return client.create_model_version(model_name, logged.model_uri, run_id=mlflow_run_id, tags=tags, model_id=logged.model_id)


def _log_model(package: PackageManifest, *, mlflow_run_id: str, interactions: InteractionsManifest) -> ModelInfo:
    with mlflow.start_run(run_id=mlflow_run_id):
        return mlflow.pyfunc.log_model(
            name="retriever",
            python_model=str(_MODEL_CODE),
            code_paths=[str(Path(recsys_core.__file__).parent)],
            artifacts={"package": str(package.folder / "package")},
            model_config={PACKAGE_SHA256: description_sha256(package)},
            pip_requirements=pinned_requirements(),
            signature=signature_for(interactions),
            input_example=_example(interactions),
        )


def signature_for(interactions: InteractionsManifest) -> ModelSignature:
    """user_id, and a history if the caller knows better, to item ids and scores, or to an error; ids as they are in the log.

    Inputs are of any type: MLflow fails the whole request for one value of another type than a column's, a null included.
    """
    item = DataType.long if interactions.item_id_type == "int64" else DataType.string
    return ModelSignature(
        inputs=Schema([ColSpec(AnyType(), "user_id"), ColSpec(AnyType(), "history", required=False)]),
        outputs=Schema(
            [
                ColSpec(Array(item), "item_ids"),
                ColSpec(Array(DataType.double), "scores"),
                ColSpec(DataType.string, "error", required=False),
            ]
        ),
        params=ParamSchema([ParamSpec("k", DataType.long, 10), ParamSpec("exclude_log", DataType.boolean, True)]),
    )


def _example(interactions: InteractionsManifest) -> pd.DataFrame:
    users = pq.read_table(interactions.path("users.parquet"), columns=["id"])["id"]
    return pd.DataFrame({"user_id": users.slice(0, 2).to_pylist()})


def pinned_requirements() -> list[str]:
    """What serving imports, in the versions that this environment has, by the names and numbers of public indexes.

    The builds for CPU and GPU of faiss share their versions and the name of the module; serving runs on a CPU.
    """
    versions = {name: metadata.version(name) for name in _NEEDED_TO_SERVE}
    installed = {distribution.name for distribution in metadata.distributions()}
    versions["faiss-cpu"] = metadata.version("faiss-cpu" if "faiss-cpu" in installed else "faiss-gpu")
    # A local part, as in 2.14.1+cpu, names a build that only some indexes have.
    return [f"{name}=={version.partition('+')[0]}" for name, version in sorted(versions.items())]


def champion_of(client: MlflowClient, model_name: str) -> ModelVersion | None:
    """The version with the alias champion; None where there is none, or no such model yet."""
    try:
        aliases = client.get_registered_model(model_name).aliases
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return client.get_model_version(model_name, aliases["champion"]) if "champion" in aliases else None


def champion_uri(client: MlflowClient, model_name: str) -> str:
    """models:/<name>/<version> of the champion; InputError if there is none yet."""
    champion = champion_of(client, model_name)
    if champion is None:
        raise InputError(
            f"the registered model {model_name!r} has no champion in {redacted(client.tracking_uri)}; `nightjar run` makes one"
        )
    return f"models:/{model_name}/{champion.version}"


def former_champions(client: MlflowClient, model_name: str) -> list[ModelVersion]:
    """Versions that were replaced as champion, the last one first, without those that did not load since."""
    versions = client.search_model_versions(f"name = '{model_name}'")
    former = [version for version in versions if FORMER_CHAMPION_TAG in version.tags and BROKEN_TAG not in version.tags]
    return sorted(former, key=lambda version: (-int(version.tags[FORMER_CHAMPION_TAG]), -int(version.version)))


def list_releases(client: MlflowClient, model_name: str) -> list[dict[str, object]]:
    """All versions, newest first: version, alias, promoted-or-not reasons, served metrics, run_id, and when (UTC)."""
    versions = client.search_model_versions(f"name = '{model_name}'")
    aliases = client.get_registered_model(model_name).aliases if versions else {}
    return [
        {
            "version": str(version.version),
            "alias": ", ".join(sorted(alias for alias, number in aliases.items() if str(number) == str(version.version))),
            "smoke": version.tags.get(SMOKE_TAG, "not done"),
            "broken": version.tags.get(BROKEN_TAG, ""),
            "metrics": json.loads(version.tags.get(METRICS_TAG, "{}")),
            "reasons": version.tags.get(REASONS_TAG, ""),
            "run_id": version.tags.get(RUN_ID_TAG, ""),
            "created": f"{datetime.fromtimestamp(version.creation_timestamp / 1000, UTC):%Y-%m-%d %H:%M}",
        }
        for version in sorted(versions, key=lambda version: -int(version.version))
    ]
