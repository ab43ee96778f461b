"""Helpers that register a version in the MLflow of a workspace and read the resulting aliases and tags."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from recsys_core.comparison.rules import Margin
from recsys_core.evaluation.config import FeatureSlice
from recsys_core.manifests import RegistrationManifest
from tasks.registry.config import RegistryConfig
from tasks.runs.context import RunOptions, StageContext
from tasks.runs.workspace import Workspace
from tasks.stages.registration import register
from tests.tasks.conftest import Stages


def prepare_run(workspace: Path, run_id: str, **options: Any) -> StageContext:
    """Write the run folder with the files that the registration logs, unless it exists. Return the context of the run."""
    run = Workspace(workspace).run(run_id)
    run.folder.mkdir(parents=True, exist_ok=True)
    run.config_file.write_text("name: tests\n")
    (run.folder / "loss.png").touch()  # as the stage train does
    (run.folder / "indexes.png").touch()  # as the stage build_index does
    return StageContext(run, experiment="tests", options=RunOptions(**options))


def register_version(
    stages: Stages, context: StageContext, *, feature_slices: Sequence[FeatureSlice] = (), **config: Any
) -> RegistrationManifest:
    """Register a version of the model m. Unless `config` has other values, the gate is `Margin` and there are no baselines."""
    for manifest in (stages.dataset.interactions, *stages[1:]):
        context.results.add(manifest)
    config = {"gate": Margin(), "baselines": ()} | config  # 30 test users are too few for the default gate
    return register(context, RegistryConfig(model_name="m", **config), feature_slices)


def version_by_alias(client: MlflowClient) -> dict[str, str]:
    # MLflow returns a version as a number from sqlite, and as a string over REST.
    return {alias: str(version) for alias, version in client.get_registered_model("m").aliases.items()}


def version_tags(client: MlflowClient, version: str) -> dict[str, str]:
    return client.get_model_version("m", version).tags
