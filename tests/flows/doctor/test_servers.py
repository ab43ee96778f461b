"""Checks of the servers: real Prefect and MLflow where their answer matters, small HTTP servers for wrong answers."""

import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from flows.doctor.servers import Finding, _prefect_client, check_mlflow, check_prefect, check_schedule
from flows.servers.prefect_server import embedded_server
from flows.settings.pipeline import PipelineConfig
from flows.settings.schedule import ScheduleConfig
from flows.settings.template import starter_config
from tasks.runs.workspace import UP_LOCK_NAME
from tests.tasks.unhealthy_servers import answering, closed


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineConfig:
    for name in list(os.environ):
        if name.startswith(("PREFECT_", "MLFLOW_TRACKING_")):
            monkeypatch.delenv(name)
    return starter_config().with_absolute_paths(tmp_path)


def test_without_servers_nothing_is_checked_and_nothing_is_created(config: PipelineConfig, tmp_path: Path) -> None:
    findings = (check_prefect(), check_mlflow(config), check_schedule(config))
    assert {finding.status for finding in findings} == {"not used"}
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_down_is_a_problem_that_names_the_variable(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = closed().replace("//", "//ada:s3cret@")
    monkeypatch.setenv("PREFECT_API_URL", f"{address}/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    findings = (check_prefect(), check_mlflow(config))
    for finding, variable in zip(findings, ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"), strict=True):
        assert finding.status == "problem" and address.replace("s3cret", "***") in finding.text
        assert "Connection refused" in finding.text and variable in finding.text and "s3cret" not in finding.text
    assert check_schedule(config).status == "not used"


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        ((200, '"3.9.1"'), "ok", "version 3.9.1"),
        ((200, '"3.10.0"'), "ok", "version 3.10.0"),
        ((200, '"3.8.8"'), "problem", "version 3.8.8, but this machine has prefect 3.9.1; the server needs the same major"),
        ((200, '"2.20.0"'), "problem", "version 2.20.0, but this machine has prefect 3.9.1; the server needs the same major"),
        ((200, "<html>"), "problem", "check the server, and that PREFECT_API_URL is its address and ends in /api"),
        ((404, ""), "problem", "404 Not Found"),
        ((401, ""), "problem", "access denied (status 401); set PREFECT_API_AUTH_STRING to user:password"),
    ],
)
def test_version_and_access_of_the_prefect_server_are_checked(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str], status: str, text: str
) -> None:
    with answering(answer) as address:
        monkeypatch.setenv("PREFECT_API_URL", f"{address}/api")
        finding = check_prefect()
    assert finding.status == status and text in finding.text


@pytest.mark.parametrize("last_character", ["", "/"])
def test_a_server_without_password_is_a_problem_unless_it_is_on_loopback(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch, last_character: str
) -> None:
    monkeypatch.setattr("flows.doctor.servers.LOOPBACK_HOSTS", ())
    with answering((200, '"3.9.1"')) as address:
        monkeypatch.setenv("PREFECT_API_URL", f"{address}/api{last_character}")
        prefect_finding = check_prefect()
    with answering((200, "3.17.2")) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{address}{last_character}")
        mlflow_finding = check_mlflow(config)
    for finding in (prefect_finding, mlflow_finding):
        assert finding.status == "problem" and "has no password: whoever reaches it can run code on the workers" in finding.text


def test_an_mlflow_server_that_needs_a_password_is_a_problem(config: PipelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering((200, "3.17.2"), (401, "")) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        finding = check_mlflow(config)
    assert finding.status == "problem" and finding.text.endswith("set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")


def test_the_database_of_mlflow_is_opened(config: PipelineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE other (id)")
    assert "no such table: alembic_version" in check_mlflow(config).text
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE alembic_version AS SELECT 'a1b2' AS version_num")
    assert check_mlflow(config) == Finding("ok", f"sqlite:///{database}, schema a1b2")


def test_a_malformed_database_uri_is_a_problem_without_its_password(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://ada:secret@db:port/mlflow")
    finding = check_mlflow(config)
    assert finding.status == "problem" and finding.text.startswith("postgresql://ada:***@db:port/mlflow: ")


def test_a_schedule_without_a_process_that_starts_the_runs_is_a_problem(config: PipelineConfig) -> None:
    config = config.model_copy(update={"schedule": ScheduleConfig(cron="15 2 * * *")})
    finding = check_schedule(config)
    assert finding.status == "problem" and "schedule.cron is 15 2 * * *, but nothing starts the runs" in finding.text
    config.workspace.mkdir()
    with FileLock(config.workspace / UP_LOCK_NAME):
        finding = check_schedule(config)
        assert finding.status == "ok" and finding.text.startswith("`nightjar up` is running: next run at 20")
    assert check_schedule(config).status == "problem"


@pytest.fixture
def prefect(config: PipelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A real Prefect server with a password, named by PREFECT_API_URL."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    with embedded_server() as server:
        assert server is not None
        server.start_prefect(log_file=tmp_path / "prefect.log")
        server.wait_until_ready()
        yield


@pytest.mark.usefixtures("prefect")
def test_the_deployment_and_the_process_that_starts_its_runs_are_read_from_a_real_server(config: PipelineConfig) -> None:
    def call(method: str, path: str, body: dict[str, object]) -> Any:
        with _prefect_client() as client:
            return client._client.request(method, path, json=body).json()

    def assert_problem(text: str) -> None:
        finding = check_schedule(config)
        assert finding.status == "problem" and text in finding.text, finding

    assert check_prefect().text.endswith("version 3.9.1, with password")
    assert_problem("no deployment of pipeline nightly; create it with")
    call("POST", "/work_pools/", {"name": "hosts", "type": "process"})
    flow = call("POST", "/flows/", {"name": "nightly-retrain"})
    cron = {"schedule": {"cron": "15 2 * * *", "timezone": "Europe/Berlin"}, "active": True}
    body = {"name": config.name, "flow_id": flow["id"], "schedules": [cron], "work_pool_name": "hosts"}
    deployment = call("POST", "/deployments/", body)
    assert_problem("has the schedule 15 2 * * * Europe/Berlin, but the config has none")
    config = config.model_copy(update={"schedule": ScheduleConfig(cron="15 2 * * *")})
    assert_problem("has the schedule 15 2 * * * Europe/Berlin, but the config has 15 2 * * * UTC")
    config = config.model_copy(update={"schedule": ScheduleConfig(cron="15 2 * * *", timezone="Europe/Berlin")})
    assert_problem("no process starts the runs of deployment nightly; start a worker: prefect worker start --pool hosts")
    call("POST", "/work_pools/hosts/get_scheduled_flow_runs", {})  # as a worker does every few seconds
    with _prefect_client() as client:
        while client.read_deployment(deployment["id"]).status == "NOT_READY":
            time.sleep(0.05)  # the server stores the poll in the background
    call("POST", f"/deployments/{deployment['id']}/schedule", {"min_runs": 1})
    finding = check_schedule(config)
    assert finding.status == "ok" and "next run at " in finding.text
    call("POST", f"/deployments/{deployment['id']}/pause_deployment", {})
    assert_problem("is paused")
