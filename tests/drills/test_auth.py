"""The servers of infra/compose.yaml answer 401 without a password, and a run with passwords registers a version."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import websockets

from tests.drills.production_servers import PREFECT_LOGIN, USER_PASSWORD, Servers, production_servers
from tests.drills.test_kill_and_resume import write_config

pytestmark = pytest.mark.drill
NIGHTJAR = [sys.executable, "-m", "flows.cli"]
WRONG_LOGIN = ("nightjar", "wrong")
MLFLOW_LOGIN = ("nightjar", USER_PASSWORD)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with production_servers(tmp_path_factory.mktemp("servers")) as servers:
        yield servers


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/flow_runs/filter"),
        ("GET", "/api/admin/version"),
        ("POST", "/api/deployments/filter"),
        (
            "GET",
            "/api/variables/name/system-health",
        ),  # CVE-2026-3514 and CVE-2026-7722 are about paths that end like a health check
        ("GET", "/api/work_pools/almost-ready"),
    ],
)
def test_prefect_rejects_requests_without_its_password(servers: Servers, method: str, path: str) -> None:
    url = f"{servers.prefect}{path}"
    assert requests.request(method, url, json={}, timeout=30).status_code == 401
    assert requests.request(method, url, json={}, auth=WRONG_LOGIN, timeout=30).status_code == 401
    login = tuple(PREFECT_LOGIN.split(":"))
    assert requests.request(method, url, json={}, auth=login, timeout=30).status_code in (200, 404)


def test_prefect_rejects_events_without_its_password(servers: Servers) -> None:
    """CVE-2026-7723 is about the websocket that receives events."""

    async def send_event(*, subprotocols: list[str], first_message: dict[str, str]) -> str:
        url = f"{servers.prefect.replace('http', 'ws')}/api/events/in"
        try:
            async with websockets.connect(url, subprotocols=subprotocols) as socket:  # type: ignore[arg-type]
                await socket.send(json.dumps(first_message))
                return str(await asyncio.wait_for(socket.recv(), 10))
        except (websockets.exceptions.ConnectionClosed, websockets.exceptions.InvalidStatus) as error:
            return type(error).__name__

    for rejected_arguments in (
        {"subprotocols": [], "first_message": {"event": "forged"}},
        {"subprotocols": ["prefect"], "first_message": {"type": "auth", "token": "nightjar:wrong"}},
    ):
        assert asyncio.run(send_event(**rejected_arguments)).startswith(("ConnectionClosed", "InvalidStatus"))  # type: ignore[arg-type]
    login_message = {"type": "auth", "token": PREFECT_LOGIN}
    assert "auth_success" in asyncio.run(send_event(subprotocols=["prefect"], first_message=login_message))


@pytest.mark.parametrize(
    "path",
    [
        "/version",
        "/api/2.0/mlflow/registered-models/search",
        "/api/2.0/mlflow/experiments/search?max_results=1",
        "/api/2.0/mlflow-artifacts/artifacts",
        "/api/2.0/mlflow/users/list",
    ],
)
def test_mlflow_rejects_requests_without_its_password(servers: Servers, path: str) -> None:
    url = f"{servers.mlflow}{path}"
    assert requests.get(url, timeout=30).status_code == 401
    assert requests.get(url, auth=WRONG_LOGIN, timeout=30).status_code == 401
    assert requests.get(url, auth=("admin", "password1234"), timeout=30).status_code == 401
    assert requests.get(url, auth=MLFLOW_LOGIN, timeout=30).status_code == 200


def test_a_foreign_host_name_is_rejected(servers: Servers) -> None:
    url = f"{servers.mlflow}/api/2.0/mlflow/registered-models/search"
    answer = requests.get(url, headers={"Host": "evil.example"}, auth=MLFLOW_LOGIN, timeout=30)
    assert answer.status_code == 403


def test_doctor_names_the_missing_passwords_and_a_run_with_them_registers_a_version(servers: Servers, tmp_path: Path) -> None:
    config_path = write_config(tmp_path)
    login_variables = ("PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    environment_without_passwords = {name: value for name, value in servers.environment.items() if name not in login_variables}

    def nightjar(*arguments: str, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
        command = [*NIGHTJAR, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)

    doctor = nightjar("doctor", str(config_path), environment=environment_without_passwords)
    assert doctor.returncode == 1
    assert "access denied (status 401); set PREFECT_API_AUTH_STRING to user:password" in doctor.stdout
    assert "access denied (status 401); set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in doctor.stdout

    run = nightjar("run", str(config_path), "--json", environment=dict(servers.environment))
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["model"]["version"] == "1"
    doctor = nightjar("doctor", str(config_path), environment=dict(servers.environment))
    assert "version 3.9.1, with password" in doctor.stdout and "version 3.17.2, with password" in doctor.stdout
