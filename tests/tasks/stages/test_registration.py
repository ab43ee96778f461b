"""Registration of real packages in MLflow on sqlite. In most tests, the smoke test runs in the process of the test."""

import json
import re
import shutil
import sys
from pathlib import Path

import mlflow
import pandas as pd
import pytest

from recsys_core.errors import InputError, StageError
from recsys_core.manifests import RegistrationManifest
from tasks.delivery import publishers
from tasks.delivery.publishers import AliasChange
from tasks.gate import version_tester
from tasks.gate.sample import prepare_sample
from tasks.gate.smoke_test import ModelProcess
from tasks.registry.loading import load_version
from tasks.registry.mlflow_client import connect
from tasks.registry.releases import champion_of, list_releases
from tasks.stages.registration import verdict_page
from tests.tasks.conftest import NUM_ITEMS, STEPS, AddVersions, BuildStages
from tests.tasks.registration import (
    prepare_run,
    recommend_unknown_items,
    register_version,
    version_by_alias,
    version_tags,
)

pytestmark = pytest.mark.usefixtures("empty_plots")


def test_the_first_version_answers_in_a_fresh_process_and_becomes_champion(workspace: Path, build_stages: BuildStages) -> None:
    registration = register_version(build_stages(), prepare_run(workspace, "one"))
    assert (registration.version, registration.alias, registration.promoted, registration.reasons) == (
        "1",
        "champion",
        True,
        ("there was no champion",),
    )
    exact_metrics = build_stages().evaluation.metrics
    for metric in ("recall@20", "hit_rate@10", "ndcg@20"):  # 8-bit vectors change only the order within a cluster
        assert registration.metrics[f"served/{metric}"] == pytest.approx(exact_metrics[f"test/{metric}"], abs=0.15)
    assert registration.metrics["served/recall@20"] > 0.5

    client = connect(workspace)
    champion = champion_of(client, "m")
    assert champion is not None and str(champion.version) == "1"
    mlflow_run = client.get_run(registration.mlflow_run_id)
    artifact_names = {file.path for file in client.list_artifacts(registration.mlflow_run_id)}
    assert artifact_names == {
        "config.yaml",
        "plan.json",
        "data_fingerprints.json",
        "data_report",
        "decision.html",
        "loss.png",
        "recall.png",
        "indexes.png",
    }
    assert mlflow_run.data.metrics["test/recall_at_20"] == exact_metrics["test/recall@20"]
    model_uri = client.get_model_version("m", "1").source
    assert model_uri is not None
    logged_model = client.get_logged_model(model_uri.removeprefix("models:/"))
    assert (logged_model.name, logged_model.status, logged_model.params) == ("retriever", "READY", {"name": "tests"})
    assert {metric.key: metric.value for metric in logged_model.metrics}["test/recall_at_20"] == exact_metrics["test/recall@20"]
    assert {metric.step for metric in client.get_metric_history(registration.mlflow_run_id, "train/loss")} == set(STEPS)
    assert [dataset_input.dataset.name for dataset_input in mlflow_run.inputs.dataset_inputs] == ["interactions"]
    (release,) = list_releases(client, "m")
    assert (release["version"], release["aliases"], release["smoke"], release["run_id"]) == ("1", "champion", "passed", "one")
    assert release["metrics"] == registration.metrics
    model_card = client.get_model_version("m", "1").description
    assert "\n\n270 events, 30 users, 120 items; 180 training events; 30 test users." in model_card
    assert f"| model | {exact_metrics['test/recall@20']:.4f}" in model_card
    assert "| popularity |" in model_card
    run_link = f"[MLflow run](#/experiments/{mlflow_run.info.experiment_id}/runs/{registration.mlflow_run_id})"
    assert model_card.endswith(f"Run one: {run_link}")


def test_the_logged_model_contains_its_code_and_no_pickle_file(
    workspace: Path, add_versions: AddVersions, in_process_predictions: list[str]
) -> None:
    add_versions("good")
    (model_folder,) = (workspace / "mlartifacts" / "models").iterdir()
    file_names = {str(path.relative_to(model_folder / "artifacts")) for path in model_folder.rglob("*") if path.is_file()}
    # Python writes this file when it loads the model.
    file_names.discard(f"__pycache__/pyfunc_model.{sys.implementation.cache_tag}.pyc")
    assert not [name for name in file_names if name.endswith((".pkl", ".pickle", ".pt", ".pyc"))]
    assert {"pyfunc_model.py", "code/recsys_core/serving/retriever.py"} <= file_names
    requirements = (model_folder / "artifacts" / "requirements.txt").read_text().split()
    assert all("==" in requirement for requirement in requirements)
    assert any(requirement.startswith("faiss-") for requirement in requirements)


