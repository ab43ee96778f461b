"""The refreshed champion: a new version with the current items, its lineage, and the decision about the alias."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from mlflow.entities import RunStatus
from mlflow.entities.model_registry import ModelVersion
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME

from recsys_core.errors import InputError, NightjarError, StageError, redacted
from recsys_core.ingest import InputConfig
from recsys_core.manifests import create_own_folder, remove_own_folder
from recsys_core.refresh.config import RefreshConfig
from recsys_core.refresh.refresh import Refreshed, refresh
from tasks.progress.reporting import LOG, StageLog
from tasks.registry.loading import PACKAGE_SHA256_KEY, fetch_model, load_version
from tasks.registry.mlflow_client import RUN_ID_TAG
from tasks.registry.model_card import MAX_CARD_CHARACTERS
from tasks.registry.registry import Registry
from tasks.registry.releases import (
    CHALLENGERS_TAG,
    DELTA_TAG,
    PARENT_TAG,
    REASONS_TAG,
    REFIT_OF_TAG,
    REFRESH_TAG,
    SMOKE_TAG,
    SPENT_DROP_TAG,
)
from tasks.registry.tracking import PIPELINE_TAG, as_metrics, log_metrics
from tasks.registry.versions import register_package

_INHERITED_TAGS = (RUN_ID_TAG, SPENT_DROP_TAG, CHALLENGERS_TAG, REFIT_OF_TAG)
"""Tags of the parent that belong to its model: its run, its results in the gate, and the refitted version."""
WORK_FOLDER_NAME = "refresh.tmp"
LOCK_NAME = "refresh.lock"
_CARD_START = "Refreshed from version "


@dataclass(frozen=True)
class RefreshedVersion:
    """Result of a refresh that changed items.

    Attributes:
        version: number of the refreshed version.
        parent: number of the version whose model the refreshed version has.
        changes_text: the changes, in one sentence.
        problems: why the version is not the champion; empty if it is.
        delta_uri: address of the delta file in MLflow.
    """

    version: str
    parent: str
    changes_text: str
    problems: tuple[str, ...]
    delta_uri: str


def refresh_champion(
    config: RefreshConfig,
    inputs: InputConfig,
    registry: Registry,
    *,
    workspace: Path,
    pipeline: str,
    successor: ModelVersion | None = None,
) -> RefreshedVersion | None:
    """Register a version with the current items and the champion's model. The version becomes champion if it passes the checks.

    If no item has changed, register nothing, keep the alias, and return None.

    Args:
        successor: another version of the champion's run, such as a refit, whose model is used instead of the champion's model.

    Raises:
        InputError: there is no champion, the tables are invalid or do not fit the model, or too many items are missing.
        StageError: the champion is damaged, its package has another format, or `successor` is from another run.
        TrackingServerError: MLflow does not work.
    """
    with _work_folder(workspace) as folder:
        champion = registry.champion()
        if champion is None:
            raise InputError(f"{registry.model_name} has no champion to refresh; train one with `nightjar run`")
        parent = successor or champion
        if parent.tags.get(RUN_ID_TAG) != champion.tags.get(RUN_ID_TAG):
            raise StageError(
                f"{registry.model_name}: version {champion.version} of another run became champion before version "
                f"{parent.version} could replace it"
            )
        stage_log = StageLog("refresh")
        refreshed = _refresh(config, inputs, registry, parent, workspace=workspace, folder=folder)
        if refreshed is None:
            stage_log.finish_step(f"no item has changed since version {parent.version}")
            return None
        stage_log.finish_step(str(refreshed.changes))
        stage_log = StageLog("register")
        version, delta_uri = _register(refreshed, registry, parent, workspace=workspace, pipeline=pipeline)
        problems = _assign_alias(refreshed, registry, parent, version, champion=champion, workspace=workspace)
        stage_log.finish_step(f"version {version.version} is {'challenger' if problems else 'champion'}")
    return RefreshedVersion(str(version.version), str(parent.version), str(refreshed.changes), problems, delta_uri)


def _refresh(
    config: RefreshConfig, inputs: InputConfig, registry: Registry, parent: ModelVersion, *, workspace: Path, folder: Path
) -> Refreshed | None:
    """Fetch the package of the parent, and write the refreshed package to `folder`; return None if no item has changed."""
    (download_folder := folder / "parent").mkdir()
    (new_folder := folder / "new").mkdir()
    parent_uri = f"models:/{parent.name}/{parent.version}"
    model_folder, model_config = fetch_model(
        parent_uri, client=registry.client, workspace=workspace, download_folder=download_folder
    )
    package_folder, package_sha256 = model_folder / "artifacts" / "package", model_config[PACKAGE_SHA256_KEY]
    return refresh(config, inputs, parent_folder=package_folder, sha256=package_sha256, folder=new_folder)


def _assign_alias(
    refreshed: Refreshed,
    registry: Registry,
    parent: ModelVersion,
    version: ModelVersion,
    *,
    champion: ModelVersion,
    workspace: Path,
) -> tuple[str, ...]:
    """Give the version the alias champion or challenger; return why it is not the champion."""
    problems = refreshed.problems or _problems_on_load(registry, version, workspace=workspace)
    reason = f"{_CARD_START}{parent.version}: {refreshed.changes}"
    if not problems and not registry.move_champion(version, expected_champion=champion, reason=reason):
        problems = ("another version became champion during the refresh; repeat it",)
    reason = redacted("; ".join([reason, *(f"refused: {problem}" for problem in problems)]))
    registry.set_tag(version, REASONS_TAG, reason)
    if problems:
        registry.move_challenger(version, reason=reason)
    return problems


def _register(
    refreshed: Refreshed, registry: Registry, parent: ModelVersion, *, workspace: Path, pipeline: str
) -> tuple[ModelVersion, str]:
    """Register the package with its lineage; return the version, and the address of its delta file."""
    counts = refreshed.changes.counts
    tags = {tag: parent.tags[tag] for tag in _INHERITED_TAGS if tag in parent.tags}
    tags |= {PARENT_TAG: str(parent.version), REFRESH_TAG: json.dumps(counts)}
    metrics = {f"refresh/{name}": float(count) for name, count in counts.items()}
    metrics |= {f"refresh/{check.metric}": check.value for check in refreshed.checks}
    checks_text = "; ".join(map(str, refreshed.checks))
    card = f"{_CARD_START}{parent.version}: {refreshed.changes}. Checks: {checks_text}.\n\n{_parent_card(parent)}"
    with _mlflow_run(registry, parent, pipeline=pipeline) as mlflow_run_id:
        registry.call(registry.client.log_artifact, mlflow_run_id, str(refreshed.delta_path))
        registry.call(log_metrics, registry.client, mlflow_run_id, as_metrics(metrics))
        delta_uri = f"runs:/{mlflow_run_id}/{refreshed.delta_path.name}"
        version = registry.call(
            register_package,
            refreshed.package,
            model_name=registry.model_name,
            client=registry.client,
            mlflow_run=registry.call(registry.client.get_run, mlflow_run_id),
            workspace=workspace,
            tags=tags | {DELTA_TAG: delta_uri},  # differs for each refresh, so no earlier version is reused
            description=card[:MAX_CARD_CHARACTERS],
        )
    return version, delta_uri


@contextmanager
def _work_folder(workspace: Path) -> Iterator[Path]:
    """Yield an empty folder, and remove it at the end. The folder of a killed refresh is removed at the start.

    A second refresh in the same workspace waits for the first one.
    """
    folder = workspace / WORK_FOLDER_NAME
    with FileLock(workspace / LOCK_NAME):
        remove_own_folder(folder)
        create_own_folder(folder)
        try:
            yield folder
        finally:
            remove_own_folder(folder)


@contextmanager
def _mlflow_run(registry: Registry, parent: ModelVersion, *, pipeline: str) -> Iterator[str]:
    """Yield the id of a new MLflow run in the experiment of the parent's run."""
    client, run_status = registry.client, RunStatus.FAILED
    assert parent.run_id is not None  # every version is created from an MLflow run
    experiment_id = registry.call(client.get_run, parent.run_id).info.experiment_id
    tags = {MLFLOW_RUN_NAME: f"refresh of version {parent.version}", PIPELINE_TAG: pipeline, PARENT_TAG: str(parent.version)}
    mlflow_run_id = str(registry.call(client.create_run, experiment_id, tags=tags).info.run_id)
    try:
        yield mlflow_run_id
        run_status = RunStatus.FINISHED
    finally:
        registry.call(client.set_terminated, mlflow_run_id, RunStatus.to_string(run_status))


def _parent_card(parent: ModelVersion) -> str:
    """Return the model card of the parent without the paragraph about its own refresh."""
    card = parent.description or ""
    return card.partition("\n\n")[2] if card.startswith(_CARD_START) else card


def _problems_on_load(registry: Registry, version: ModelVersion, *, workspace: Path) -> tuple[str, ...]:
    """Load the version as a server does, with the checks of files and golden queries; return the problem, if any."""
    try:
        load_version(workspace, model_name=registry.model_name, version=str(version.version))
    except NightjarError as error:
        registry.set_tag(version, SMOKE_TAG, redacted(f"failed: {error}"))
        LOG.error("%s", error)
        return (str(error),)
    registry.set_tag(version, SMOKE_TAG, "passed")
    return ()
