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
    find_aliased_run_ids,
    find_old_versions,
    registered_run_ids_by_model,
)
from tasks.retention.run_folders import RunRemoval, find_removals, remove_files


class Removals(NamedTuple):
    """Run files and model versions that retention removes.

    Attributes:
        freed_bytes: decrease of the workspace's size; 0 if nothing has been removed yet.
    """

    run_removals: list[RunRemoval]
    versions: list[ModelVersion]
    freed_bytes: int = 0


def clean(workspace: Path, config: RetentionConfig, *, model_name: str, dry_run: bool = False) -> Removals:
    """Remove files and versions that retention does not keep. If the process is killed, the next call of `clean` continues.

    If the workspace has no MLflow, the aliases are unknown, so all runs with a registered version are kept.

    Args:
        dry_run: remove nothing, and return the planned removals.

    Returns:
        The completed removals, or the planned removals of a dry run.

    Raises:
        TrackingServerError: MLflow does not answer. Nothing is removed, because the runs of versions with an alias must be
            kept, and only MLflow has the aliases.
    """
    versions: list[ModelVersion] = []
    client = connect(workspace) if mlflow_exists(workspace) else None
    if client is None:
        aliased_run_ids = set().union(*registered_run_ids_by_model(workspace).values())
    else:
        retry = partial(call_with_retries, uri=client.tracking_uri)
        aliased_run_ids = retry(partial(find_aliased_run_ids, client, workspace, model_name=model_name))
        versions = retry(partial(find_old_versions, client, model_name, num_newest=config.keep_versions))
    run_removals = find_removals(workspace, config, aliased_run_ids=aliased_run_ids)
    if dry_run:
        return Removals(run_removals, versions)
    used_bytes_before = used_bytes(workspace)
    run_removals = remove_files(workspace, run_removals)
    if client is not None:
        versions = retry(partial(delete_versions, client, versions))
    return Removals(run_removals, versions, freed_bytes=used_bytes_before - used_bytes(workspace))