def test_the_verdict_in_prefect_has_the_reasons_and_the_path_of_the_decision_page(
    workspace: Path, build_stages: BuildStages, in_process_predictions: list[str]
) -> None:
    new_registration = register_version(build_stages(), prepare_run(workspace, "one"))
    verdict_markdown = verdict_page(
        new_registration, evaluation=build_stages().evaluation, data_report=build_stages().data_report
    )
    assert verdict_markdown.startswith("## m version 1 is champion\n\nthere was no champion\n\n")
    (decision_path,) = re.findall(r"All comparisons: `(.*)`", verdict_markdown)
    assert "<h2>Promoted: this version is the champion</h2>" in Path(decision_path).read_text()


def test_a_worse_version_becomes_challenger_and_an_equal_version_becomes_champion(
    workspace: Path, build_stages: BuildStages, in_process_predictions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alias_changes: list[AliasChange] = []
    monkeypatch.setattr(publishers.PrefectEvents, "publish", lambda _, change: alias_changes.append(change))
    register_version(build_stages(), prepare_run(workspace, "one"))
    worse_registration = register_version(build_stages(shuffled=True), prepare_run(workspace, "two"))
    assert (worse_registration.version, worse_registration.alias, worse_registration.promoted) == ("2", "challenger", False)
    assert worse_registration.metrics["served/recall@20"] < worse_registration.metrics["champion/recall@20"]
    assert "less than 0.98 times the" in worse_registration.reasons[0]
    client = connect(workspace)
    assert version_by_alias(client) == {"champion": "1", "challenger": "2"}
    assert version_tags(client, "2")["nightjar.reasons"] == worse_registration.reasons[0]

    equal_registration = register_version(build_stages(), prepare_run(workspace, "three"))
    assert (equal_registration.version, equal_registration.alias) == ("3", "champion")
    assert version_by_alias(client) == {"champion": "3", "challenger": "2"}
    assert [(change.alias, change.old_version, change.new_version) for change in alias_changes] == [
        ("champion", None, "1"),
        ("challenger", None, "2"),
        ("champion", "1", "3"),
    ]
    assert in_process_predictions == [f"models:/m/{version}" for version in (1, 2, 1, 3, 1)]


@pytest.mark.parametrize("last_step", ["the alias is set", "the version is created"])
def test_a_run_that_was_killed_while_it_registered_continues_with_its_version(
    workspace: Path, build_stages: BuildStages, add_versions: AddVersions, in_process_predictions: list[str], last_step: str
) -> None:
    add_versions("bad")
    registration = register_version(build_stages(), prepare_run(workspace, "two"))
    context, client = prepare_run(workspace, "two"), connect(workspace)
    shutil.rmtree(context.folder(RegistrationManifest))
    if last_step == "the version is created":
        client.set_registered_model_alias("m", "champion", "1")
        for tag in version_tags(client, "2"):
            if tag not in ("nightjar.run_id", "nightjar.package", "nightjar.package_sha256"):
                client.delete_model_version_tag("m", "2", tag)
    repeated_registration = register_version(build_stages(), context)
    assert repeated_registration.model_dump(exclude={"seconds", "files"}) == registration.model_dump(
        exclude={"seconds", "files"}
    )
    assert len(client.search_model_versions("name = 'm'")) == 2
    assert version_by_alias(client)["champion"] == "2"


def test_a_resumed_run_accepts_that_a_person_has_promoted_its_version(
    workspace: Path, build_stages: BuildStages, in_process_predictions: list[str]
) -> None:
    registration = register_version(build_stages(), prepare_run(workspace, "one"))
    context, client = prepare_run(workspace, "one"), connect(workspace)
    shutil.rmtree(context.folder(RegistrationManifest))
    for tag in ("nightjar.metrics", "nightjar.reasons", "nightjar.spent_drop"):  # the comparison sets these tags
        client.delete_model_version_tag("m", "1", tag)
    client.set_model_version_tag("m", "1", "nightjar.by_hand", "ada on host: promoted by hand: sale")
    resumed_registration = register_version(build_stages(), context)
    assert (resumed_registration.version, resumed_registration.alias) == ("1", "champion")
    assert resumed_registration.metrics["served/recall@20"] == registration.metrics["served/recall@20"]
    assert resumed_registration.reasons == ("the champion was changed by hand: ada on host: promoted by hand: sale",)
    assert version_by_alias(client) == {"champion": "1"}


def test_a_resumed_run_removes_a_logged_model_without_a_version(
    workspace: Path, build_stages: BuildStages, add_versions: AddVersions, in_process_predictions: list[str]
) -> None:
    add_versions("good")
    context, client = prepare_run(workspace, "one"), connect(workspace)
    shutil.rmtree(context.folder(RegistrationManifest))
    client.delete_model_version("m", "1")  # as after a kill between logging the model and creating its version
    registration = register_version(build_stages(), context)
    (model_file,) = (workspace / "mlartifacts" / "models").glob("*/artifacts/MLmodel")
    assert client.get_model_version("m", registration.version).source == f"models:/{model_file.parents[1].name}"


def test_a_finished_registration_is_kept(workspace: Path, build_stages: BuildStages, in_process_predictions: list[str]) -> None:
    registration = register_version(build_stages(), prepare_run(workspace, "one"))
    assert register_version(build_stages(), prepare_run(workspace, "one")) == registration
    assert len(in_process_predictions) == 1


def test_a_version_that_fails_the_smoke_test_gets_no_alias_and_a_tag_with_the_reason(
    workspace: Path, build_stages: BuildStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_tester, "predict_in_subprocess", recommend_unknown_items)
    context = prepare_run(workspace, "one")
    with pytest.raises(StageError, match="600 items that are not in the catalogue"):
        register_version(build_stages(), context)
    client = connect(workspace)
    assert version_tags(client, "1")["nightjar.smoke"].startswith("failed: models:/m/1: the smoke test found")
    assert version_by_alias(client) == {}
    assert not context.folder(RegistrationManifest).exists()
    with pytest.raises(InputError, match="has no champion"):
        load_version(workspace, model_name="m")


def test_a_version_that_cannot_be_downloaded_fails_with_the_error_of_mlflow(workspace: Path, build_stages: BuildStages) -> None:
    sample = prepare_sample(build_stages().dataset.interactions, max_users=3, folder=workspace / "sample")
    raises_error = pytest.raises(StageError, match=r"models:/absent/1: could not be downloaded: MlflowException: .*absent")
    with ModelProcess() as process, raises_error:
        version_tester.predict_in_subprocess(
            sample,
            model_uri="models:/absent/1",
            client=connect(workspace),
            workspace=workspace,
            output_file=workspace / "answers.parquet",
            process=process,
        )


def test_the_logged_model_reads_and_returns_the_ids_of_the_log(
    workspace: Path, build_stages: BuildStages, in_process_predictions: list[str]
) -> None:
    register_version(build_stages(), prepare_run(workspace, "one"))
    model = mlflow.pyfunc.load_model("models:/m@champion")
    requests = pd.DataFrame({"user_id": ["user-0", "user-1"]})
    answers_for_user_ids = model.predict(requests, params={"k": 3})
    assert [len(answer["item_ids"]) for answer in answers_for_user_ids] == [3, 3]
    item_ids = [item_id for answer in answers_for_user_ids for item_id in answer["item_ids"]]
    assert all(type(item_id) is int and 5000 <= item_id < 5000 + 3 * NUM_ITEMS for item_id in item_ids)
    json.dumps(answers_for_user_ids)  # plain numbers, so that a server can send them
    assert [len(answer["item_ids"]) for answer in model.predict(requests)] == [10, 10]
    requests_with_history = requests.assign(history=[answers_for_user_ids[1]["item_ids"], None])
    answers_for_histories = model.predict(requests_with_history, params={"k": 3})
    assert answers_for_histories[1] == answers_for_user_ids[1]
    assert answers_for_histories[0] != answers_for_user_ids[0]
    assert not set(answers_for_histories[0]["item_ids"]) & set(requests_with_history["history"][0])
