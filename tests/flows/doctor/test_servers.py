"""Checks of the Prefect and MLflow servers, with small HTTP servers and an MLflow database."""

import sqlite3
from pathlib import Path

import pytest

from flows.doctor.schedule import check_schedule
from flows.doctor.servers import Finding, check_mlflow, check_prefect
from flows.settings.pipeline import PipelineConfig
from tests.tasks.unhealthy_servers import answering_server, closed_address


def test_without_servers_nothing_is_checked_and_nothing_is_created(config: PipelineConfig, tmp_path: Path) -> None:
    findings = (check_prefect(), check_mlflow(config), check_schedule(config, flow_name="nightly-retrain"))
    assert {finding.status for finding in findings} == {"not used"}
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_down_is_a_problem_that_names_the_variable(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = closed_address().replace("//", "//ada:s3cret@")
    monkeypatch.setenv("PREFECT_API_URL", f"{address}/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    findings = (check_prefect(), check_mlflow(config))
    for finding, variable in zip(findings, ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"), strict=True):
        assert finding.status == "problem" and address.replace("s3cret", "***") in finding.text
        assert "Connection refused" in finding.text and variable in finding.text and "s3cret" not in finding.text
    assert check_schedule(config, flow_name="nightly-retrain").status == "not used"


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
    with answering_server(answer) as address:
        monkeypatch.setenv("PREFECT_API_URL", f"{address}/api")
        finding = check_prefect()
    assert finding.status == status and text in finding.text


@pytest.mark.parametrize("url_ending", ["", "/"])
def test_a_server_without_password_is_a_problem_unless_it_is_on_loopback(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch, url_ending: str
) -> None:
    monkeypatch.setattr("flows.doctor.servers.LOOPBACK_HOSTS", ())
    with answering_server((200, '"3.9.1"')) as address:
        monkeypatch.setenv("PREFECT_API_URL", f"{address}/api{url_ending}")
        prefect_finding = check_prefect()
    with answering_server((200, "3.17.2")) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{address}{url_ending}")
        mlflow_finding = check_mlflow(config)
    for finding in (prefect_finding, mlflow_finding):
        assert finding.status == "problem" and "has no password: whoever reaches it can run code on the workers" in finding.text


def test_a_server_that_answers_with_an_error_is_not_reported_as_a_server_with_a_password(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.doctor.servers.LOOPBACK_HOSTS", ())
    with answering_server((200, "3.17.2"), (200, "{}"), (503, "")) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        finding = check_mlflow(config)
    assert finding == Finding("ok", f"{address}, version 3.17.2, not known whether it has a password")


def test_an_mlflow_server_that_needs_a_password_is_a_problem(config: PipelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering_server((200, "3.17.2"), (401, "")) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        finding = check_mlflow(config)
    assert finding.status == "problem" and finding.text.endswith("set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")


def test_the_database_of_mlflow_is_opened(config: PipelineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    database_path = tmp_path / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database_path}")
    with sqlite3.connect(database_path) as connection:
        connection.execute("CREATE TABLE other (id)")
    assert "no such table: alembic_version" in check_mlflow(config).text
    with sqlite3.connect(database_path) as connection:
        connection.execute("CREATE TABLE alembic_version AS SELECT 'a1b2' AS version_num")
    assert check_mlflow(config) == Finding("ok", f"sqlite:///{database_path}, schema a1b2")


def test_a_malformed_database_uri_is_a_problem_without_its_password(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://ada:secret@db:port/mlflow")
    finding = check_mlflow(config)
    assert finding.status == "problem" and finding.text.startswith("postgresql://ada:***@db:port/mlflow: ")
