"""The embedded Prefect server: it needs a password, is restarted when it dies, and reports why it cannot start."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from packaging.requirements import Requirement

from flows.servers.prefect_server import SLOW_IMPORTS, PrefectServer, embedded_server
from flows.settings.environment import set_flow_run_retention
from recsys_core.errors import InputError, StageError


@contextmanager
def isolated_home(folder: Path) -> Iterator[None]:
    """Remove the environment's Prefect settings and use a new PREFECT_HOME."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("PREFECT_"):
                patch.delenv(name)
        patch.setenv("PREFECT_HOME", str(folder / "prefect"))
        yield


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """The folder that contains a new PREFECT_HOME, for a test that starts its own server."""
    with isolated_home(tmp_path):
        yield tmp_path


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "prefect.log"


@pytest.fixture(scope="module")
def server(log_path: Path) -> Iterator[PrefectServer]:
    """A running server, with its own PREFECT_HOME, for all tests of this module."""
    with isolated_home(log_path.parent), embedded_server() as server:
        assert server is not None
        server.start_prefect(log_file=log_path)
        server.wait_until_ready()
        yield server


def status_of(url: str, *, login: str | None = None) -> int:
    """Return the HTTP status of a request for flow runs, with `login` (user:password) or without a login."""
    password_manager = urllib.request.HTTPPasswordMgrWithPriorAuth()
    if login is not None:
        password_manager.add_password(None, url, *login.split(":", 1), is_authenticated=True)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPBasicAuthHandler(password_manager))
    request = urllib.request.Request(f"{url}/flow_runs/filter", data=b"{}", headers={"Content-Type": "application/json"})
    try:
        with opener.open(request, timeout=120) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_requests_need_a_password_that_is_in_no_command_line_and_no_log(server: PrefectServer, log_path: Path) -> None:
    login = os.environ["PREFECT_API_AUTH_STRING"]
    assert status_of(server.api_url) == 401
    assert status_of(server.api_url, login="nightjar:guess") == 401
    assert status_of(server.api_url, login=login) == 200
    password = login.partition(":")[2]
    assert password not in " ".join(psutil.Process(server.pid).cmdline())
    assert password not in log_path.read_text()


def test_the_server_is_in_a_session_of_its_own(server: PrefectServer) -> None:
    assert os.getsid(server.pid) == server.pid != os.getsid(0)


def test_a_killed_server_is_restarted_and_clients_wait_meanwhile(
    server: PrefectServer, caplog: pytest.LogCaptureFixture
) -> None:
    login, killed_pid = os.environ["PREFECT_API_AUTH_STRING"], server.pid
    os.kill(killed_pid, signal.SIGKILL)
    # Poll the pid, because psutil's wait would take the exit status of the server before the supervisor reads it.
    deadline = time.monotonic() + 30
    while server.pid == killed_pid and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.pid != killed_pid
    assert status_of(server.api_url, login=login) == 200
    assert "the embedded Prefect server was ended by SIGKILL; another server is started" in caplog.text


def test_the_error_of_a_server_that_cannot_start_has_its_last_log_lines(home: Path) -> None:
    (home / "prefect").mkdir()
    (home / "prefect" / "prefect.db").write_bytes(b"no database" * 100)
    with embedded_server() as server:
        assert server is not None
        server.start_prefect(log_file=home / "prefect.log")
        with pytest.raises(StageError, match=r"(?s)ended with exit code \d; the last lines of .*prefect.log:.*not a database"):
            server.wait_until_ready()


def test_with_an_empty_prefect_api_url_the_command_starts_a_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "")  # `${PREFECT_API_URL}` in a compose file can be empty
    with embedded_server() as server:
        assert server is not None


@pytest.mark.drill
def test_two_servers_that_create_one_database_both_start(home: Path) -> None:
    servers = [PrefectServer(), PrefectServer()]
    try:
        for number, server in enumerate(servers):
            server.start_prefect(log_file=home / f"{number}.log")
        with ThreadPoolExecutor() as pool:
            list(pool.map(PrefectServer.wait_until_ready, servers))
        assert all(psutil.Process(server.pid).is_running() for server in servers)
    finally:
        for server in servers:
            server.stop()


