"""Servers on loopback that a drill kills, stops and starts again on the same port."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

TIMEOUT_S = 400.0


def clean_environment() -> dict[str, str]:
    """Return the environment of this process without settings of Prefect, MLflow, AWS and PostgreSQL."""
    prefixes = ("PREFECT_", "MLFLOW_", "AWS_", "PG")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def free_port() -> int:
    """Return a port of the loopback that no process uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RestartableServer:
    """A server in a process group of its own; its output is appended to `log_file`.

    Args:
        arguments: module of the server and its arguments.
        port: port of the server, as in `arguments`.
        health_path: path that answers as soon as the server is ready.
        environment: environment variables of the server.
    """

    def __init__(
        self, arguments: Sequence[str], *, port: int, health_path: str, environment: Mapping[str, str], log_file: Path
    ) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self._command, self._health_url = [sys.executable, "-m", *arguments], self.address + health_path
        self._environment, self._log_file = dict(environment), log_file
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True, cwd=self._log_file.parent
            )
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(self._health_url, timeout=5).close()
                return
            except OSError:
                assert self._process.poll() is None and time.monotonic() < deadline, self._log_file.read_text()
                time.sleep(0.2)

    def stop(self, stop_signal: signal.Signals) -> None:
        """Send a signal to all processes of the server and wait for its end. Do nothing if it is not running."""
        if self._process is not None:
            os.killpg(self._process.pid, stop_signal)
            self._process.wait(timeout=60)
            self._process = None


def mlflow_server(folder: Path) -> RestartableServer:
    """Return an MLflow server, not yet started, on the sqlite database <folder>/server.db."""
    port = free_port()
    store = ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder / "artifacts")]
    return RestartableServer(
        ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *store],
        port=port,
        health_path="/health",
        environment=clean_environment() | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        log_file=folder / "mlflow.log",
    )


def prefect_server(folder: Path) -> RestartableServer:
    """Return a Prefect server, not yet started, on a sqlite database in <folder>/prefect-server."""
    port = free_port()
    settings = {"PREFECT_HOME": str(folder / "prefect-server"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    return RestartableServer(
        ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        port=port,
        health_path="/api/health",
        environment=clean_environment() | settings,
        log_file=folder / "prefect.log",
    )


@contextmanager
def running(server: RestartableServer) -> Iterator[RestartableServer]:
    """Start the server; end it after the body, whether or not the body has ended it."""
    try:
        server.start()
        yield server
    finally:
        server.stop(signal.SIGTERM)
