"""Retention of model versions: find the runs whose version has an alias, and delete old versions with their files.

MLflow's delete_model_version removes the registry entry and the aliases of a version, but not its logged model. This module
deletes the logged model and its files too. The rows of the logged model in MLflow's database remain until `mlflow gc`.
"""

import re
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from recsys_core.manifests import RegistrationManifest, read_unchecked_manifest
from recsys_core.units import DAY_S
from tasks.registry.mlflow_client import RUN_ID_TAG
from tasks.registry.releases import (
    MAX_FORMER_CHAMPIONS,
    REASONS_TAG,
    REFIT_OF_TAG,
    delete_logged_model,
    former_champions,
    version_number_by_alias,
)
from tasks.retention.run_folders import own_runs

_LOGGED_MODEL_PATTERN = re.compile(r"models:/(m-[0-9a-f]+)")
MAX_COMPARISON_MS = 1_000 * DAY_S
"""Retention assumes that a run compares its version with the champion within this time after the registration."""


def registered_run_ids_by_model(workspace: Path) -> dict[str, set[str]]:
    """Return the ids of the runs that registered a version, by the name of the registered model."""
    run_ids_by_model: dict[str, set[str]] = {}
    for run in own_runs(workspace):
        registration = read_unchecked_manifest(run.stage_folder(RegistrationManifest), RegistrationManifest)
        if registration is not None:
            run_ids_by_model.setdefault(registration.model_name, set()).add(run.run_id)
    return run_ids_by_model


def find_aliased_run_ids(client: MlflowClient, workspace: Path, *, model_name: str) -> set[str]:
    """Return the ids of the runs whose model version has an alias.

    Several models may be trained in one workspace. Runs of a model that the registry does not have are returned too,
    because a version of this model may have an alias in another registry.

    Args:
        model_name: the model of this pipeline; names of other models are read from the runs.
    """
    aliased_run_ids: set[str] = set()
    for name, registered_run_ids in ({model_name: set[str]()} | registered_run_ids_by_model(workspace)).items():
        number_by_alias = version_number_by_alias(client, name)
        if number_by_alias is None:
            aliased_run_ids |= registered_run_ids
        else:
            versions = (client.get_model_version(name, number) for number in sorted(set(number_by_alias.values())))
            aliased_run_ids |= {version.tags[RUN_ID_TAG] for version in versions if RUN_ID_TAG in version.tags}
    return aliased_run_ids


def find_old_versions(client: MlflowClient, model_name: str, *, num_newest: int) -> list[ModelVersion]:
    """Return the versions that nightjar registered and retention does not keep, the oldest first. Nothing is deleted.

    Retention keeps

    - the newest `num_newest` versions, and versions with an alias,
    - the latest former champions, and one former champion for each of the latest other runs,
    - the refitted version, if a version above is a refit, because the gate compares new versions with the refitted version,
    - versions that another run may still be comparing with the champion,
    - versions whose files are behind a link.
    """
    number_by_alias = version_number_by_alias(client, model_name)
    if number_by_alias is None:
        return []
    versions = sorted(client.search_model_versions(f"name = '{model_name}'"), key=lambda version: int(version.version))
    former_versions = former_champions(client, model_name)
    run_id_by_number = {str(version.version): version.tags.get(RUN_ID_TAG) for version in versions}
    # All refreshes of a version have its run id. A rollback to another model needs a former champion of another run.
    former_version_by_run_id = {version.tags.get(RUN_ID_TAG): version for version in reversed(former_versions)}
    former_version_by_run_id.pop(run_id_by_number.get(number_by_alias.get("champion", "")), None)
    other_former_versions = sorted(former_version_by_run_id.values(), key=former_versions.index)
    kept_versions = [
        *versions[-num_newest:], *former_versions[:MAX_FORMER_CHAMPIONS], *other_former_versions[:MAX_FORMER_CHAMPIONS]
    ]  # fmt: skip
    kept_numbers = {str(version.version) for version in kept_versions} | set(number_by_alias.values())
    refits = [version for version in versions if REFIT_OF_TAG in version.tags and str(version.version) in kept_numbers]
    kept_numbers |= {version.tags[REFIT_OF_TAG] for version in refits}
    earliest_comparison_start_ms = time.time() * 1_000 - MAX_COMPARISON_MS
    return [
        version
        for version in versions
        if str(version.version) not in kept_numbers
        and RUN_ID_TAG in version.tags
        and (REASONS_TAG in version.tags or version.creation_timestamp < earliest_comparison_start_ms)
        and not _is_behind_link(_logged_model(client, version))
    ]


def delete_versions(client: MlflowClient, versions: Iterable[ModelVersion]) -> list[ModelVersion]:
    """Delete the versions and their files; return the deleted versions. A version that has an alias now is not deleted.

    A version is deleted after its files: if the process is killed, the next `nightjar clean` finds the version again.
    """
    deleted_versions = []
    for version in versions:
        if str(version.version) in (version_number_by_alias(client, version.name) or {}).values():
            continue
        logged_model = _logged_model(client, version)
        if _is_behind_link(logged_model):  # it was a folder when the removal was planned
            continue
        if logged_model is not None:
            delete_logged_model(client, logged_model)
        try:
            client.delete_model_version(version.name, str(version.version))
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # otherwise an earlier cleaning has deleted the version
                raise
        deleted_versions.append(version)
    return deleted_versions


def _logged_model(client: MlflowClient, version: ModelVersion) -> LoggedModel | None:
    """Return the logged model of a version; None if it is deleted already, or if the version has another source."""
    uri_match = _LOGGED_MODEL_PATTERN.fullmatch(version.source or "")
    if uri_match is None:
        return None
    try:
        return client.get_logged_model(uri_match[1])
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _is_behind_link(model: LoggedModel | None) -> bool:
    """Return whether the local folder `<model id>/artifacts` of a logged model, or the folder above it, is a link."""
    location = urlparse("" if model is None else model.artifact_location)
    folder = Path(url2pathname(location.path))
    return location.scheme in ("", "file") and (folder.is_symlink() or folder.parent.is_symlink())
