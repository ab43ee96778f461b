"""Failures of MLflow, with real sockets and a real sqlite database: waits are bounded, and messages have no password."""

import logging
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from mlflow.exceptions import MlflowException

from recsys_core.errors import InputError, TrackingServerError
from tasks.registry import mlflow_client
from tasks.registry.metric_relay import MetricRelay
from tasks.registry.mlflow_client import call_with_deadline, call_with_retries, connect
from tasks.runs.context import StageContext
from tasks.runs.run import Run
from tasks.stages.model_stages import starting_champion
from tests.tasks.conftest import progress
from tests.tasks.unhealthy_servers import answering_server, closed_address, silent_server

URI_WITH_USER = "http://ada:s3cret@host/mlflow"
NGINX_PAGE = "<html><body>nginx</body></html>"
RunServer = Callable[[], AbstractContextManager[str]]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timeouts of MLflow clients, and let caplog receive the log of nightjar."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(mlflow_client, "ANSWER_TIMEOUT_S", 3.0)
    monkeypatch.setattr(mlflow_client, "RETRY_TIMEOUT_S", 0.0)
    monkeypatch.setattr(logging.getLogger("nightjar"), "propagate", True)


FAILURES: dict[str, tuple[RunServer, str]] = {
    "a closed port": (lambda: nullcontext(closed_address()), "Connection refused"),
    "HTML": (partial(answering_server, (200, NGINX_PAGE)), "not in a valid JSON format"),
    "HTML with 404": (partial(answering_server, (404, NGINX_PAGE)), "failed with error code 404"),
    "error 500": (partial(answering_server, (500, "")), "500"),
    "silence": (silent_server, "no answer within 3 s"),
}


class Failure(NamedTuple):
    """A server that is not a healthy MLflow: its address with a hidden password, and words of the expected message."""

    hidden_address: str
    words: str


@pytest.fixture(params=FAILURES)
def failure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Failure]:
    """The failure of the MLflow that the environment names."""
    run_server, words = FAILURES[request.param]
    with run_server() as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address.replace("//", "//ada:s3cret@"))
        yield Failure(address.replace("//", "//ada:***@"), words)


def test_each_mlflow_failure_is_one_sentence_without_the_password(tmp_path: Path, failure: Failure) -> None:
    with pytest.raises(TrackingServerError) as error_info:
        connect(tmp_path)
    message = str(error_info.value)
    assert message.startswith(f"MLflow at {failure.hidden_address} does not work: ")
    assert failure.words in message
    assert "s3cret" not in message
    assert len(message.splitlines()) == 1
    assert error_info.value.__suppress_context__  # the error of the library may contain the password


def test_training_starts_and_ends_while_mlflow_fails(
    tmp_path: Path, failure: Failure, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run("20261121-020000-ab12", workspace=tmp_path)
    run.folder.mkdir(parents=True)
    assert starting_champion("m", run=run) is None
    with MetricRelay(StageContext(run)) as relay:
        relay.send(progress(20))
    assert [record.name for record in caplog.records if record.levelno >= logging.WARNING] == ["nightjar", "nightjar"]
    assert "s3cret" not in caplog.text


def test_a_locked_database_raises_an_error_with_its_address(workspace: Path) -> None:
    with sqlite3.connect(workspace / "mlflow.db") as other_connection:
        other_connection.execute("begin exclusive")
        with pytest.raises(TrackingServerError, match=f"^MLflow at sqlite:///{workspace}/mlflow.db does not work: no answer"):
            call_with_retries(lambda: connect(workspace), uri=f"sqlite:///{workspace}/mlflow.db")


def test_a_transient_error_is_retried_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mlflow_client, "ANSWER_TIMEOUT_S", 60.0)
    monkeypatch.setattr(mlflow_client, "RETRY_TIMEOUT_S", 60.0)
    with answering_server((500, ""), (503, ""), (200, "{}")) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        assert call_with_retries(lambda: connect(tmp_path), uri=address).tracking_uri == address
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "nightjar"]
    assert warning.startswith(f"MLflow at {address} does not work: ")
    assert warning.endswith("; retrying for up to 60 s")


def test_a_permanent_error_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_client, "ANSWER_TIMEOUT_S", 60.0)
    monkeypatch.setattr(mlflow_client, "RETRY_TIMEOUT_S", 60.0)
    num_calls = 0

    def reject() -> None:
        nonlocal num_calls
        num_calls += 1
        raise MlflowException.invalid_parameter_value(f"{URI_WITH_USER} refuses")

    with pytest.raises(TrackingServerError, match=r"^MLflow at http://ada:\*\*\*@host/mlflow does not work: "):
        call_with_retries(reject, uri=URI_WITH_USER)
    assert num_calls == 1


def test_a_programming_error_is_not_reported_as_an_outage() -> None:
    with pytest.raises(KeyError):
        call_with_retries(lambda: {}["absent"], uri=URI_WITH_USER)


def test_a_timeout_error_of_the_called_function_keeps_its_message() -> None:
    def time_out() -> None:
        raise TimeoutError("reading")

    with pytest.raises(TrackingServerError, match="TimeoutError: reading"):
        call_with_deadline(time_out, uri=URI_WITH_USER)


def test_a_full_disk_under_the_database_is_an_input_error_without_a_retry(
    new_database: Path, small_disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(mlflow_client, "ANSWER_TIMEOUT_S", 60.0)
    monkeypatch.setattr(mlflow_client, "RETRY_TIMEOUT_S", 60.0)
    shutil.copy(new_database, small_disk)
    client = connect(small_disk)
    with (small_disk / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, shutil.disk_usage(small_disk).free)
    with pytest.raises(
        InputError, match=rf"^{small_disk}/mlflow\.db: MLflow's database has to grow, but the disk has 0\.000 GiB"
    ):
        call_with_retries(lambda: client.create_registered_model("m"), uri=client.tracking_uri)
    assert "retrying" not in caplog.text
