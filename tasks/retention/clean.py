"""Cleaning of a workspace: removal of the run folders and model versions that retention does not keep."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from recsys_core.disk import used_bytes
from tasks.registry.mlflow_client import call_with_retries, connect, mlflow_exists
from tasks.retention.config import RetentionConfig
from tasks.retention.model_versions import (
    delete_versions,
    find_aliased_runs,
    find_old_versions,
    registered_runs_by_model,
)
from tasks.retention.run_folders import RunRemoval, empty_trash, find_removals, remove_files


class Removals(NamedTuple):
    """Files of runs and model versions that retention removes.

    Attributes:
        freed_bytes: by how much the size of the workspace has decreased.
    """

    run_removals: list[RunRemoval]
    versions: list[ModelVersion]
    freed_bytes: int = 0


def open_registry(workspace: Path) -> MlflowClient | None:
    """Return a client of MLflow; None if the workspace has no MLflow. Raise TrackingServerError if MLflow does not answer."""
    return connect(workspace) if mlflow_exists(workspace) else None


def find_all_removals(workspace: Path, config: RetentionConfig, *, model_name: str, client: MlflowClient | None) -> Removals:
    """Return the removals after which the workspace and the registered model comply with `config`. Nothing is removed."""
    if client is None:  # the aliases are unknown, so all runs with a registered version are kept
        registered_runs = set().union(*registered_runs_by_model(workspace).values())
        return Removals(find_removals(workspace, config, aliased_runs=registered_runs), [])
    retry = partial(call_with_retries, uri=client.tracking_uri)
    aliased_runs = retry(lambda: find_aliased_runs(client, workspace, model_name=model_name))
    old_versions = retry(lambda: find_old_versions(client, model_name, num_kept=config.keep_versions))
    return Removals(find_removals(workspace, config, aliased_runs=aliased_runs), old_versions)


def clean(workspace: Path, config: RetentionConfig, *, model_name: str) -> Removals:
    """Remove files and versions that the workspace does not keep. If the process is killed, the next call of `clean` continues.

    Returns:
        The completed removals.

    Raises:
        TrackingServerError: MLflow does not answer. Nothing is removed, because the runs of versions with an alias must be
            kept, and only MLflow has the aliases.
    """
    bytes_before = used_bytes(workspace)
    empty_trash(workspace)
    client = open_registry(workspace)
    removals = find_all_removals(workspace, config, model_name=model_name, client=client)
    run_removals = remove_files(workspace, removals.run_removals)
    versions: list[ModelVersion] = []
    if client is not None:
        versions = call_with_retries(partial(delete_versions, client, removals.versions), uri=client.tracking_uri)
    return Removals(run_removals, versions, freed_bytes=bytes_before - used_bytes(workspace))
