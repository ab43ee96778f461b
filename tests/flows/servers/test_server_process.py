"""A supervised server that ends: it is started again, unless it is stopped or ends too often."""

import errno
import logging
import subprocess
import threading
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from flows.servers import server_process
from flows.servers.server_process import MAX_RESTARTS, ServerProcess
from recsys_core.errors import InputError

APPLICATION = """
import os, pathlib

def create_app():
    if pathlib.Path(os.environ["FAILURE_PATH"]).exists():
        end()
    return answer

async def answer(scope, receive, send):
    message = await receive()
    if scope["type"] == "lifespan":
        await send({"type": f"{message['type']}.complete"})
        return
    if scope["path"] == "/end":
        end()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})

def end():
    print("the server ends", flush=True)
    os._exit(3)
"""
"""ASGI application. Its process ends at the request /end, and at its start if the file $FAILURE_PATH exists."""


@pytest.fixture
def failure_path(tmp_path: Path) -> Path:
    """File that makes each server end at its start."""
    return tmp_path / "fails"


@pytest.fixture
def server(tmp_path: Path, failure_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerProcess:
    (tmp_path / "application.py").write_text(APPLICATION)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[3]}:{tmp_path}")
    server = ServerProcess("application", name="test server", health_path="/")
    server.start_serving(log_file=tmp_path / "server.log", environment={"FAILURE_PATH": str(failure_path)})
    return server


def end_process(server: ServerProcess) -> None:
    """Make the current process of the server end."""
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    with suppress(OSError):  # the process ends without an answer
        connection.request("GET", "/end")
        connection.getresponse()
    connection.close()


def test_after_too_many_restarts_the_server_is_given_up_and_its_last_log_lines_are_logged(
    server: ServerProcess, tmp_path: Path, failure_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="nightjar"):
        server.wait_until_ready()
        failure_path.touch()
        end_process(server)
        assert server._supervisor_thread is not None
        server._supervisor_thread.join(60)
    messages = [record.getMessage() for record in caplog.records if record.name == "nightjar"]
    end_message = "the test server ended with exit code 3"
    *restart_messages, last_message = messages
    assert len(restart_messages) == MAX_RESTARTS
    assert all(message.startswith(f"{end_message}; another server is started") for message in restart_messages)
    log_path = tmp_path / "server.log"
    assert last_message.startswith(f"{end_message} again, after {MAX_RESTARTS} restarts; the last lines of {log_path}")
    assert last_message.endswith("the server ends")
    assert server.has_failed
    assert server._process.returncode == 3
    server.stop()


def test_a_server_is_given_up_with_an_error_if_no_other_process_can_be_started(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raise_out_of_memory() -> "subprocess.Popen[bytes]":
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with caplog.at_level(logging.WARNING, logger="nightjar"):
        server.wait_until_ready()
        monkeypatch.setattr(server, "_start_process", raise_out_of_memory)
        end_process(server)
        assert server._supervisor_thread is not None
        server._supervisor_thread.join(60)
    assert server.has_failed
    expected_start = "the test server ended with exit code 3, and no other server can be started: Cannot allocate memory"
    assert caplog.records[-1].getMessage().startswith(expected_start)
    server.stop()


def test_a_server_that_ends_after_a_long_time_is_started_again_any_number_of_times(
    server: ServerProcess, failure_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "STABLE_S", 0.0)  # each duration counts as a long time
    start_process, num_restarts, excess_restart_event = server._start_process, 0, threading.Event()

    def count_restart() -> "subprocess.Popen[bytes]":
        nonlocal num_restarts
        num_restarts += 1
        if num_restarts > MAX_RESTARTS:
            excess_restart_event.set()
        return start_process()

    monkeypatch.setattr(server, "_start_process", count_restart)
    server.wait_until_ready()
    failure_path.touch()
    end_process(server)
    assert excess_restart_event.wait(60)
    server.stop()
    assert not server.has_failed


def test_a_server_that_is_being_started_again_is_stopped_too(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    start_process, restart_event = server._start_process, threading.Event()

    def start_process_while_the_server_is_stopped() -> "subprocess.Popen[bytes]":
        restart_event.set()
        server._stop_event.wait(0.5)
        return start_process()

    monkeypatch.setattr(server, "_start_process", start_process_while_the_server_is_stopped)
    server.wait_until_ready()
    end_process(server)
    assert restart_event.wait(60)
    stop_thread = threading.Thread(target=server.stop, daemon=True)
    stop_thread.start()
    stop_thread.join(60)
    assert not stop_thread.is_alive() and server._process.poll() is not None


def test_the_error_on_a_full_disk_does_not_say_that_a_running_server_has_ended(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(server_process, "MIN_FREE_BYTES", 2**80)
    with pytest.raises(InputError, match=r"the test server, which did not answer within 0 s, takes at least .* GiB, but"):
        server.wait_until_ready()
    server.stop()
