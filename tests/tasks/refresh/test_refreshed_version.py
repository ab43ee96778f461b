"""A refreshed champion in MLflow: its tags, its delta file, and whether it becomes champion."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from recsys_core.errors import InputError, StageError
from recsys_core.manifests import MARKER_NAME
from recsys_core.refresh import package
from recsys_core.refresh.config import RefreshConfig
from tasks.gate.by_hand import ManualDecision, promote_version, roll_back
from tasks.refresh import refreshed_version
from tasks.refresh.refreshed_version import RefreshedVersion, refresh_champion
from tasks.registry.config import RegistryConfig
from tasks.registry.loading import load_version
from tasks.registry.mlflow_client import RUN_ID_TAG, connect
from tasks.registry.registry import Registry
from tasks.registry.releases import CHALLENGERS_TAG, FORMER_CHAMPION_TAG, SPENT_DROP_TAG, list_releases
from tasks.registry.versions import register_package
from tests.recsys_core.refresh.small_pipeline import ITEMS, SmallPipeline, build_pipeline, write_items, write_vectors
from tests.tasks.registration import RecordingPublisher, version_by_alias

pytestmark = pytest.mark.usefixtures("empty_plots")


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> SmallPipeline:
    """The package that is refreshed, with the files and settings of its training."""
    return build_pipeline(tmp_path_factory.mktemp("parent") / "files")


@pytest.fixture
def client(workspace: Path, parent: SmallPipeline) -> MlflowClient:
    """A client of an MLflow whose champion is the package of `parent`. The input files have the items of the training."""
    set_items(parent, ITEMS)
    client = connect(workspace)
    make_champion(client, workspace, parent)
    return client


def set_items(parent: SmallPipeline, ids: Any) -> None:
    """Write input files with these item ids. The package has the items 1000 to 1299."""
    write_vectors(parent.input_folder, ids)
    write_items(parent.input_folder, ids)


def make_champion(
    client: MlflowClient, workspace: Path, parent: SmallPipeline, *, run_id: str = "20261121-070312-ab12"
) -> ModelVersion:
    """Register the package of the parent as a version, and make the version champion."""
    experiment = client.get_experiment_by_name("tests")
    artifact_uri = (workspace / "mlartifacts").as_uri()
    experiment_id = (
        experiment.experiment_id if experiment else client.create_experiment("tests", artifact_location=artifact_uri)
    )
    registered_version = register_package(
        parent.package,
        model_name="m",
        client=client,
        mlflow_run=client.create_run(experiment_id),
        workspace=workspace,
        tags={RUN_ID_TAG: run_id, SPENT_DROP_TAG: "0.01", CHALLENGERS_TAG: "2.5"},
        description="The card of the model.",
    )
    client.set_registered_model_alias("m", "champion", str(registered_version.version))
    return registered_version


def refresh(parent: SmallPipeline, workspace: Path, *publishers: Any) -> RefreshedVersion | None:
    registry = Registry.connect(workspace, "m", publishers=publishers)
    return refresh_champion(RefreshConfig(), parent.inputs, registry, workspace=workspace, pipeline="films")


def test_a_refreshed_version_becomes_champion_with_the_tags_of_its_parent(
    parent: SmallPipeline, client: MlflowClient, workspace: Path
) -> None:
    set_items(parent, range(1003, 1310))
    publisher = RecordingPublisher()
    new_version = refresh(parent, workspace, publisher)
    assert new_version is not None and new_version.problems == ()
    assert version_by_alias(client) == {"champion": "2"} and publisher.moves() == [("champion", "1", "2")]
    registered_version = client.get_model_version("m", "2")
    num_items_by_change = {"added": 10, "removed": 3, "changed": 0}
    tags = registered_version.tags
    assert (tags["nightjar.parent"], json.loads(tags["nightjar.refresh"])) == ("1", num_items_by_change)
    assert tags["nightjar.smoke"] == "passed"
    inherited_tags = (RUN_ID_TAG, SPENT_DROP_TAG, CHALLENGERS_TAG)
    parent_version = client.get_model_version("m", "1")
    assert [tags[tag] for tag in inherited_tags] == [parent_version.tags[tag] for tag in inherited_tags]
    assert FORMER_CHAMPION_TAG in parent_version.tags  # a rollback can return to it
    sentence = "Refreshed from version 1: 10 items added, 3 removed, 0 changed"
    assert registered_version.description.startswith(sentence)
    assert registered_version.description.endswith("The card of the model.")
    (release, _) = list_releases(client, "m")
    assert (release["parent"], release["refresh"], release["reasons"]) == ("1", num_items_by_change, sentence)
    old_retriever, new_retriever = (load_version(workspace, model_name="m", version=number).retriever for number in ("1", "2"))
    assert new_retriever.space_id == old_retriever.space_id and new_retriever.version == "2"
    assert not (workspace / "refresh.tmp").exists()


def test_the_delta_file_is_an_artifact_of_the_mlflow_run(parent: SmallPipeline, client: MlflowClient, workspace: Path) -> None:
    set_items(parent, range(1003, 1310))
    new_version = refresh(parent, workspace)
    assert new_version is not None
    assert new_version.delta_uri == client.get_model_version("m", "2").tags["nightjar.delta"]
    mlflow.set_tracking_uri(client.tracking_uri)
    delta_table = pq.read_table(mlflow.artifacts.download_artifacts(new_version.delta_uri))
    assert sorted(delta_table["operation"].to_pylist()) == ["delete"] * 3 + ["upsert"] * 10
    mlflow_run = client.get_run(client.get_model_version("m", "2").run_id)
    assert mlflow_run.info.status == "FINISHED" and mlflow_run.data.tags["nightjar.pipeline"] == "films"
    assert mlflow_run.data.metrics["refresh/added"] == 10 and mlflow_run.data.metrics["refresh/index_recall_users"] == 1
    assert RUN_ID_TAG not in mlflow_run.data.tags  # a resumed run would continue this MLflow run


def test_a_second_refresh_has_the_first_refresh_as_parent(parent: SmallPipeline, client: MlflowClient, workspace: Path) -> None:
    for end_id in (1310, 1320):
        set_items(parent, range(1000, end_id))
        refresh(parent, workspace)
    registered_version = client.get_model_version("m", "3")
    assert (registered_version.tags["nightjar.parent"], version_by_alias(client)) == ("2", {"champion": "3"})
    assert registered_version.description.count("Refreshed from version") == 1


def test_a_refreshed_version_with_items_outside_the_log_is_promoted_again(
    parent: SmallPipeline, client: MlflowClient, workspace: Path, in_process_predictions: list[str]
) -> None:
    set_items(parent, range(1000, 1310))
    refresh(parent, workspace)
    run_folder = workspace / "runs" / "20261121-070312-ab12"
    shutil.copytree(parent.dataset.interactions.folder, run_folder / "ingest_interactions")
    for change_champion, version in ((partial(roll_back, None), "1"), (partial(promote_version, 2), "2")):
        message = change_champion(ManualDecision(RegistryConfig(model_name="m"), workspace, "a test", []))
        assert message.startswith(f"m version {version} is champion") and version_by_alias(client)["champion"] == version


def test_a_failed_refresh_leaves_no_files_and_can_be_repeated(
    parent: SmallPipeline, client: MlflowClient, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_items(parent, range(1000, 1310))
    (workspace / "refresh.tmp").mkdir()
    (workspace / "refresh.tmp" / MARKER_NAME).touch()
    (workspace / "refresh.tmp" / "left.parquet").touch()  # a killed refresh has left this file
    with monkeypatch.context() as patch:
        patch.setattr(refreshed_version, "register_package", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            refresh(parent, workspace)
    assert version_by_alias(client) == {"champion": "1"} and not (workspace / "refresh.tmp").exists()
    experiment_id = client.get_experiment_by_name("tests").experiment_id
    newest_mlflow_run, *_ = client.search_runs([experiment_id])
    assert newest_mlflow_run.info.status == "FAILED"
    new_version = refresh(parent, workspace)
    assert new_version is not None and version_by_alias(client) == {"champion": "2"}


def test_without_a_change_nothing_is_registered(parent: SmallPipeline, client: MlflowClient, workspace: Path) -> None:
    num_mlflow_runs = len(client.search_runs([client.get_experiment_by_name("tests").experiment_id]))
    assert refresh(parent, workspace) is None
    assert len(client.search_model_versions("name = 'm'")) == 1
    assert len(client.search_runs([client.get_experiment_by_name("tests").experiment_id])) == num_mlflow_runs


def test_a_version_with_a_broken_index_is_registered_but_does_not_become_champion(
    parent: SmallPipeline, client: MlflowClient, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_index = package.write_index
    monkeypatch.setattr(
        package, "write_index", lambda kind, vector_ID, paths: write_index(kind, np.roll(vector_ID, 1, axis=0), paths)
    )
    set_items(parent, range(1000, 1310))
    publisher = RecordingPublisher()
    new_version = refresh(parent, workspace, publisher)
    assert new_version is not None
    assert [problem.partition(":")[0] for problem in new_version.problems] == [
        "share of golden queries with an equal vector",
        "overlap of the answers to golden queries",
        "recall@100 of the index for the vectors of users",
        "recall@100 of the index for the vectors of items",
    ]
    assert version_by_alias(client) == {"champion": "1", "challenger": "2"} and publisher.moves() == [("challenger", None, "2")]
    assert "refused: recall@100 of the index" in client.get_model_version("m", "2").tags["nightjar.reasons"]
    assert FORMER_CHAMPION_TAG not in client.get_model_version("m", "1").tags


def test_a_version_that_does_not_load_does_not_become_champion(
    parent: SmallPipeline, client: MlflowClient, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_load(*_: Any, **__: Any) -> None:
        raise StageError("items.parquet: the file was changed")

    monkeypatch.setattr(refreshed_version, "load_version", fail_to_load)
    set_items(parent, range(1000, 1310))
    new_version = refresh(parent, workspace)
    assert new_version is not None and new_version.problems == ("items.parquet: the file was changed",)
    assert version_by_alias(client) == {"champion": "1", "challenger": "2"}
    assert client.get_model_version("m", "2").tags["nightjar.smoke"].startswith("failed: items.parquet")


def test_a_version_that_becomes_champion_during_the_refresh_stays_champion(
    parent: SmallPipeline, client: MlflowClient, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_and_replace_champion(*_: Any, **__: Any) -> None:
        make_champion(client, workspace, parent, run_id="20261122-070312-ab12")

    monkeypatch.setattr(refreshed_version, "load_version", load_and_replace_champion)
    set_items(parent, range(1000, 1310))
    new_version = refresh(parent, workspace)
    assert new_version is not None
    assert new_version.problems == ("another version became champion during the refresh; repeat it",)
    assert version_by_alias(client) == {"champion": "3", "challenger": "2"}


def test_without_a_champion_there_is_nothing_to_refresh(parent: SmallPipeline, client: MlflowClient, workspace: Path) -> None:
    client.delete_registered_model_alias("m", "champion")
    with pytest.raises(InputError, match=r"^m has no champion to refresh; train one with `nightjar run`$"):
        refresh(parent, workspace)


def test_the_error_of_a_champion_with_a_changed_file_names_the_file(
    parent: SmallPipeline, client: MlflowClient, workspace: Path
) -> None:
    set_items(parent, range(1000, 1310))
    (weight_path,) = workspace.glob("mlartifacts/**/candidate.safetensors")
    weight_path.write_bytes(weight_path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(StageError, match=r"candidate\.safetensors: the file has"):
        refresh(parent, workspace)
    assert len(client.search_model_versions("name = 'm'")) == 1
