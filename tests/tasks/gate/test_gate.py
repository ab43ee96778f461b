"""The gate in concurrent runs, with a broken champion and with too few users; real packages on a real sqlite MLflow."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recsys_core.comparison.decision import ALARM_E_VALUE, read_evidence
from recsys_core.comparison.rules import PairedBootstrap
from recsys_core.dataset.feature_store import Feature, FeatureStore
from recsys_core.errors import InputError, StageError, TrackingServerError
from recsys_core.evaluation.config import FeatureSlice
from recsys_core.evaluation.metrics import COMPARED_METRICS, UserMetrics
from recsys_core.manifests import IngestedFeature, RegistrationManifest
from tasks.gate import gate, version_tester
from tasks.gate.sample import Answers, UserSample
from tasks.gate.smoke_test import ModelProcess, NotFetchedError, predict_in_subprocess
from tasks.registry import mlflow_client
from tasks.registry.loading import load_version, record_logged_model
from tasks.registry.mlflow_client import connect
from tasks.registry.releases import CHALLENGERS_TAG, LOAD_ERROR_TAG, MANUAL_CHANGE_TAG, REFIT_OF_TAG
from tasks.stages import registration
from tests.recsys_core.evaluation.stage_folders import write_features_stage
from tests.tasks.conftest import NUM_ITEMS, NUM_USERS, Stages
from tests.tasks.registration import prepare_run, register_version, version_by_alias, version_tags

pytestmark = pytest.mark.usefixtures("empty_plots")

BuildStages = Callable[..., Stages]
AddVersions = Callable[..., None]
PERFECT_METRICS = UserMetrics(np.arange(NUM_USERS), {metric: np.ones(NUM_USERS) for metric in COMPARED_METRICS})


@pytest.fixture(autouse=True)
def logs_reach_caplog(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("nightjar"), "propagate", True)


def package_folder(workspace: Path, version: str) -> Path:
    """Return the folder of a version's files in the artifact store."""
    client = connect(workspace)
    source = client.get_model_version_download_uri("m", version)
    if source.startswith("models:"):
        source = client.get_logged_model(source.removeprefix("models:/")).artifact_location
    return Path(source.removeprefix("file://"))


