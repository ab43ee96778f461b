"""The gate in concurrent runs and with too few users; real packages on a real sqlite MLflow."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recsys_core.comparison.decision import ALARM_E_VALUE, read_evidence
from recsys_core.comparison.rules import PairedBootstrap
from recsys_core.dataset.feature_store import Feature, FeatureStore
from recsys_core.errors import InputError
from recsys_core.evaluation.config import FeatureSlice
from recsys_core.evaluation.metrics import COMPARED_METRICS, UserMetrics
from recsys_core.manifests import IngestedFeature, RegistrationManifest
from tasks.gate import gate, version_tester
from tasks.gate.sample import Answers, UserSample
from tasks.registry.loading import load_version
from tasks.registry.mlflow_client import connect
from tasks.registry.releases import CHALLENGERS_TAG, MANUAL_CHANGE_TAG, REFIT_OF_TAG
from tests.recsys_core.evaluation.stage_folders import write_features_stage
from tests.tasks.conftest import NUM_ITEMS, NUM_USERS, AddVersions, BuildStages
from tests.tasks.registration import prepare_run, register_version, version_by_alias, version_tags

pytestmark = pytest.mark.usefixtures("empty_plots")

PERFECT_METRICS = UserMetrics(np.arange(NUM_USERS), {metric: np.ones(NUM_USERS) for metric in COMPARED_METRICS})


def test_a_champion_promoted_during_a_comparison_is_compared_too(
    workspace: Path,
    build_stages: BuildStages,
    add_versions: AddVersions,
    in_process_predictions: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_versions("bad")
    predict = version_tester.predict_in_subprocess
    unregistered_stages = [build_stages()]  # the first call empties this list

    def promote_meanwhile(sample: UserSample, *, model_uri: str, **options: Any) -> Answers:
        answers = predict(sample, model_uri=model_uri, **options)
        if model_uri == "models:/m/1" and unregistered_stages:
            register_version(unregistered_stages.pop(), prepare_run(workspace, "better"))
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


def test_with_too_few_users_the_champion_stays_and_the_page_has_the_needed_number_of_users(
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

    def put_unknown_item_first(sample: UserSample, *, model_uri: str, **options: Any) -> Answers:
        answers = predict(sample, model_uri=model_uri, **options)
        if model_uri == "models:/m/2":
            return answers
        item_id_lists = [[-7, *item_ids[:-1]] for item_ids in answers.item_ids.to_pylist()]
        return answers._replace(item_ids=pa.array(item_id_lists, type=answers.item_ids.type))

    monkeypatch.setattr(version_tester, "predict_in_subprocess", put_unknown_item_first)
    equal_registration = register_version(build_stages(), prepare_run(workspace, "two"))
    assert equal_registration.metrics["champion/hit_rate@10"] == equal_registration.metrics["served/hit_rate@10"]
    assert equal_registration.promoted and equal_registration.reasons[-1] == (
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
    new_registration = register_version(build_stages(), prepare_run(workspace, "two"), baselines=("popularity",))
    assert (new_registration.state_name, version_by_alias(connect(workspace))["champion"]) == ("NotPromoted", "1")
    assert len(new_registration.reasons) == 1 and new_registration.reasons[0].endswith(
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
    feature_store = FeatureStore({"item.brand": Feature(brand_I, None, None)})
    features = write_features_stage(tmp_path / "features", feature_store, ingested_by_feature={"item.brand": brand_manifest})
    options: dict[str, Any] = {"feature_slices": (FeatureSlice(feature="item.brand", max_values=2, min_users=10),)}
    for run_id, is_shuffled in (("one", False), ("two", True)):
        context = prepare_run(workspace, run_id)
        context.results.add(features)
        registration = register_version(build_stages(shuffled=is_shuffled), context, **options)
    evidence = read_evidence(context.run.folder / "register")
    brand_evidence = [fact for fact in evidence if "item.brand" in fact.subject]
    assert {fact.subject for fact in brand_evidence} <= {
        f"recall@20 of item.brand={name}" for name in ("(other)", "(hash 1)", "(hash 2)")
    }
    assert len(brand_evidence) == 2
    assert {fact.comparison.outcome for fact in brand_evidence} == {"rejected"} and not registration.promoted
    for fact in brand_evidence:  # only users with a target of the brand are compared
        assert 10 <= fact.comparison.num_users <= NUM_USERS and fact.comparison.baseline_mean > 0.5


def test_a_champion_that_does_not_lose_is_not_reported(
    workspace: Path, build_stages: BuildStages, add_versions: AddVersions, in_process_predictions: list[str]
) -> None:
    add_versions("good")
    registration = register_version(build_stages(), prepare_run(workspace, "two", promote="never"))
    e_value = float(version_tags(connect(workspace), "1")[CHALLENGERS_TAG])
    assert e_value < ALARM_E_VALUE and len(registration.reasons) == 1


def test_a_champion_that_loses_is_reported_and_a_resumed_run_counts_once(
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
