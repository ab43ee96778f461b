"""The MLflow server of `nightjar ui` and `nightjar up`: password, address and health check."""

import os
import shutil
import urllib.error
import urllib.request
from base64 import b64encode
from pathlib import Path

import psutil
import pytest

from flows.cli.commands import ui
from flows.servers.server_process import ServerProcess

SEARCH_PATH = "/api/2.0/mlflow/experiments/search?max_results=5"
URL_PATHS = (
    "/",
    SEARCH_PATH,
    "/ajax-api/2.0/mlflow/experiments/search?max_results=5",
    "/health/../api",
    "//health",
    "/version",
)


def status_of(url: str, *, login: str | None = None) -> int:
    """Return the HTTP status of a request, with `login` (user:password) or without a login."""
    request = urllib.request.Request(url)
    if login is not None:
        request.add_header("Authorization", "Basic " + b64encode(login.encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_mlflow_server_listens_on_loopback_and_requires_a_password(
    tmp_path: Path, new_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(new_database, tmp_path)
    server = ServerProcess("flows.servers.mlflow_app", name="MLflow server", health_path="/health")
    try:
        environment = ui._mlflow_environment(tmp_path, credentials="nightjar:s3cret")
        server.start_serving(log_file=tmp_path / "ui.log", environment=environment)
        server.wait_until_ready()
        for url_path in URL_PATHS:
            assert status_of(server.url + url_path) == status_of(server.url + url_path, login="nightjar:wrong") == 401, url_path
        assert status_of(server.url + SEARCH_PATH, login="nightjar:s3cret") == 200
        listening_connections = [
            connection for connection in psutil.Process(server.pid).net_connections() if connection.status == psutil.CONN_LISTEN
        ]
        assert {connection.laddr.ip for connection in listening_connections} == {"127.0.0.1"}
    finally:
        server.stop()
    assert "s3cret" not in (tmp_path / "ui.log").read_text() and "s3cret" not in str(dict(os.environ))
