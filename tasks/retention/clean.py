"""Cleaning of a workspace: removal of the run folders and model versions that retention does not keep."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

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
from tasks.retention.run_folders import RunRemoval, find_removals, remove_files


class Removals(NamedTuple):
    """Files of runs and model versions that retention removes.

    Attributes:
        freed_bytes: by how much the size of the workspace has decreased.
    """

    run_removals: list[RunRemoval]
    versions: list[ModelVersion]
    freed_bytes: int = 0


def clean(workspace: Path, config: RetentionConfig, *, model_name: str, dry_run: bool = False) -> Removals:
    """Remove files and versions that the workspace does not keep. If the process is killed, the next call of `clean` continues.

    Without an MLflow, the aliases are unknown, so all runs with a registered version are kept.

    Args:
        dry_run: remove nothing, and return the planned removals.

    Returns:
        The completed removals.

    Raises:
        TrackingServerError: MLflow does not answer. Nothing is removed, because the runs of versions with an alias must be
            kept, and only MLflow has the aliases.
    """
    versions: list[ModelVersion] = []
    client = connect(workspace) if mlflow_exists(workspace) else None
    if client is None:
        aliased_runs = set().union(*registered_runs_by_model(workspace).values())
    else:
        retry = partial(call_with_retries, uri=client.tracking_uri)
        aliased_runs = retry(partial(find_aliased_runs, client, workspace, model_name=model_name))
        versions = retry(partial(find_old_versions, client, model_name, num_kept=config.keep_versions))
    run_removals = find_removals(workspace, config, aliased_runs=aliased_runs)
    if dry_run:
        return Removals(run_removals, versions)
    bytes_before = used_bytes(workspace)
    run_removals = remove_files(workspace, run_removals)
    if client is not None:
        versions = retry(partial(delete_versions, client, versions))
    return Removals(run_removals, versions, freed_bytes=bytes_before - used_bytes(workspace))
