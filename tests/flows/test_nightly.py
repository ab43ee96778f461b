"""A whole run from the command line: two gloo processes, real parquet, ephemeral Prefect, sqlite MLflow."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from mlflow.pyfunc import scoring_server

from flows import nightly
from flows.cli.commands.registry import query
from flows.settings.config_file import load_config
from flows.settings.pipeline import PipelineConfig
from flows.settings.template import starter_config
from recsys_core.errors import DataRejectedError, InputError
from recsys_core.ingest.synthetic import generate
from recsys_core.manifests import STAGES, RegistrationManifest
from recsys_core.training.config import WarmStartConfig
from tasks.registry.mlflow_client import connect, tracking_uri
from tasks.runs.context import RunOptions
from tasks.runs.run import Run
from tasks.runs.run_record import RunRecord
from tests.recsys_core.launching.listening_sockets import Listening, collect_listening

ROOT = Path(nightly.__file__).parents[1]
REFIT_OVERRIDE = "training.refit=true"
EXPERIMENT_ID = "1"  # the first experiment after the default experiment 0
RUN_STAGES = {*STAGES} - {"embed_log"}  # item vectors come from files, not from the log
CONFIG = """
name: small-catalogue
workspace: .
interactions: {paths: data/interactions/*.parquet, timestamp_column: timestamp, split: {kind: time, test_days: 2}}
embeddings: {paths: data/item_embeddings.parquet, vector_column: embedding}
features: {items: {paths: data/item_features.parquet, id_column: item_id, features: [{name: brand}]}}
model: {embedding_dim: 16, learn_user_embedding: true}
training: {epochs: 3, batch_size: 64, log_every_steps: 5, checkpoint_every_steps: 20, warm_start: null}
index: {nlist: 8}
delivery: {recommendations: {folder: recommendations, k: 7}}
registry: {model_name: small, smoke_test_users: 300, gate: {kind: margin}, baselines: []}
"""


class Workspace:
    """A folder with data and config, and `nightjar` started in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config_path = folder, folder / "nightly.yaml"
        generate(folder / "data", num_users=300, num_items=200, num_events=8_000, num_days=10, dim=16, num_cold_items=10)
        item_ids = pq.read_table(folder / "data" / "item_embeddings.parquet").column("item_id")
        brands = pc.binary_join_element_wise("brand", pc.cast(pc.bit_wise_and(item_ids, 7), pa.string()), "-")
        pq.write_table(pa.table({"item_id": item_ids, "brand": brands}), folder / "data" / "item_features.parquet")
        self.config_path.write_text(CONFIG)

    def start(self, command: str, *arguments: str) -> "subprocess.Popen[str]":
        """Start `nightjar COMMAND CONFIG ARGUMENTS` without the Prefect and MLflow variables of the environment."""
        server_prefixes = ("PREFECT_", "MLFLOW_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(server_prefixes)}
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", command, str(self.config_path), *arguments],
            env=environment | {"OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def nightjar(self, command: str, *arguments: str) -> Any:
        """Run a command to its end and return the JSON object on the last line of stdout."""
        process = self.start(command, *arguments, "--json")
        output, error_output = process.communicate(timeout=600)
        assert process.returncode == 0, error_output
        return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(scope="module")
def sockets() -> Listening:
    """Sockets on which processes listen during the undisturbed run. The fixture `undisturbed_result` fills this set."""
    return set()


@pytest.fixture(scope="module")
def undisturbed_result(workspace: Workspace, sockets: Listening) -> Any:
    """The result of an undisturbed run with a refit."""
    with collect_listening() as sockets_of_run:
        result = workspace.nightjar("run", "--reason", "first run", "--set", REFIT_OVERRIDE)
    sockets |= sockets_of_run
    return result


def test_during_a_run_processes_listen_on_the_loopback_only(undisturbed_result: Any, sockets: Listening) -> None:
    assert {"flows.servers", "recsys_core.training"} <= {name for name, _ in sockets}
    assert {address for _, address in sockets} <= {"127.0.0.1", "::1"}, sockets


def test_a_run_ends_with_a_registered_champion(workspace: Workspace, undisturbed_result: Any) -> None:
    assert undisturbed_result["model"] == {"name": "small", "version": "1", "alias": None}
    assert undisturbed_result["refit"] == {"version": "2", "alias": "champion"}
    run = Run(undisturbed_result["run_id"], workspace=workspace.folder)
    assert undisturbed_result["run_dir"] == str(run.folder)
    assert set(undisturbed_result["stages"]) == RUN_STAGES
    assert all(stage["seconds"] >= 0 for stage in undisturbed_result["stages"].values())
    assert all((run.folder / stage / "manifest.json").is_file() for stage in RUN_STAGES)
    metric_names = ("recall@20", "ndcg@20", "hit_rate@10")
    assert all(
        0 <= undisturbed_result["metrics"][f"{model}/{name}"] <= 1
        for model in ("test", "baseline/popularity")
        for name in metric_names
    )
    assert undisturbed_result["metrics"]["served/recall@20"] == pytest.approx(
        undisturbed_result["metrics"]["test/recall@20"], abs=0.05
    )  # the index is approximate


def test_mlflow_has_the_loss_of_each_step_that_the_trainer_wrote(workspace: Workspace, undisturbed_result: Any) -> None:
    client = connect(workspace.folder)
    (run,) = client.search_runs([EXPERIMENT_ID], f"tags.`nightjar.run_id` = '{undisturbed_result['run_id']}'")
    metrics_path = Path(undisturbed_result["run_dir"]) / "train" / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics_path.read_text().splitlines()]
    loss_by_step = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    assert loss_by_step == {step["step"]: step["loss"] for step in steps}


def test_prefect_shows_pipeline_reason_verdict_and_finished_training(workspace: Workspace, undisturbed_result: Any) -> None:
    (database_path,) = workspace.folder.rglob("prefect.db")
    with closing(sqlite3.connect(database_path)) as database:
        ((run_name, tags, state_name),) = database.execute("select name, tags, state_name from flow_run").fetchall()
        progress_query = "select data from artifact where key = 'small-catalogue-training-progress'"
        ((percent,),) = database.execute(progress_query).fetchall()
        artifact_keys = {key for (key,) in database.execute("select key from artifact")}
        payloads = database.execute("select payload from events where event = 'nightjar.champion.changed'").fetchall()
        log_messages = {message for (message,) in database.execute("select message from log")}
    assert (run_name, state_name) == (f"small-catalogue {undisturbed_result['run_id']}: first run", "Promoted")
    assert json.loads(tags) == ["pipeline:small-catalogue", "reason:first run"]
    assert percent == 100
    page_names = ("data-report", "mlflow-run", "sharding-plan", "training-loss", "metrics", "index", "indexes", "verdict")
    assert artifact_keys == {f"small-catalogue-{page_name}" for page_name in (*page_names, "training-progress")}
    champion_changes = [json.loads(payload) for (payload,) in payloads]
    assert [(change["old_version"], change["new_version"]) for change in champion_changes] == [(None, "1"), ("1", "2")]
    assert {change["run_id"] for change in champion_changes} == {undisturbed_result["run_id"]}
    assert any(message.startswith("rank 0: ") for message in log_messages)


def test_mlflow_has_the_duration_of_each_stage(workspace: Workspace, undisturbed_result: Any) -> None:
    client = connect(workspace.folder)
    (run,) = client.search_runs([EXPERIMENT_ID], f"tags.`nightjar.run_id` = '{undisturbed_result['run_id']}'")
    assert {f"stage/{stage}/seconds" for stage in RUN_STAGES} <= run.data.metrics.keys()
    assert run.data.tags["nightjar.state"] == "Promoted"
    assert {dataset_input.dataset.name for dataset_input in run.inputs.dataset_inputs} == {"embeddings", "interactions"}


def test_the_command_the_python_model_and_the_server_return_the_same_unseen_items(
    workspace: Workspace, undisturbed_result: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    events = pd.concat(pq.read_table(path).to_pandas() for path in sorted(workspace.folder.glob("data/interactions/*")))
    user_id = events["user_id"].iloc[0]
    query_result = workspace.nightjar("query", "--user", user_id, "-k", "7")
    assert (query_result["model"], query_result["version"], query_result["known_user"]) == ("small", "2", True)
    query(load_config(workspace.config_path), user="stranger", history=None, item=None, k=10, model_uri=None, as_json=True)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["known_user"] is False and len(json.loads(printed.out)["items"]) == 10
    assert "user stranger is unknown to version 2: these are the most popular items" in printed.err
    item_ids = [item["item_id"] for item in query_result["items"]]
    assert len(set(item_ids)) == 7
    assert set(item_ids) <= set(pq.read_table(workspace.folder / "data/item_embeddings.parquet")["item_id"].to_pylist())
    assert not set(item_ids) & set(events.loc[events["user_id"] == user_id, "item_id"])
    recommendations = pq.read_table(workspace.folder / "recommendations").to_pylist()
    assert {row["user_id"]: row["item_ids"] for row in recommendations}[user_id] == item_ids

    mlflow.set_tracking_uri(tracking_uri(workspace.folder))
    model = mlflow.pyfunc.load_model("models:/small@champion")
    assert model.predict(pd.DataFrame({"user_id": [user_id]}), params={"k": 7})[0]["item_ids"] == item_ids
    server = TestClient(scoring_server.init(model))
    response = server.post("/invocations", json={"dataframe_records": [{"user_id": user_id}], "params": {"k": 7}})
    assert response.json()["predictions"][0]["item_ids"] == item_ids
    assert server.post("/invocations", json={"dataframe_records": [{"usr": user_id}]}).status_code == 400


def test_a_promoted_run_with_refit_gets_a_second_version_trained_on_all_events(
    workspace: Workspace, undisturbed_result: Any
) -> None:
    run = Run(undisturbed_result["run_id"], workspace=workspace.folder)
    record = RunRecord.read(run)
    assert record is not None and record.message.endswith("; version 2, its refit, is champion")
    client = connect(workspace.folder)
    tags = client.get_model_version_by_alias("small", "champion").tags
    assert (tags["nightjar.refit_of"], tags["nightjar.smoke"], tags["nightjar.run_id"]) == ("1", "passed", run.run_id)
    model_card = client.get_model_version("small", "2").description
    assert (
        "Metrics of version 1, on the test events" in model_card
        and "Validation and test events were not trained on" not in model_card
    )
    delivery_summary = json.loads((workspace.folder / "recommendations" / "_recommendations.json").read_text())
    assert delivery_summary["version"] == "2" and not (run.folder / "refit").exists()


@pytest.mark.drill
def test_a_resume_trains_a_missing_refit_and_keeps_an_existing_refit(workspace: Workspace) -> None:
    first_result = workspace.nightjar("run")
    resume_options = ("--resume", first_result["run_id"], "--set", REFIT_OVERRIDE)
    resumed_result = workspace.nightjar("run", *resume_options)
    assert resumed_result["stages"]["train"] == first_result["stages"]["train"]  # the stage is not repeated
    assert resumed_result["refit"]["version"] != resumed_result["model"]["version"]
    num_versions = len(connect(workspace.folder).search_model_versions("name = 'small'"))
    assert workspace.nightjar("run", *resume_options)["refit"] == resumed_result["refit"]
    assert len(connect(workspace.folder).search_model_versions("name = 'small'")) == num_versions


@pytest.mark.drill
def test_a_run_that_is_killed_and_resumed_has_the_metrics_of_an_undisturbed_run(
    workspace: Workspace, undisturbed_result: Any
) -> None:
    earlier_folders = set((workspace.folder / "runs").iterdir())
    process = workspace.start("run")
    while not any(num_logged_steps(folder) for folder in set((workspace.folder / "runs").iterdir()) - earlier_folders):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.kill()
    process.communicate()
    (killed_run_folder,) = set((workspace.folder / "runs").iterdir()) - earlier_folders
    assert not (killed_run_folder / "train" / "manifest.json").exists()

    resumed_result = workspace.nightjar("run", "--resume", killed_run_folder.name)
    assert resumed_result["run_id"] == killed_run_folder.name
    expected_metrics = {
        name: value for name, value in undisturbed_result["metrics"].items() if not name.startswith(("served/", "champion/"))
    }
    assert {name: resumed_result["metrics"][name] for name in expected_metrics} == expected_metrics
    client = connect(workspace.folder)
    newest_version_number = max(int(version.version) for version in client.search_model_versions("name = 'small'"))
    assert resumed_result["model"] == {"name": "small", "version": str(newest_version_number), "alias": "champion"}
    (run,) = client.search_runs([EXPERIMENT_ID], f"tags.`nightjar.run_id` = '{killed_run_folder.name}'")
    steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert len(steps) == len(set(steps)) == len((killed_run_folder / "train" / "metrics.jsonl").read_text().splitlines())


def num_logged_steps(run_folder: Path) -> int:
    """Return the number of lines of the metrics file, 0 if there is no file."""
    metrics_path = run_folder / "train.work" / "metrics.jsonl"
    return len(metrics_path.read_text().splitlines()) if metrics_path.is_file() else 0


@pytest.mark.parametrize(
    ("promoted", "alarm", "state_name", "message"),
    [
        (True, None, "Promoted", "m version 3 is champion: because"),
        (False, None, "NotPromoted", "m version 3 is challenger: because"),
        (True, "the champion does not load", "BrokenChampion", "the champion does not load; m version 3 is champion: because"),
    ],
)
def test_the_flow_state_has_the_verdict_and_delivery_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, promoted: bool, alarm: str | None, state_name: str, message: str
) -> None:
    registration = RegistrationManifest(
        model_name="m", version="3", alias="champion" if promoted else "challenger", promoted=promoted, reasons=("because",),
        alarm=alarm, mlflow_run_id="r", metrics={}, fingerprint="f", seconds=1.0, files={}, folder=tmp_path,
    )  # fmt: skip

    monkeypatch.setattr(nightly, "retrain", lambda config, run: registration)
    config = starter_config().with_absolute_paths(tmp_path)
    state = nightly.nightly_retrain.fn(config, run_id="r")
    assert (state.name, state.is_completed()) == (state_name, True)
    assert state.message == message
    if promoted:
        monkeypatch.setattr(nightly, "deliver", lambda config: ["the recommendations are old"])
        assert nightly.nightly_retrain.fn(config, run_id="r").message == f"{message}; the recommendations are old"
    assert Run("r", workspace=tmp_path / "workspace").config_file.is_file()


def test_the_flow_fails_for_rejected_data_and_completes_for_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(config: PipelineConfig, run: Run) -> None:
        raise DataRejectedError("the data violates 1 of the limits in data_report:\n- too few events")

    config = starter_config().with_absolute_paths(tmp_path)
    monkeypatch.setattr(nightly, "retrain", reject)
    state = nightly.nightly_retrain.fn(config, run_id="r")
    assert (state.name, state.is_failed()) == ("DataRejected", True)
    with pytest.raises(DataRejectedError, match="violates 1 of the limits"):
        state.result(_sync=True)
    record = RunRecord.read(Run("r", workspace=tmp_path / "workspace"))
    assert record is not None and record.state == "DataRejected"
    assert record.message == "the data violates 1 of the limits in data_report: - too few events"

    monkeypatch.setattr(nightly, "retrain", lambda config, run: None)
    state = nightly.nightly_retrain.fn(config, run_id="r", options=RunOptions(dry_run=True))
    assert (state.name, state.is_completed()) == ("DryRun", True)
    assert state.message == "dry run: no version is registered; resume run r to register one"


def test_a_full_retrain_builds_the_vocabularies_again_and_starts_from_no_champion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nightly, "retrain", lambda config, run: None)
    config = starter_config().with_absolute_paths(tmp_path)
    assert (config.training.warm_start, config.interactions.vocabulary.rebuild) == (WarmStartConfig(), "when_due")
    nightly.nightly_retrain.fn(config, run_id="r", options=RunOptions(full_retrain=True))
    config_of_run = load_config(tmp_path / "workspace/runs/r/config.yaml")
    assert (config_of_run.training.warm_start, config_of_run.interactions.vocabulary.rebuild) == (None, "always")


@pytest.mark.parametrize(
    ("run_id", "message"),
    [
        ("../../theirs", "a run id consists of letters"),
        ("theirs", "holds files, but not the marker"),
        ("link", "is a link"),
    ],
)
def test_the_flow_changes_no_folder_that_nightjar_did_not_create(tmp_path: Path, run_id: str, message: str) -> None:
    folder_by_run_id = {
        "../../theirs": tmp_path / "theirs",
        "theirs": tmp_path / "workspace/runs/theirs",
        "link": tmp_path / "elsewhere",
    }
    user_folder = folder_by_run_id[run_id]
    (user_folder / "embeddings").mkdir(parents=True)
    (user_folder / "embeddings" / "mine.npy").write_text("kept")
    (user_folder / "config.yaml").write_text("kept")
    if run_id == "link":
        (tmp_path / "workspace/runs").mkdir(parents=True)
        (tmp_path / "workspace/runs/link").symlink_to(user_folder)
    with pytest.raises(InputError, match=message):
        nightly.nightly_retrain.fn(starter_config().with_absolute_paths(tmp_path), run_id=run_id)
    assert (user_folder / "config.yaml").read_text() == (user_folder / "embeddings" / "mine.npy").read_text() == "kept"
    assert sorted(path.name for path in user_folder.rglob("*")) == ["config.yaml", "embeddings", "mine.npy"]
