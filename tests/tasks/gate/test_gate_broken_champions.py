"""The gate with a champion that does not load or does not answer; real packages on a real sqlite MLflow."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from recsys_core.errors import StageError, TrackingServerError
from tasks.gate import gate, version_tester
from tasks.gate.sample import Answers, UserSample
from tasks.gate.smoke_test import ModelProcess, NotFetchedError, predict_in_subprocess
from tasks.registry import mlflow_client
from tasks.registry.loading import record_logged_model
from tasks.registry.mlflow_client import connect
from tasks.registry.releases import CHALLENGERS_TAG, LOAD_ERROR_TAG
from tasks.stages import registration
from tests.tasks.conftest import AddVersions, BuildStages
from tests.tasks.gate.test_gate import PERFECT_METRICS
from tests.tasks.registration import prepare_run, register_version, version_by_alias, version_tags

pytestmark = pytest.mark.usefixtures("empty_plots")


def package_folder(workspace: Path, version: str) -> Path:
    """Return the folder of a version's files in the artifact store."""
    client = connect(workspace)
    files_uri = client.get_model_version_download_uri("m", version)
    if files_uri.startswith("models:"):
        files_uri = client.get_logged_model(files_uri.removeprefix("models:/")).artifact_location
    return Path(files_uri.removeprefix("file://"))


