"""Housekeeping after a run: after an interruption it writes only the metrics, and its errors do not fail the run."""

import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.runs.after_run import after_run, write_and_log_history_page
from flows.runs.history_page import write_history_page
from flows.settings.template import starter_config
from recsys_core.manifests import STAGES
from tasks.registry.mlflow_client import connect, tracking_uri
from tasks.registry.tracking import open_mlflow_run
from tasks.runs.context import StageContext
from tests.flows.run_folders import FIRST_START, past_run
from tests.tasks.unhealthy_servers import silent_server


@pytest.mark.parametrize("state", ["Failed", "Interrupted"])
def test_an_interrupted_run_writes_metrics_but_no_page(tmp_path: Path, new_database: Path, state: str) -> None:
    shutil.copy(new_database, tmp_path)
    config = starter_config().model_copy(update={"workspace": tmp_path})
    after_run(config, StageContext(past_run(tmp_path, FIRST_START, state=state, num_stages=0)))  # type: ignore[arg-type]
    assert (tmp_path / "index.html").is_file() == (state == "Failed")
    assert f'state="{state}"}} 1.0' in (tmp_path / "metrics.prom").read_text()


def test_a_page_that_cannot_be_written_causes_a_warning(
    tmp_path: Path, new_database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(new_database, tmp_path)
    (tmp_path / "index.html").mkdir()
    config = starter_config().model_copy(update={"workspace": tmp_path})
    after_run(config, StageContext(past_run(tmp_path, FIRST_START, state="Failed", num_stages=0)))
    assert "could not write the page of the last runs (IsADirectoryError" in caplog.text
    assert (tmp_path / "metrics.prom").is_file()


def test_the_housekeeping_waits_only_once_for_a_server_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("flows.runs.after_run.MLFLOW_TIMEOUT_S", 0.5)
    config = starter_config().model_copy(update={"workspace": tmp_path})
    with silent_server() as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        after_run(config, StageContext(past_run(tmp_path, FIRST_START, state="Failed")))
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "nightjar"]
    assert warning.startswith("could not log the stages to MLflow and remove files of old runs (")
    assert (tmp_path / "index.html").is_file()


def test_the_housekeeping_creates_no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = starter_config().model_copy(update={"workspace": tmp_path})
    after_run(config, StageContext(past_run(tmp_path, FIRST_START, state="Failed")))
    assert not (tmp_path / "mlflow.db").exists()


def test_a_run_that_stops_before_check_data_does_not_wait_for_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # no process listens there
    config = starter_config().model_copy(update={"workspace": tmp_path})
    after_run(config, StageContext(past_run(tmp_path, FIRST_START, state="StoppedEarly", num_stages=0)))
    assert (tmp_path / "index.html").is_file()
    assert not caplog.text


def test_the_page_shows_the_champion_and_without_mlflow_the_last_promoted_version(
    tmp_path: Path, new_database: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = starter_config().model_copy(update={"workspace": tmp_path})
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(new_database, tmp_path)
    run = past_run(tmp_path, FIRST_START, state="Promoted", version="2", num_stages=len(STAGES))
    client = connect(tmp_path)
    mlflow_run_id = open_mlflow_run(client, StageContext(run, experiment="e"))
    client.create_registered_model(config.registry.model_name)
    for _ in range(2):
        client.create_model_version("nightjar", "file:///nowhere", mlflow_run_id)
    client.set_registered_model_alias("nightjar", "champion", "1")  # a rollback
    write_and_log_history_page(config, StageContext(run, experiment="e"))
    assert "Promoted: version 1 is the champion" in (tmp_path / "index.html").read_text()
    artifacts = MlflowClient(tracking_uri(tmp_path)).list_artifacts(mlflow_run_id, "history")
    assert [artifact.path for artifact in artifacts] == ["history/index.html"]

    failed_run = past_run(tmp_path, FIRST_START + timedelta(days=1), state="Failed", num_stages=0)
    write_and_log_history_page(config, StageContext(failed_run, experiment="e"))
    assert "Failed: version 1 stays champion" in (tmp_path / "index.html").read_text()
    assert len(client.search_runs([client.get_run(mlflow_run_id).info.experiment_id])) == 1
    shutil.rmtree(failed_run.folder)

    (tmp_path / "index.html").unlink()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    write_and_log_history_page(config, StageContext(run, experiment="e"))
    assert "version 2 is the champion" in (tmp_path / "index.html").read_text()
    assert "could not read the champion" in caplog.text

    (tmp_path / "index.html").unlink()
    caplog.clear()
    write_history_page(config)
    assert "version 2 is the champion" in (tmp_path / "index.html").read_text()
    # A thread of urllib3 may still log the refused connection of the call above.
    assert [record.message for record in caplog.records if record.name == "nightjar"] == []
