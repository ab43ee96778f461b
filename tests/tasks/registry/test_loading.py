"""Registered models that are not loaded, because they do not exist or are forged, and the removal of downloaded files."""

import gc
import os
import tempfile
from pathlib import Path

import mlflow
import pytest
from mlflow.entities import FileInfo
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import _artifact_repository_registry
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from recsys_core.errors import InputError, StageError
from tasks.gate.sample import prepare_sample
from tasks.gate.smoke_test import ModelProcess, UnusableVersionError, predict_in_subprocess
from tasks.registry.loading import LOGGED_MODELS_FILE_NAME, PACKAGE_SHA256_TAG, load_model, load_version
from tasks.registry.mlflow_client import connect
from tests.tasks.conftest import AddVersions, BuildStages
from tests.tasks.registration import prepare_run, register_version

pytestmark = pytest.mark.usefixtures("empty_plots")

FOREIGN_MODEL_CODE = """
import pathlib
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel
pathlib.Path({marker_path!r}).touch()
class Foreign(PythonModel):
    def predict(self, context, model_input, params=None):
        return []
set_model(Foreign())
"""


def register_foreign_model(workspace: Path, outside_folder: Path) -> Path:
    """Register a model with foreign code and a forged tag as champion. Return the path of the file that the code creates."""
    marker_path, code_path = outside_folder / "executed", outside_folder / "evil.py"
    code_path.write_text(FOREIGN_MODEL_CODE.format(marker_path=str(marker_path)))
    client = connect(workspace)
    mlflow.set_tracking_uri(client.tracking_uri)
    experiment_id = client.create_experiment("foreign", artifact_location=(outside_folder / "artifacts").as_uri())
    with mlflow.start_run(experiment_id=experiment_id):
        logged_model = mlflow.pyfunc.log_model(name="retriever", python_model=str(code_path), pip_requirements=[])
    marker_path.unlink(missing_ok=True)  # log_model runs the code
    client.create_registered_model("m")
    version = client.create_model_version("m", logged_model.model_uri, tags={PACKAGE_SHA256_TAG: "0" * 64})
    client.set_registered_model_alias("m", "champion", version.version)
    return marker_path