def flip_a_bit(workspace: Path, version: str) -> None:
    """Change a bit of the largest weight file of a version."""
    weight_path = max(package_folder(workspace, version).rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    weight_bytes = bytearray(weight_path.read_bytes())
    weight_bytes[-1] ^= 1
    weight_path.write_bytes(weight_bytes)


def append_code(workspace: Path, version: str, code: str) -> None:
    """Append `code` to the Python file of a version, as if a run had logged the version with this code."""
    client = connect(workspace)
    with (package_folder(workspace, version) / "pyfunc_model.py").open("a") as file:
        file.write(f"\n{code}\n")
    model_uri = client.get_model_version("m", version).source
    assert model_uri is not None
    record_logged_model(model_uri, client=client, workspace=workspace)


def test_a_champion_with_a_flipped_bit_is_replaced_and_reported(
    workspace: Path,
    build_stages: BuildStages,
    add_versions: AddVersions,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_versions("good")
    flip_a_bit(workspace, "1")
    monkeypatch.setattr(logging.getLogger("nightjar"), "propagate", True)  # so that caplog gets the errors
    new_registration = register_version(build_stages(), prepare_run(workspace, "two"), baselines=("popularity",))
    assert (new_registration.alias, version_by_alias(connect(workspace))) == ("champion", {"champion": "2"})
    assert new_registration.reasons[0] == "no former champion loads" and new_registration.reasons[1].endswith("of popularity")
    assert new_registration.alarm is not None
    assert new_registration.alarm.startswith(
        "the champion, version 1, does not load (models:/m/1: does not answer in a fresh process"
    )
    assert new_registration.alarm.endswith("; version 2 is champion instead")
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [f"m: {new_registration.alarm}"]
    assert version_tags(connect(workspace), "1")[LOAD_ERROR_TAG].startswith("models:/m/1: ")


def test_a_champion_without_answers_is_replaced_by_the_last_champion_that_answers(
    workspace: Path,
    build_stages: BuildStages,
    add_versions: AddVersions,
    in_process_predictions: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_versions("good", "good", "good")
    append_code(workspace, "2", "import os; os.write(2, b'no \\xff\\n'); os._exit(1)")
    append_code(workspace, "3", "import os; NightjarModel.predict = lambda *_, **__: os._exit(0)")
    predict_in_this_process = version_tester.predict_in_subprocess

    def predict(sample: UserSample, *, model_uri: str, **options: Any) -> Answers:
        is_broken = model_uri in ("models:/m/2", "models:/m/3")
        return (predict_in_subprocess if is_broken else predict_in_this_process)(sample, model_uri=model_uri, **options)

    monkeypatch.setattr(version_tester, "predict_in_subprocess", predict)
    monkeypatch.setattr(registration, "ModelProcess", ModelProcess)
    new_registration = register_version(build_stages(shuffled=True), prepare_run(workspace, "four"))
    client = connect(workspace)
    assert version_by_alias(client) == {"champion": "1", "challenger": "4"}
    assert new_registration.alarm == (
        "the champion, version 3, does not load (models:/m/3: its process ended without a readable file of answers with the "
        "column item_ids (FileNotFoundError)); version 1 is champion instead"
    )
    assert version_tags(client, "2")[LOAD_ERROR_TAG].endswith("(exit 1): no \ufffd")


def test_a_broken_champion_is_replaced_by_a_former_champion_that_beats_the_new_version(
    workspace: Path, build_stages: BuildStages, add_versions: AddVersions, in_process_predictions: list[str]
) -> None:
    add_versions("good", "good")
    flip_a_bit(workspace, "2")
    worse_registration = register_version(build_stages(shuffled=True), prepare_run(workspace, "three"))
    assert version_by_alias(connect(workspace)) == {"champion": "1", "challenger": "3"}
    assert worse_registration.reasons[0].endswith("of version 1")
    assert worse_registration.alarm is not None and worse_registration.alarm.endswith("; version 1 is champion instead")
    better_registration = register_version(build_stages(), prepare_run(workspace, "four"))
    assert (better_registration.alarm, version_by_alias(connect(workspace))["champion"]) == (None, "4")


def test_the_stage_fails_if_no_version_can_be_champion(
    workspace: Path,
    build_stages: BuildStages,
    add_versions: AddVersions,
    in_process_predictions: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_versions("good")
    package_copy = shutil.copytree(package_folder(workspace, "1"), workspace / "intact")
    flip_a_bit(workspace, "1")
    monkeypatch.setattr(gate, "read_user_metrics", lambda path, user_rows: {"popularity": PERFECT_METRICS})
    baselines: tuple[str, ...] = ("popularity",)
    with pytest.raises(
        StageError,
        match=r"^m: the champion, version 1, does not load .*; no other version becomes champion; recall@20 is .*; no former",
    ):
        register_version(build_stages(shuffled=True), prepare_run(workspace, "two"), baselines=baselines)
    client = connect(workspace)
    assert version_by_alias(client) == {"champion": "1", "challenger": "2"}
    assert LOAD_ERROR_TAG in version_tags(client, "1")
    assert CHALLENGERS_TAG not in version_tags(client, "1")  # no version was compared with the champion
    shutil.copytree(package_copy, package_folder(workspace, "1"), dirs_exist_ok=True)
    resumed_registration = register_version(build_stages(shuffled=True), prepare_run(workspace, "two"), baselines=baselines)
    assert (resumed_registration.version, resumed_registration.alias, resumed_registration.alarm) == ("2", "challenger", None)
    assert LOAD_ERROR_TAG not in version_tags(client, "1")


@pytest.mark.parametrize("cause", ["the files of the champion are gone", "MLflow does not work"])
def test_a_champion_that_cannot_be_fetched_is_marked_as_broken_only_if_mlflow_works(
    workspace: Path,
    build_stages: BuildStages,
    add_versions: AddVersions,
    in_process_predictions: list[str],
    monkeypatch: pytest.MonkeyPatch,
    cause: str,
) -> None:
    add_versions("good")
    predict, unreachable_uris = version_tester.predict_in_subprocess, {"models:/m/1"}

    def fetch(sample: UserSample, *, model_uri: str, **options: Any) -> Answers:
        if model_uri in unreachable_uris:
            if cause == "MLflow does not work":
                unreachable_uris.add("models:/m/2")
            raise NotFetchedError(f"{model_uri}: not fetched")
        return predict(sample, model_uri=model_uri, **options)

    monkeypatch.setattr(version_tester, "predict_in_subprocess", fetch)
    monkeypatch.setattr(mlflow_client, "RETRY_TIMEOUT_S", 0.0)
    if cause == "MLflow does not work":
        with pytest.raises(TrackingServerError, match="models:/m/2: not fetched"):
            register_version(build_stages(), prepare_run(workspace, "two"))
        assert version_by_alias(connect(workspace)) == {"champion": "1"}
        assert LOAD_ERROR_TAG not in version_tags(connect(workspace), "1")
    else:
        assert register_version(build_stages(), prepare_run(workspace, "two")).alias == "champion"
        assert LOAD_ERROR_TAG in version_tags(connect(workspace), "1")
