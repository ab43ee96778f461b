"""Embedded Prefect server: a supervised subprocess that ends with the command.

The server has its own session, so Ctrl-C in the terminal does not end the server before the run ends. The command owns the
listening socket. If the server dies, the command starts another server on the same socket and database, and clients wait in the
socket's queue meanwhile.
"""

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recsys_core.disk import require_free
from recsys_core.errors import StageError
from recsys_core.parent_process import parent_environment

HOST = "127.0.0.1"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
MAX_RESTARTS = 5
NUM_LOG_LINES = 5
BACKLOG = 1024
MIN_FREE_BYTES = 2**25
"""Disk space for a new database, its log and the first files of a run."""
LOG = logging.getLogger("nightjar")


class EmbeddedServer:
    """The server process. It imports libraries when it is created, starts to serve after `begin`, and is ready after `wait`."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0), backlog=BACKLOG)
        self._environment: dict[str, str] = {}
        self._log_file: Path | None = None
        self._log_start = self._restarts = 0
        self._stopping = threading.Event()
        self._supervisor: threading.Thread | None = None
        self._process = self._start()

    @property
    def api(self) -> str:
        """Address of the API."""
        return f"http://{HOST}:{self._listener.getsockname()[1]}/api"

    @property
    def pid(self) -> int:
        """Process id of the current server."""
        return self._process.pid

    def begin(self, *, log_file: Path) -> None:
        """Start to serve the database in PREFECT_HOME; set PREFECT_API_URL and the server's password for this process.

        Call before Prefect is imported.

        Args:
            log_file: file for the output of the server.
        """
        for folder in (log_file.parent, Path(os.environ.get("PREFECT_HOME", log_file.parent))):
            require_free(folder, MIN_FREE_BYTES, subject="the embedded Prefect server with its database")
        password = f"nightjar:{secrets.token_urlsafe(32)}"  # other users of this host can connect to the port
        self._log_file = log_file
        self._log_start = log_file.stat().st_size if log_file.is_file() else 0
        os.environ.update(PREFECT_API_URL=self.api, PREFECT_API_AUTH_STRING=password)
        os.environ.setdefault("PREFECT_UI_URL", "")  # no UI: Prefect would derive its address from the API's
        self._environment = {
            **os.environ,
            "PREFECT_SERVER_API_AUTH_STRING": password,
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
            # Blocks are used by the UI only, whose server registers them.
            "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
            "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
        }
        self._send_start_message()

    def wait(self) -> None:
        """Wait until the server answers, then supervise it; raise StageError with its last log lines if it ends before."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach the loopback address
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with opener.open(f"{self.api}/health", timeout=2):
                    self._supervisor = threading.Thread(target=self._supervise, daemon=True)
                    self._supervisor.start()
                    return
            except OSError:  # refused, reset or timed out: the server is not ready
                time.sleep(0.1)
        if self._log_file is not None:
            require_free(self._log_file.parent, MIN_FREE_BYTES, subject="the embedded Prefect server, which has ended,")
        problem = f"did not answer within {START_TIMEOUT_S:g} s" if self._process.poll() is None else self._describe_end()
        raise StageError(f"the embedded Prefect server {problem}{self._last_lines()}")

    def stop(self) -> None:
        """Stop the server, which writes its state to the database first."""
        self._stopping.set()
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._supervisor is not None:
            self._supervisor.join()
        self._listener.close()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.prefect_process", str(self._listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | parent_environment(),
            pass_fds=[self._listener.fileno()],
            start_new_session=True,
        )

    def _send_start_message(self) -> None:
        """Send log file and environment, which holds the password, through a pipe: any user can read a command line."""
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                pipe.write(json.dumps({"log": str(self._log_file), "environment": self._environment}).encode())
        except BrokenPipeError:  # the process has ended, which `wait` or the supervisor reports
            pass

    def _supervise(self) -> None:
        while True:
            self._process.wait()
            if self._stopping.is_set():
                return
            if self._restarts == MAX_RESTARTS:
                LOG.error(
                    "the embedded Prefect server %s again, after %d restarts%s",
                    self._describe_end(),
                    self._restarts,
                    self._last_lines(),
                )
                self._listener.close()  # clients fail at once instead of waiting for a server
                return
            self._restarts += 1
            LOG.warning("the embedded Prefect server %s; another server is started%s", self._describe_end(), self._last_lines())
            self._process = self._start()
            self._send_start_message()

    def _describe_end(self) -> str:
        exit_code = self._process.returncode
        return f"was ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"

    def _last_lines(self) -> str:
        """Return the last log lines of this server, after those of earlier servers."""
        if self._log_file is None or not self._log_file.is_file():
            return ""
        with self._log_file.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()[-NUM_LOG_LINES:]
        return (
            "\n".join((f"; the last lines of {self._log_file}:", *lines))
            if lines
            else f"; {self._log_file} has no line of this server"
        )


@contextmanager
def embedded_server() -> Iterator[EmbeddedServer | None]:
    """Yield a server, which is stopped after the body; None if PREFECT_API_URL names another server."""
    if "PREFECT_API_URL" in os.environ:
        yield None
        return
    users_password = os.environ.get("PREFECT_API_AUTH_STRING")
    server = EmbeddedServer()
    try:
        yield server
    finally:
        server.stop()
        os.environ.pop("PREFECT_API_URL", None)
        os.environ.pop("PREFECT_API_AUTH_STRING", None)
        if users_password is not None:
            os.environ["PREFECT_API_AUTH_STRING"] = users_password


@contextmanager
def prefect_session(server: EmbeddedServer | None, *, log_file: Path) -> Iterator[None]:
    """Start to use the server before the body, which imports Prefect and calls flows; send its log records after the body.

    Args:
        log_file: file for the output of the server.
    """
    if server is not None:
        server.begin(log_file=log_file)
    from prefect.logging.handlers import APILogWorker  # takes seconds; meanwhile the server starts

    if server is not None:
        server.wait()
    try:
        yield
    finally:
        APILogWorker.drain_all()  # by default Prefect sends the records at exit, after the end of the server
