"""A supervised server that ends: it is started again, unless it is stopped or ends too often."""

import logging
import subprocess
import threading
from pathlib import Path

import pytest

from flows.servers import server_process
from flows.servers.server_process import MAX_RESTARTS, ServerProcess
from recsys_core.errors import InputError

ONE_REQUEST = """
import os, pathlib

def create_app():
    if pathlib.Path(os.environ["SERVED"]).exists():
        end()
    return answer

async def answer(scope, receive, send):
    message = await receive()
    if scope["type"] == "lifespan":
        await send({"type": f"{message['type']}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})
    pathlib.Path(os.environ["SERVED"]).touch()
    end()

def end():
    print("the server ends", flush=True)
    os._exit(3)
"""


def test_a_server_that_ends_again_and_again_is_given_up_with_its_last_log_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "one_request.py").write_text(ONE_REQUEST)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[3]}:{tmp_path}")
    server = ServerProcess("one_request", name="test server", health_path="/")
    server.start_serving(log_file=tmp_path / "server.log", environment={"SERVED": str(tmp_path / "served")})
    with caplog.at_level(logging.WARNING, logger="nightjar"):
        server.wait_until_ready()
        assert server._supervisor_thread is not None
        server._supervisor_thread.join(60)
    messages = [record.getMessage() for record in caplog.records if record.name == "nightjar"]
    end = "the test server ended with exit code 3"
    assert [message.startswith(f"{end}; another server is started") for message in messages[:-1]] == [True] * MAX_RESTARTS
    assert messages[-1].startswith(f"{end} again, after {MAX_RESTARTS} restarts; the last lines of {tmp_path / 'server.log'}")
    assert messages[-1].endswith("the server ends")
    assert server.has_failed
    assert server._process.returncode == 3, "the last server had ended before"
    server.stop()


def test_a_server_that_is_being_started_again_is_stopped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one_request.py").write_text(ONE_REQUEST)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[3]}:{tmp_path}")
    server = ServerProcess("one_request", name="test server", health_path="/")
    start_process, restart_event = server._start_process, threading.Event()

    def start_process_while_the_server_is_stopped() -> "subprocess.Popen[bytes]":
        restart_event.set()
        server._stop_event.wait(0.5)
        (tmp_path / "served").unlink()  # without this file, the new process does not end by itself
        return start_process()

    monkeypatch.setattr(server, "_start_process", start_process_while_the_server_is_stopped)
    server.start_serving(log_file=tmp_path / "server.log", environment={"SERVED": str(tmp_path / "served")})
    server.wait_until_ready()
    assert restart_event.wait(60)
    stop_thread = threading.Thread(target=server.stop, daemon=True)
    stop_thread.start()
    stop_thread.join(60)
    assert not stop_thread.is_alive() and server._process.poll() is not None


def test_the_error_on_a_full_disk_does_not_say_that_a_running_server_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(server_process, "MIN_FREE_BYTES", 2**80)
    server = ServerProcess("one_request", name="test server", health_path="/")
    server._log_file = tmp_path / "server.log"
    with pytest.raises(InputError, match="the test server, which did not answer within 0 s, takes at least"):
        server.wait_until_ready()
    server.stop()
