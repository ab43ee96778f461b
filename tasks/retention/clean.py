"""Cleaning of a workspace: removal of the run folders and model versions that retention does not keep."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlflow import MlflowClient

from tasks.registry.mlflow_client import call_with_retries, connect, mlflow_exists
from tasks.retention.config import RetentionConfig
from tasks.retention.model_versions import (
    VersionRemoval,
    delete_versions,
    find_aliased_runs,
    find_old_versions,
    registered_runs_by_model,
)
from tasks.retention.run_folders import RunRemoval, empty_trash, find_removals, remove_files


@dataclass(frozen=True)
class Removals:
    """Files of runs and model versions that retention removes."""

    run_removals: list[RunRemoval]
    version_removals: list[VersionRemoval]

    @property
    def bytes(self) -> int:
        """Disk space that the removals free on a local disk."""
        version_bytes = sum(removal.bytes or 0 for removal in self.version_removals)
        return sum(removal.bytes for removal in self.run_removals) + version_bytes


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
    version_removals = retry(lambda: find_old_versions(client, model_name, num_kept=config.keep_versions))
    return Removals(find_removals(workspace, config, aliased_runs=aliased_runs), version_removals)


def clean(workspace: Path, config: RetentionConfig, *, model_name: str) -> Removals:
    """Remove files and versions that the workspace does not keep. If the process is killed, the next call of `clean` continues.

    Returns:
        The completed removals.

    Raises:
        TrackingServerError: MLflow does not answer. Nothing is removed, because the runs of versions with an alias must be
            kept, and only MLflow has the aliases.
    """
    empty_trash(workspace)
    client = open_registry(workspace)
    removals = find_all_removals(workspace, config, model_name=model_name, client=client)
    completed_run_removals = remove_files(workspace, removals.run_removals)
    if client is None:
        return Removals(completed_run_removals, [])
    delete_old_versions = partial(delete_versions, client, removals.version_removals)
    return Removals(completed_run_removals, call_with_retries(delete_old_versions, uri=client.tracking_uri))
