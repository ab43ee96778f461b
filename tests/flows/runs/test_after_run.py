"""Work after each run: it is done for failed runs, mostly left out for interrupted ones, and cannot fail a run."""

import shutil
from pathlib import Path

import pytest

from flows.runs import after_run as after_run_module
from flows.runs.after_run import after_run
from flows.settings.template import starter_config
from tasks.runs.context import StageContext
from tests.flows.run_folders import FIRST_START, past_run
from tests.tasks.unhealthy_servers import silent


@pytest.mark.parametrize("state", ["Failed", "Interrupted"])
def test_page_and_metrics_are_written_after_a_failed_run_and_only_metrics_after_an_interrupted_one(
    tmp_path: Path, new_database: Path, state: str
) -> None:
    shutil.copy(new_database, tmp_path)
    config = starter_config().model_copy(update={"workspace": tmp_path})
    after_run(config, StageContext(past_run(tmp_path, FIRST_START, state=state, stages=0)))  # type: ignore[arg-type]
    assert (tmp_path / "index.html").is_file() == (state == "Failed")
    assert f'state="{state}"}} 1.0' in (tmp_path / "metrics.prom").read_text()


def test_a_page_that_cannot_be_written_is_a_warning(
    tmp_path: Path, new_database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(new_database, tmp_path)
    (tmp_path / "index.html").mkdir()
    config = starter_config().model_copy(update={"workspace": tmp_path})
    after_run(config, StageContext(past_run(tmp_path, FIRST_START, state="Failed", stages=0)))
    assert "could not write the page of the last runs (IsADirectoryError" in caplog.text
    assert (tmp_path / "metrics.prom").is_file()


def test_after_a_run_a_server_that_does_not_answer_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(after_run_module, "MLFLOW_TIMEOUT_S", 0.5)
    config = starter_config().model_copy(update={"workspace": tmp_path})
    with silent() as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        after_run(config, StageContext(past_run(tmp_path, FIRST_START, state="Failed")))
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "nightjar"]
    assert warning.startswith("could neither log the stages to MLflow nor remove files of old runs; the run is not affected (")
    assert (tmp_path / "index.html").is_file()


def test_after_a_run_no_database_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = starter_config().model_copy(update={"workspace": tmp_path})
    after_run(config, StageContext(past_run(tmp_path, FIRST_START, state="Failed")))
    assert not (tmp_path / "mlflow.db").exists()


def test_a_run_that_stops_before_check_data_does_not_wait_for_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # no process listens there
    config = starter_config().model_copy(update={"workspace": tmp_path})
    after_run(config, StageContext(past_run(tmp_path, FIRST_START, state="StoppedEarly", stages=0)))
    assert (tmp_path / "index.html").is_file()
    assert not caplog.text
