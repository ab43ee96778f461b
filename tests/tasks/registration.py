"""Registration of a package in the MLflow of a workspace, and the resulting aliases and tags."""

from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from recsys_core.manifests import RegistrationManifest
from tasks.registry.config import RegistryConfig
from tasks.runs.run import Run, RunOptions
from tasks.stages.register import register
from tests.tasks.conftest import Stages


def run_of(workspace: Path, run_id: str, **options: Any) -> Run:
    run = Run(run_id, workspace=workspace, experiment="tests", options=RunOptions(**options))
    run.folder.mkdir(parents=True, exist_ok=True)
    run.config_file.write_text("name: tests\n")
    return run


def do_register(stages: Stages, run: Run, **config: Any) -> RegistrationManifest:
    return register.fn(RegistryConfig(model_name="m", **config), run=run, **stages._asdict())


def aliases(client: MlflowClient) -> dict[str, str]:
    # A number from the sqlite store, a string over REST.
    return {alias: str(version) for alias, version in client.get_registered_model("m").aliases.items()}


def version_tags(client: MlflowClient, version: str) -> dict[str, str]:
    return client.get_model_version("m", version).tags
