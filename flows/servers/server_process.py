"""A server as a supervised subprocess that ends with the command.

The server has its own process session, so Ctrl-C in the terminal does not end the server before the run ends. The command
owns the listening socket. If the server dies, the command starts another server on the same socket and database. Until then,
clients wait in the connection queue of the socket.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from recsys_core.disk import require_free_space
from recsys_core.errors import InputError, StageError
from recsys_core.termination import parent_environment

HOST = "127.0.0.1"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
MAX_RESTARTS = 5
"""Largest number of restarts in a row. The count starts again at 0 after a server has run for STABLE_S."""
STABLE_S = 600.0
NUM_LOG_LINES = 5
SOCKET_BACKLOG = 1024
MIN_FREE_BYTES = 2**25
"""Required free disk space: a new database, the server's log and the first files of a run."""
WORKSPACE_VARIABLE, CREDENTIALS_VARIABLE = "NIGHTJAR_WORKSPACE", "NIGHTJAR_MLFLOW_PASSWORD"
"""Environment variables of the MLflow server's process: the path of the workspace, and the credentials, as user:password."""
LOG = logging.getLogger("nightjar")


class ServerProcess:
    """A server process (`flows/servers/__main__.py`). It imports its libraries immediately, and serves after `start_serving`.

    Args:
        application_module: module whose `create_app` returns the application.
        libraries: modules that the process imports before it gets its environment variables.
        health_path: path of the URL that answers when the server is ready.
        port: port of the server; 0: any free port.
        port_option: option that sets the port. The error message names it if the port is in use.
    """

    def __init__(
        self,
        application_module: str,
        *,
        name: str,
        health_path: str,
        libraries: Sequence[str] = (),
        port: int = 0,
        port_option: str = "",
    ) -> None:
        self._name, self._health_path = name, health_path
        try:
            self._listening_socket = socket.create_server((HOST, port), backlog=SOCKET_BACKLOG)
        except OSError as error:
            problem = f"port {port} on {HOST}: {os.strerror(error.errno or 0)}"
            raise InputError(f"{problem}; set {port_option} to a free port") from None
        socket_fd = str(self._listening_socket.fileno())
        self._command = [sys.executable, "-m", "flows.servers", socket_fd, application_module, *libraries]
        self._environment: dict[str, str] = {}
        self._log_file = Path()
        self._log_start_byte = 0
        self._stop_event = threading.Event()
        self._process_lock = threading.Lock()  # held while the process is replaced, and while it is ended for good
        self._supervisor_thread: threading.Thread | None = None
        self.has_failed = False
        self._process = self._start_process()

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://{HOST}:{self._listening_socket.getsockname()[1]}"

    @property
    def pid(self) -> int:
        """Process id of the current server."""
        return self._process.pid

    def start_serving(self, *, log_file: Path, environment: Mapping[str, str]) -> None:
        """Make the process serve, with the variables of `environment` and with its output in `log_file`."""
        self._log_file = log_file
        self._log_start_byte = log_file.stat().st_size if log_file.is_file() else 0
        self._environment = dict(environment)
        self._send_start_message()

    def wait_until_ready(self) -> None:
        """Wait until the server answers, then supervise it. Raise StageError with its last log lines if it does not answer."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach the loopback address
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline_s:
            try:
                with opener.open(f"{self.url}{self._health_path}", timeout=2):
                    self._supervisor_thread = threading.Thread(target=self._supervise, daemon=True)
                    self._supervisor_thread.start()
                    return
            except OSError:  # refused, reset or timed out: the server is not ready
                time.sleep(0.1)
        problem = f"did not answer within {START_TIMEOUT_S:g} s" if self._process.poll() is None else self._describe_end()
        require_free_space(self._log_file.parent, MIN_FREE_BYTES, subject=f"the {self._name}, which {problem},")
        raise StageError(f"the {self._name} {problem}{self._last_log_lines()}")

    def stop(self) -> None:
        """Stop the server, which first writes its state to the database. No other server is started."""
        with self._process_lock:
            self._stop_event.set()
            self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._supervisor_thread is not None:
            self._supervisor_thread.join()
        self._listening_socket.close()

    def _start_process(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | parent_environment(),
            pass_fds=[self._listening_socket.fileno()],
            start_new_session=True,
        )

    def _send_start_message(self) -> None:
        """Send the log file and the environment through a pipe. The environment contains passwords."""
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                pipe.write(json.dumps({"log": str(self._log_file), "environment": self._environment}).encode())
        except BrokenPipeError:  # the process has ended, which `wait_until_ready` or the supervisor reports
            pass

    def _supervise(self) -> None:
        """Start another server whenever the server ends, up to MAX_RESTARTS times in a row."""
        num_restarts = 0
        while True:
            start_s = time.monotonic()
            self._process.wait()
            with self._process_lock:
                if self._stop_event.is_set():
                    return
                problem = f"the {self._name} {self._describe_end()}"
                if time.monotonic() - start_s >= STABLE_S:
                    num_restarts = 0
                if num_restarts == MAX_RESTARTS:
                    problem += f" again, after {MAX_RESTARTS} restarts"
                    break
                LOG.warning("%s; another server is started%s", problem, self._last_log_lines())
                try:
                    self._process = self._start_process()
                except OSError as error:  # too little memory, or too many processes or open files
                    problem += f", and no other server can be started: {os.strerror(error.errno or 0)}"
                    break
                self._send_start_message()
                num_restarts += 1
        LOG.error("%s%s", problem, self._last_log_lines())
        self.has_failed = True
        self._listening_socket.close()  # clients fail immediately instead of waiting for a server

    def _describe_end(self) -> str:
        exit_code = self._process.returncode
        return f"was ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"

    def _last_log_lines(self) -> str:
        """Return the last log lines of this server. Lines of earlier servers in the same file are left out."""
        log_lines: list[str] = []
        if self._log_file.is_file():
            with self._log_file.open("rb") as file:
                file.seek(self._log_start_byte)
                log_lines = file.read().decode(errors="replace").splitlines()[-NUM_LOG_LINES:]
        if not log_lines:
            return f"; {self._log_file} has no line of this server"
        return "\n".join((f"; the last lines of {self._log_file}:", *log_lines))