@pytest.fixture
def outside_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside of the workspace."""
    return tmp_path_factory.mktemp("outside")


def test_the_code_of_a_model_outside_the_workspace_is_not_executed(
    workspace: Path, outside_folder: Path, build_stages: BuildStages
) -> None:
    marker_path = register_foreign_model(workspace, outside_folder)
    with pytest.raises(StageError, match=r"^models:/m/1: no run of this workspace logged this model: its files are in .*out"):
        load_version(workspace, model_name="m")
    sample = prepare_sample(build_stages().dataset.interactions, max_users=3, folder=workspace / "sample")
    raises_error = pytest.raises(UnusableVersionError, match="no run of this workspace logged this model")
    with ModelProcess() as process, raises_error:
        predict_in_subprocess(
            sample,
            model_uri="models:/m/1",
            client=connect(workspace),
            workspace=workspace,
            process=process,
            output_file=workspace / "answers.parquet",
        )
    assert not marker_path.exists()


@pytest.mark.parametrize("edited_file", ["pyfunc_model.py", "code/recsys_core/errors.py", "MLmodel", "new.py"])
def test_a_registered_model_with_a_changed_or_new_file_is_not_executed(
    workspace: Path, outside_folder: Path, add_versions: AddVersions, in_process_predictions: list[str], edited_file: str
) -> None:
    add_versions("good")
    load_version(workspace, model_name="m")
    (mlmodel,) = (workspace / "mlartifacts").rglob("MLmodel")
    with (mlmodel.parent / edited_file).open("a") as file:
        file.write(f"\n# {outside_folder}\n")
    with pytest.raises(StageError, match=rf"has the sha256 \w+, which is not in {workspace / LOGGED_MODELS_FILE_NAME}"):
        load_version(workspace, model_name="m")


@pytest.mark.parametrize("cut_off_line", ["", "5f3a"], ids=["empty file", "half a line"])
def test_a_cut_off_line_in_the_file_of_logged_models_does_not_affect_the_next_model(
    workspace: Path, build_stages: BuildStages, in_process_predictions: list[str], cut_off_line: str
) -> None:
    (workspace / LOGGED_MODELS_FILE_NAME).write_text(cut_off_line)
    register_version(build_stages(), prepare_run(workspace, "one"))
    assert load_version(workspace, model_name="m").version == "1"


@pytest.mark.parametrize(
    "version", ["2", "9" * 9, "9" * 19, "9" * 5_000], ids=["one digit", "9 digits", "19 digits", "5000 digits"]
)
def test_a_version_that_does_not_exist_is_an_input_error_whatever_its_number(workspace: Path, version: str) -> None:
    connect(workspace).create_registered_model("m")
    with pytest.raises(InputError, match=f"version.*{version[:50]}.*; list the versions with `nightjar releases`$"):
        load_version(workspace, model_name="m", version=version)


def test_zeros_at_the_beginning_of_a_version_number_are_ignored(workspace: Path) -> None:
    connect(workspace).create_registered_model("m")
    with pytest.raises(InputError, match=r"^models:/m/7: "):
        load_version(workspace, model_name="m", version="007")


def test_the_message_about_an_unknown_alias_does_not_suggest_a_promotion(workspace: Path) -> None:
    connect(workspace).create_registered_model("m")
    message = r"^the registered model 'm' has no version with the alias 'weekly' in sqlite:.*; list the aliases with"
    with pytest.raises(InputError, match=message):
        load_version(workspace, model_name="m", version="weekly")


class RemoteRepository(ArtifactRepository):
    """An artifact store that is not a local disk for MLflow, so that MLflow downloads each file."""

    def __init__(self, artifact_uri: str, *arguments: object, **options: object) -> None:
        super().__init__(artifact_uri)
        self._files = LocalArtifactRepository(artifact_uri.removeprefix("remote:"))

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        self._files.log_artifact(local_file, artifact_path)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        self._files.log_artifacts(local_dir, artifact_path)

    def list_artifacts(self, path: str | None) -> list[FileInfo]:
        return list(self._files.list_artifacts(path))

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        self._files._download_file(remote_file_path, local_path)


@pytest.fixture
def download_folder(
    workspace: Path,
    outside_folder: Path,
    build_stages: BuildStages,
    in_process_predictions: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """The empty folder into which MLflow downloads the files of version 1 of the model m."""
    monkeypatch.setitem(_artifact_repository_registry._registry, "remote", RemoteRepository)
    monkeypatch.setattr(tempfile, "tempdir", str(outside_folder))
    connect(workspace).create_experiment("tests", artifact_location=f"remote:{workspace / 'store'}")
    register_version(build_stages(), prepare_run(workspace, "one"))
    temporary_folder = outside_folder / "temporary"
    temporary_folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary_folder))
    return temporary_folder


def test_downloaded_files_of_a_version_are_removed_when_its_retriever_is_freed(workspace: Path, download_folder: Path) -> None:
    client, other_workspace = connect(workspace), workspace / "other"
    model = load_model("models:/m/1", client=client, workspace=other_workspace)
    assert [path.name for path in download_folder.rglob("package.json")] == ["package.json"]
    retriever = model.unwrap_python_model().retriever
    assert len(retriever.recommend(["user-0"], k=5).item_ids[0]) == 5
    del retriever, model.unwrap_python_model().retriever
    gc.collect()
    assert not any(download_folder.iterdir())
    with pytest.raises(StageError, match=r"package\.json: the sha256 is "):
        client.set_model_version_tag("m", "1", PACKAGE_SHA256_TAG, "0" * 64)
        load_model("models:/m/1", client=client, workspace=other_workspace)
    assert not any(download_folder.iterdir())


def test_a_fork_does_not_remove_the_downloaded_files_of_its_parent(
    workspace: Path, download_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model("models:/m/1", client=connect(workspace), workspace=workspace / "other")
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a fork
    del model.unwrap_python_model().retriever
    gc.collect()
    assert len([*download_folder.rglob("package.json")]) == 1


def test_downloaded_files_of_a_version_are_removed_after_its_answers(
    workspace: Path, download_folder: Path, build_stages: BuildStages
) -> None:
    sample = prepare_sample(build_stages().dataset.interactions, max_users=3, folder=workspace / "sample")
    with ModelProcess() as process:
        answers = predict_in_subprocess(
            sample,
            model_uri="models:/m/1",
            client=connect(workspace),
            workspace=workspace / "other",
            process=process,
            output_file=workspace / "answers.parquet",
        )
    assert answers.num_bytes > 100_000
    assert not any(download_folder.iterdir())
