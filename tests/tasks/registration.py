"""Registration of a package in the MLflow of a workspace, and the resulting aliases and tags."""

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


def run_of(workspace: Path, run_id: str, **options: Any) -> StageContext:
    run = Workspace(workspace).run(run_id)
    run.folder.mkdir(parents=True, exist_ok=True)
    run.config_file.write_text("name: tests\n")
    (run.folder / "loss.png").touch()  # written by the stage train
    (run.folder / "indexes.png").touch()  # written by the stage build_index
    return StageContext(run, experiment="tests", options=RunOptions(**options))


def do_register(
    stages: Stages, context: StageContext, *, feature_slices: Sequence[FeatureSlice] = (), **config: Any
) -> RegistrationManifest:
    for manifest in (stages.dataset.interactions, *stages[1:]):
        context.results.add(manifest)
    config = {"gate": Margin(), "baselines": ()} | config  # the split of the stages has 30 users
    return register(context, RegistryConfig(model_name="m", **config), feature_slices)


def aliases(client: MlflowClient) -> dict[str, str]:
    # A number from the sqlite store, a string over REST.
    return {alias: str(version) for alias, version in client.get_registered_model("m").aliases.items()}


def version_tags(client: MlflowClient, version: str) -> dict[str, str]:
    return client.get_model_version("m", version).tags
