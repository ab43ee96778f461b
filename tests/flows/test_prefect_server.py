"""The embedded Prefect server: it needs a password, is restarted when it dies, and reports why it cannot start."""

import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from flows.prefect_server import EmbeddedServer, embedded_server
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
    with isolated_home(tmp_path):
        yield tmp_path


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "prefect.log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[EmbeddedServer]:
    with isolated_home(log.parent), embedded_server() as server:
        assert server is not None
        server.begin(log_file=log)
        server.wait()
        yield server


def status(url: str, *, secret: str | None = None) -> int:
    """Return the HTTP status of a request for flow runs."""
    manager = urllib.request.HTTPPasswordMgrWithPriorAuth()
    if secret is not None:
        manager.add_password(None, url, *secret.split(":", 1), is_authenticated=True)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPBasicAuthHandler(manager))
    request = urllib.request.Request(f"{url}/flow_runs/filter", data=b"{}", headers={"Content-Type": "application/json"})
    try:
        with opener.open(request, timeout=120) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_requests_need_the_password_and_no_command_line_or_log_holds_it(server: EmbeddedServer, log: Path) -> None:
    secret = os.environ["PREFECT_API_AUTH_STRING"]
    assert status(server.api) == 401
    assert status(server.api, secret="nightjar:guess") == 401
    assert status(server.api, secret=secret) == 200
    password = secret.partition(":")[2]
    assert password not in " ".join(psutil.Process(server.pid).cmdline())
    assert password not in log.read_text()


def test_the_server_is_in_a_session_of_its_own(server: EmbeddedServer) -> None:
    assert os.getsid(server.pid) == server.pid != os.getsid(0)


def test_a_killed_server_is_restarted_and_clients_wait_meanwhile(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    secret, first = os.environ["PREFECT_API_AUTH_STRING"], server.pid
    os.kill(first, signal.SIGKILL)
    # Not psutil's wait: it would take the exit status from the supervisor, which waits for the same child.
    deadline = time.monotonic() + 30
    while server.pid == first and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.pid != first
    assert status(server.api, secret=secret) == 200
    assert "the embedded Prefect server was ended by SIGKILL; another server is started" in caplog.text


def test_the_error_of_a_server_that_cannot_start_has_its_last_log_lines(home: Path) -> None:
    (home / "prefect").mkdir()
    (home / "prefect" / "prefect.db").write_bytes(b"no database" * 100)
    with embedded_server() as server:
        assert server is not None
        server.begin(log_file=home / "prefect.log")
        with pytest.raises(StageError, match=r"(?s)ended with exit code \d; the last lines of .*prefect.log:.*not a database"):
            server.wait()


def test_two_first_servers_of_one_workspace_both_start(home: Path) -> None:
    servers = [EmbeddedServer(), EmbeddedServer()]
    try:
        for number, server in enumerate(servers):
            server.begin(log_file=home / f"{number}.log")
        with ThreadPoolExecutor() as pool:
            list(pool.map(EmbeddedServer.wait, servers))
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
            server.begin(log_file=small_disk / "prefect.log")
    assert not (small_disk / "prefect").exists()
