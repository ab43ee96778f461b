"""Registered versions: tags, current and former champions, the rows of `nightjar releases`. Imports no model code."""

import getpass
import json
import os
import socket
from datetime import UTC, datetime

from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from tasks.registry.mlflow_client import RUN_ID_TAG

SMOKE_TAG = "nightjar.smoke"
"""Result of the smoke test: "passed", or "failed" with the reason."""
REASONS_TAG = "nightjar.reasons"
"""Result of the comparison with the champion, in one sentence."""
METRICS_TAG = "nightjar.metrics"
"""Metrics of all compared versions, as JSON."""
CHAMPION_ERROR_TAG = "nightjar.alarm"
"""Why the champion did not load. The tag is set on the new version that should have been compared with the champion."""
SPENT_DROP_TAG = "nightjar.spent_drop"
"""Relative drop of the metric since the best champion, added up over promotions. It reduces the margin of later versions."""
CHALLENGERS_TAG = "nightjar.evidence_for_challengers"
"""Tag of the champion: product of the e-values of all versions that lost to it. A large product is evidence against it."""
COUNTED_BY_TAG = "nightjar.evidence_counted_by"
"""Tag of a version that lost to a champion: number of the champion, whose CHALLENGERS_TAG includes this e-value."""
LOAD_ERROR_TAG = "nightjar.broken"
"""Why a version did not load for a comparison. The tag is removed when the version loads again."""
PROMOTE_TAG = "nightjar.promote"
"""Rule that decided whether the version becomes champion: by_gate, never or force (`RunOptions.promote`)."""
MANUAL_CHANGE_TAG = "nightjar.by_hand"
"""Last `nightjar promote` or `nightjar rollback` that gave or took the alias `champion`: time, person, command and reason."""
REFIT_OF_TAG = "nightjar.refit_of"
"""Tag of a refit, which was trained on all events of its run: number of the version that the gate has promoted in this run."""
PARENT_TAG = "nightjar.parent"
"""Tag of a refreshed version: number of the version with the same model; only the items differ."""
REFRESH_TAG = "nightjar.refresh"
"""Numbers of items that a refresh added, removed and changed, as JSON."""
DELTA_TAG = "nightjar.delta"
"""Address of the delta file of a refresh in MLflow."""
UNPUBLISHED_TAG = "nightjar.unpublished"
"""Tag of a version that is about to become champion, as JSON: the former champion, and the reason. The tag is removed when the
publishers are informed. If the process is killed first, the next move of an alias informs them."""
MAX_FORMER_CHAMPIONS = 3
"""Number of former champions that the gate tries to load if the champion does not load."""
FORMER_CHAMPION_TAG = "nightjar.champion_until"
"""Time at which another version replaced the champion, in seconds since 1970. A champion that did not load, or
that was rolled back, does not have the tag."""


def current_person() -> str:
    """Return the user and the host of this process, for tags that record who changed a version."""
    try:
        user_name = getpass.getuser()
    except (OSError, KeyError):  # a container may run with a user id without a name
        user_name = f"user {os.getuid()}"
    return f"{user_name} on {socket.gethostname()}"


def version_number_by_alias(client: MlflowClient, model_name: str) -> dict[str, str] | None:
    """Return the version number by alias; None if the registry does not have the model."""
    try:
        number_by_alias = client.get_registered_model(model_name).aliases
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    # MLflow gives an int from sqlite and a str over REST.
    return {alias: str(number) for alias, number in number_by_alias.items()}


def delete_logged_model(client: MlflowClient, model: LoggedModel) -> None:
    """Delete a logged model and its files. Its rows in MLflow's database remain until `mlflow gc`."""
    get_artifact_repository(model.artifact_location, tracking_uri=client.tracking_uri).delete_artifacts()
    client.delete_logged_model(model.model_id)


def champion_of(client: MlflowClient, model_name: str) -> ModelVersion | None:
    """Return the version with the alias champion; None if there is no champion or no such model."""
    version_number = (version_number_by_alias(client, model_name) or {}).get("champion")
    return None if version_number is None else client.get_model_version(model_name, version_number)


def former_champions(client: MlflowClient, model_name: str) -> list[ModelVersion]:
    """Return the former champions, the most recent first, except versions that did not load in a later comparison."""
    versions = client.search_model_versions(f"name = '{model_name}'")
    former_versions = [
        version for version in versions if FORMER_CHAMPION_TAG in version.tags and LOAD_ERROR_TAG not in version.tags
    ]
    return sorted(former_versions, key=lambda version: (-int(version.tags[FORMER_CHAMPION_TAG]), -int(version.version)))


def list_releases(client: MlflowClient, model_name: str) -> list[dict[str, object]]:
    """Return one dictionary per version, the newest first: version, aliases, tags, metrics, run and creation (UTC)."""
    versions = client.search_model_versions(f"name = '{model_name}'")
    number_by_alias = version_number_by_alias(client, model_name) or {}
    return [
        {
            "version": str(version.version),
            "aliases": ", ".join(sorted(alias for alias, number in number_by_alias.items() if number == str(version.version))),
            "smoke": version.tags.get(SMOKE_TAG, "not done"),
            "broken": version.tags.get(LOAD_ERROR_TAG, ""),
            "metrics": json.loads(version.tags.get(METRICS_TAG, "{}")),
            "reasons": version.tags.get(REASONS_TAG, ""),
            "by_hand": version.tags.get(MANUAL_CHANGE_TAG, ""),
            "parent": version.tags.get(PARENT_TAG, ""),
            "refresh": json.loads(version.tags.get(REFRESH_TAG, "{}")),
            "delta": version.tags.get(DELTA_TAG, ""),
            "run_id": version.tags.get(RUN_ID_TAG, ""),
            "created": f"{datetime.fromtimestamp(version.creation_timestamp / 1000, UTC):%Y-%m-%d %H:%M}",
        }
        for version in sorted(versions, key=lambda version: -int(version.version))
    ]