def flip_a_bit(workspace: Path, version: str) -> None:
    """Change a bit of the largest weight file of a version."""
    file = max(package_folder(workspace, version).rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def append_code(workspace: Path, version: str, code: str) -> None:
    """Append `code` to the Python file of a version, as if a run had logged the version with it."""
    client = connect(workspace)
    with (package_folder(workspace, version) / "pyfunc_model.py").open("a") as file:
        file.write(f"\n{code}\n")
    source = client.get_model_version("m", version).source
    assert source is not None
    record_logged_model(source, client=client, workspace=workspace)


def test_a_champion_promoted_during_a_comparison_is_compared_too(
    workspace: Path,
    build_stages: BuildStages,
    add_versions: AddVersions,
    in_process_predictions: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_versions("bad")
    predict, better_stages = version_tester.predict_in_subprocess, [build_stages()]  # a list, to register them only once

    def promote_meanwhile(sample: UserSample, *, model_uri: str, **options: Any) -> Answers:
        answers = predict(sample, model_uri=model_uri, **options)
        if model_uri == "models:/m/1" and better_stages:
            register_version(better_stages.pop(), prepare_run(workspace, "better"))
        return answers

    monkeypatch.setattr(version_tester, "predict_in_subprocess", promote_meanwhile)
    worse_registration = register_version(build_stages(shuffled=True), prepare_run(workspace, "worse"))
    assert version_by_alias(connect(workspace)) == {"champion": "3", "challenger": "2"}
    assert worse_registration.alias == "challenger" and worse_registration.reasons[0].endswith("of version 3")
    assert in_process_predictions.count("models:/m/2") == 1  # the same answers are compared with version 1 and version 3


def test_a_version_is_compared_again_if_its_champion_is_withdrawn_meanwhile(
    workspace: Path,
    build_stages: BuildStages,
    add_versions: AddVersions,
    in_process_predictions: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_versions("bad", "good")
    client, predict = connect(workspace), version_tester.predict_in_subprocess

    def roll_back_meanwhile(sample: UserSample, *, model_uri: str, **options: Any) -> Answers:
        if model_uri == "models:/m/2":
            client.set_registered_model_alias("m", "champion", "1")
        return predict(sample, model_uri=model_uri, **options)

    monkeypatch.setattr(version_tester, "predict_in_subprocess", roll_back_meanwhile)
    new_registration = register_version(build_stages(shuffled=True), prepare_run(workspace, "three"))
    assert (new_registration.alias, version_by_alias(client)) == ("champion", {"champion": "3"})
    assert new_registration.reasons[0].endswith("of version 1")


def test_a_version_that_a_person_promotes_during_its_comparison_stays_champion(
    workspace: Path,
    build_stages: BuildStages,
    add_versions: AddVersions,
    in_process_predictions: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_versions("good")
    client, predict = connect(workspace), version_tester.predict_in_subprocess

    def promote_meanwhile(sample: UserSample, *, model_uri: str, **options: Any) -> Answers:
        if model_uri == "models:/m/1":
            client.set_registered_model_alias("m", "champion", "2")
            client.set_model_version_tag("m", "2", MANUAL_CHANGE_TAG, "promoted by hand, replaces version 1: sale")
        return predict(sample, model_uri=model_uri, **options)

    monkeypatch.setattr(version_tester, "predict_in_subprocess", promote_meanwhile)
    worse_registration = register_version(build_stages(shuffled=True), prepare_run(workspace, "two"))
    assert (worse_registration.alias, version_by_alias(client)) == ("champion", {"champion": "2"})
    assert worse_registration.reasons[0] == "the champion was changed by hand: promoted by hand, replaces version 1: sale"
    assert "less than 0.98 times the" in worse_registration.reasons[1]


def test_a_new_version_is_compared_with_the_version_that_a_refit_repeats(
    workspace: Path, build_stages: BuildStages, add_versions: AddVersions, in_process_predictions: list[str]
) -> None:
    add_versions("bad", "good")
    client = connect(workspace)
    client.set_model_version_tag("m", "2", REFIT_OF_TAG, "1")
    # The new version is as good as version 1 and worse than version 2.
    new_registration = register_version(build_stages(shuffled=True), prepare_run(workspace, "three"))
    assert (new_registration.alias, version_by_alias(client)) == ("champion", {"champion": "3"})
    assert (
        new_registration.reasons[-1]
        == "the champion, version 2, may have been trained on the test events: it is the refit of version 1"
    )

    register_version(build_stages(), prepare_run(workspace, "four"))
    client.set_model_version_tag("m", "4", REFIT_OF_TAG, "99")
    new_registration = register_version(build_stages(shuffled=True), prepare_run(workspace, "five"))
    assert new_registration.alias == "challenger"
    reason = "the champion, version 4, may have been trained on the test events: it is the refit of version 99"
    assert new_registration.reasons[-1] == f"{reason}, which is not in the registry any more"


def test_a_champion_with_a_flipped_bit_is_replaced_and_reported(
    workspace: Path,
    build_stages: BuildStages,
    add_versions: AddVersions,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    predict_in_fresh_process = version_tester.predict_in_subprocess
    request.getfixturevalue("in_process_predictions")
    add_versions("good")
    flip_a_bit(workspace, "1")
    monkeypatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setattr(version_tester, "predict_in_subprocess", predict_in_fresh_process)
    monkeypatch.setattr(registration, "ModelProcess", ModelProcess)
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
    predict_here = version_tester.predict_in_subprocess

    def predict(sample: UserSample, *, model_uri: str, **options: Any) -> Answers:
        is_broken = model_uri in ("models:/m/2", "models:/m/3")
        return (predict_in_subprocess if is_broken else predict_here)(sample, model_uri=model_uri, **options)

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


def test_if_no_version_can_be_champion_the_stage_fails(
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


def test_with_too_few_users_the_champion_stays_and_the_page_has_the_needed_number(
    workspace: Path, build_stages: BuildStages, add_versions: AddVersions, in_process_predictions: list[str]
) -> None:
    add_versions("good")
    context = prepare_run(workspace, "two")
    equal_registration = register_version(build_stages(), context, gate=PairedBootstrap(num_resamples=100))
    assert (equal_registration.state_name, equal_registration.alias, version_by_alias(connect(workspace))["champion"]) == (
        "NotEnoughData",
        "challenger",
        "1",
    )
    assert "30 test users, but the gate needs at least 200" in equal_registration.reasons[0]
    assert equal_registration.reasons[-1] == "about 200 test users would be enough for a decision"
    page = (context.run.folder / RegistrationManifest.pages["decision"]).read_text()
    assert 'verdict warn"><h2>Not enough data for a decision: the version is a challenger</h2>' in page
    assert equal_registration.reasons[-1] in page


def test_with_too_few_users_not_even_the_first_version_becomes_champion(
    workspace: Path, build_stages: BuildStages, in_process_predictions: list[str]
) -> None:
    for run_id in ("one", "two"):
        new_registration = register_version(
            build_stages(), prepare_run(workspace, run_id), gate=PairedBootstrap(num_resamples=100), baselines=("popularity",)
        )
        assert new_registration.state_name == "NotEnoughData" and "champion" not in version_by_alias(connect(workspace))
        assert new_registration.reasons[0].endswith(
            "not compared with popularity: 30 test users, but the gate needs at least 200"
        )
    with pytest.raises(InputError, match="; promote the challenger with `nightjar promote --version 2`, or"):
        load_version(workspace, model_name="m")


def test_a_champion_of_another_catalogue_is_compared_on_the_common_items(
    workspace: Path,
    build_stages: BuildStages,
    add_versions: AddVersions,
    in_process_predictions: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_versions("good")
    predict = version_tester.predict_in_subprocess

    def rename_first_items(sample: UserSample, *, model_uri: str, **options: Any) -> Answers:
        answers = predict(sample, model_uri=model_uri, **options)
        if model_uri == "models:/m/2":
            return answers
        item_id_lists = [[-7, *item_ids[:-1]] for item_ids in answers.item_ids.to_pylist()]
        return answers._replace(item_ids=pa.array(item_id_lists, type=answers.item_ids.type))

    monkeypatch.setattr(version_tester, "predict_in_subprocess", rename_first_items)
    same_registration = register_version(build_stages(), prepare_run(workspace, "two"))
    assert same_registration.metrics["champion/hit_rate@10"] == same_registration.metrics["served/hit_rate@10"]
    assert same_registration.promoted and same_registration.reasons[-1] == (
        "version 1 was trained on another catalogue: 30 of 600 recommendations are items that this run does not have, and are "
        "left out of its lists"
    )


def test_a_version_as_good_as_the_champion_is_refused_if_popularity_is_better(
    workspace: Path,
    build_stages: BuildStages,
    add_versions: AddVersions,
    in_process_predictions: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_versions("good")
    monkeypatch.setattr(gate, "read_user_metrics", lambda path, user_rows: {"popularity": PERFECT_METRICS})
    worse_registration = register_version(build_stages(), prepare_run(workspace, "two"), baselines=("popularity",))
    assert (worse_registration.state_name, version_by_alias(connect(workspace))["champion"]) == ("NotPromoted", "1")
    assert len(worse_registration.reasons) == 1 and worse_registration.reasons[0].endswith(
        "less than 1 times the 1.0000 of popularity"
    )


def test_a_version_that_is_worse_on_a_slice_of_a_guarded_feature_is_rejected(
    workspace: Path, build_stages: BuildStages, in_process_predictions: list[str], tmp_path: Path
) -> None:
    brand_I = np.arange(NUM_ITEMS, dtype=np.int32) % 3  # rows of the brand table; row 0 is (other)
    brand_manifest = IngestedFeature(
        kind="categorical",
        num_rows=3,
        num_values=NUM_ITEMS,
        num_out_of_vocabulary=0,
        num_missing=0,
        definition="",
        is_continued=False,
    )
    store = FeatureStore({"item.brand": Feature(brand_I, None, None)})
    features = write_features_stage(tmp_path / "features", store, ingested_by_feature={"item.brand": brand_manifest})
    options: dict[str, Any] = {"feature_slices": (FeatureSlice(feature="item.brand", max_values=2, min_users=10),)}
    for run_id, is_shuffled in (("one", False), ("two", True)):
        context = prepare_run(workspace, run_id)
        context.results.add(features)
        registration = register_version(build_stages(shuffled=is_shuffled), context, **options)
    evidence = read_evidence(context.run.folder / "register")
    brand_evidence = [item for item in evidence if "item.brand" in item.subject]
    assert {item.subject for item in brand_evidence} <= {
        f"recall@20 of item.brand={name}" for name in ("(other)", "(hash 1)", "(hash 2)")
    }
    assert len(brand_evidence) == 2
    assert {item.comparison.outcome for item in brand_evidence} == {"rejected"} and not registration.promoted
    for item in brand_evidence:  # only users with a target of the brand are compared
        assert 10 <= item.comparison.num_users <= NUM_USERS and item.comparison.baseline_mean > 0.5


def test_a_champion_that_does_not_lose_is_not_reported(
    workspace: Path, build_stages: BuildStages, add_versions: AddVersions, in_process_predictions: list[str]
) -> None:
    add_versions("good")
    registration = register_version(build_stages(), prepare_run(workspace, "two", promote="never"))
    e_value = float(version_tags(connect(workspace), "1")[CHALLENGERS_TAG])
    assert e_value < ALARM_E_VALUE and len(registration.reasons) == 1


def test_a_champion_that_loses_is_reported_and_a_resumed_run_counts_once_against_it(
    workspace: Path, build_stages: BuildStages, add_versions: AddVersions, in_process_predictions: list[str]
) -> None:
    add_versions("bad")
    first_registration = register_version(build_stages(), prepare_run(workspace, "two", promote="never"))
    assert len(first_registration.reasons) == 2
    assert first_registration.reasons[1].startswith("version 1 has been losing to versions that were not promoted")
    client = connect(workspace)
    e_value_text = version_tags(client, "1")[CHALLENGERS_TAG]
    context = prepare_run(workspace, "two", promote="never")
    shutil.rmtree(context.folder(RegistrationManifest))  # the run was killed before the stage was complete
    resumed_registration = register_version(build_stages(), context)
    assert version_tags(client, "1")[CHALLENGERS_TAG] == e_value_text and float(e_value_text) >= ALARM_E_VALUE
    assert resumed_registration.reasons == first_registration.reasons


def test_a_version_compared_only_with_baselines_has_no_reason_about_the_margin(
    workspace: Path, build_stages: BuildStages, in_process_predictions: list[str]
) -> None:
    rule = PairedBootstrap(min_users=2, max_relative_drop=0.001)
    registration = register_version(build_stages(), prepare_run(workspace, "one"), gate=rule, baselines=("popularity",))
    assert registration.promoted
    assert registration.reasons[0] == "there was no champion"
    assert "of popularity" in registration.reasons[1]
    assert not [reason for reason in registration.reasons if "test a margin" in reason]
