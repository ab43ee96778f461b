"""Helpers that register a version in the MLflow of a workspace, and that observe its answers, aliases and tags."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from mlflow import MlflowClient

from recsys_core.comparison.rules import Margin
from recsys_core.evaluation.config import FeatureSlice
from recsys_core.manifests import RegistrationManifest
from tasks.delivery.publishers import AliasChange
from tasks.gate.sample import Answers, K, UserSample
from tasks.registry.config import RegistryConfig
from tasks.runs.context import RunOptions, StageContext
from tasks.runs.workspace import Workspace
from tasks.stages.registration import register
from tests.tasks.conftest import Stages


class RecordingPublisher:
    """Publisher that appends each change to `changes`."""

    def __init__(self) -> None:
        self.changes: list[AliasChange] = []

    def publish(self, change: AliasChange) -> None:
        self.changes.append(change)

    def moves(self) -> list[tuple[str, str | None, str | None]]:
        """Return alias, old version and new version of each change."""
        return [(change.alias, change.old_version, change.new_version) for change in self.changes]


def recommend_unknown_items(sample: UserSample, **_: object) -> Answers:
    """Return answers that contain no item of the catalogue, in place of `predict_in_subprocess`."""
    return Answers(pa.array([[-1] * K] * sample.num_users), cpu_s=1.0, num_bytes=1)


def prepare_run(workspace: Path, run_id: str, **options: Any) -> StageContext:
    """Write the files that the registration logs into the run folder. Return the context of the run."""
    run = Workspace(workspace).run(run_id)
    run.folder.mkdir(parents=True, exist_ok=True)
    run.config_file.write_text("name: tests\n")
    (run.folder / "loss.png").touch()  # as the stage train does
    (run.folder / "indexes.png").touch()  # as the stage build_index does
    return StageContext(run, experiment="tests", options=RunOptions(**options))


def register_version(
    stages: Stages, context: StageContext, *, feature_slices: Sequence[FeatureSlice] = (), **settings: Any
) -> RegistrationManifest:
    """Register a version of the model m. By default, the gate is `Margin` and there are no baselines."""
    for manifest in (stages.dataset.interactions, *stages[1:]):
        context.results.add(manifest)
    settings = {"gate": Margin(), "baselines": ()} | settings  # 30 test users are too few for the default gate
    return register(context, RegistryConfig(model_name="m", **settings), feature_slices)


def version_by_alias(client: MlflowClient) -> dict[str, str]:
    # MLflow returns a version as a number from sqlite, and as a string over REST.
    return {alias: str(version) for alias, version in client.get_registered_model("m").aliases.items()}


def version_tags(client: MlflowClient, version: str) -> dict[str, str]:
    return client.get_model_version("m", version).tags