def test_the_embedded_prefect_server_is_not_started_on_a_disk_without_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(small_disk / "prefect"))
    message = rf"^{small_disk}: the embedded Prefect server with its database takes at least 0\.031 GiB, but the disk has"
    with embedded_server() as server:
        assert server is not None
        with pytest.raises(InputError, match=message):
            server.start_prefect(log_file=small_disk / "prefect.log")
    assert not (small_disk / "prefect").exists()


@pytest.mark.drill
def test_the_embedded_server_deletes_old_flow_runs_with_their_logs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ["PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS"] = "1"  # the default is an hour
    set_flow_run_retention(num_days=7)
    with embedded_server() as server:
        assert server is not None
        server.start_prefect(log_file=home / "prefect.log")
        server.wait_until_ready()
        user, password = os.environ["PREFECT_API_AUTH_STRING"].split(":", 1)
        with httpx.Client(base_url=server.api_url, auth=(user, password), timeout=60) as client:
            flow_id = _post(client, "/flows/", {"name": "f"})["id"]
            old_run_id, new_run_id = (_create_completed_run(client, flow_id) for _ in range(2))
            with closing(sqlite3.connect(home / "prefect" / "prefect.db", timeout=60)) as database, database:
                database.execute("UPDATE flow_run SET end_time = '2020-01-01 00:00:00.000000' WHERE id = ?", [old_run_id])
            deadline = time.monotonic() + 120
            while client.get(f"/flow_runs/{old_run_id}").status_code != 404 or len(_run_ids_of_logs(client)) > 1:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert client.get(f"/flow_runs/{new_run_id}").status_code == 200
            assert _run_ids_of_logs(client) == {new_run_id}


def _post(client: httpx.Client, path: str, content: Any) -> Any:
    """Return the JSON response; repeat the request while the database is locked, as Prefect's own client does."""
    while (response := client.post(path, json=content)).status_code == 503:
        time.sleep(0.2)
    response.raise_for_status()
    return response.json() if response.content else None


def _create_completed_run(client: httpx.Client, flow_id: str) -> str:
    """Create a completed flow run with a log line; return its id."""
    run_id = str(_post(client, "/flow_runs/", {"flow_id": flow_id, "state": {"type": "COMPLETED"}})["id"])
    log_line = {"name": "l", "level": 20, "message": "m", "timestamp": "2026-01-01T00:00:00Z", "flow_run_id": run_id}
    _post(client, "/logs/", [log_line])
    return run_id


def _run_ids_of_logs(client: httpx.Client) -> set[str]:
    return {log_line["flow_run_id"] for log_line in _post(client, "/logs/filter", {})}


@pytest.mark.parametrize(("variable_value", "expected_heartbeat_s"), [(None, None), ("60", 60)])
def test_the_run_of_a_command_sends_heartbeats_only_if_they_are_configured(
    variable_value: str | None, expected_heartbeat_s: int | None, tmp_path: Path
) -> None:
    environment = dict(os.environ)
    environment.pop("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", None)
    if variable_value is not None:
        environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] = variable_value
    script = (
        "import sys\nfrom pathlib import Path\nfrom flows.servers.prefect_server import prefect_session\n"
        "with prefect_session(None, 'json:loads', log_file=Path(sys.argv[1])):\n"
        "    from prefect.settings import get_current_settings\n"
        "    print(get_current_settings().flows.heartbeat_frequency)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "log")], env=environment, capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == str(expected_heartbeat_s)


@pytest.mark.parametrize("python_version", ["3.11", "3.12", "3.13"])
def test_prefect_requires_the_libraries_that_nightjar_imports_before_prefect(python_version: str) -> None:
    environment = {"python_version": python_version, "python_full_version": f"{python_version}.0", "extra": ""}
    required_distributions = {
        requirement.name
        for requirement in map(Requirement, metadata.requires("prefect") or ())
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }
    distribution_by_library = {"docket": "pydocket"}  # other distributions have the name of their library
    imported_libraries = ("uvicorn", *SLOW_IMPORTS)
    assert {distribution_by_library.get(library, library) for library in imported_libraries} <= required_distributions
