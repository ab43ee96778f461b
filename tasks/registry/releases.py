"""The registered versions as MLflow has them: tags, champions, the list of `nightjar releases`. Imports no model code."""

import json
from datetime import UTC, datetime

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from recsys_core.errors import InputError, redacted
from tasks.registry.mlflow_client import RUN_ID_TAG

SMOKE_TAG = "nightjar.smoke"
REASONS_TAG = "nightjar.reasons"
METRICS_TAG = "nightjar.metrics"
ALARM_TAG = "nightjar.alarm"
"""On a version that was compared while the champion did not load: what was wrong."""
BROKEN_TAG = "nightjar.broken"
"""On a version that did not load when another one was compared with it: the last line of its process."""
FORMER_CHAMPION_TAG = "nightjar.champion_until"
"""On a version that loaded when another one replaced it as champion: seconds since 1970."""


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
