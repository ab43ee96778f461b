"""Servers on loopback that a drill kills, stops and starts again on the same port."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.drills.production_servers import PATIENCE_S, clean_environment, free_port


class RestartableServer:
    """A server in a process group of its own; its output is appended to `log_file`.

    Args:
        arguments: module of the server and its arguments without host and port.
        health_path: path that answers as soon as the server is ready.
        settings: environment variables of the server.
    """

    def __init__(self, arguments: Sequence[str], *, health_path: str, settings: Mapping[str, str], log_file: Path) -> None:
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", *arguments, "--host", "127.0.0.1", "--port", str(self.port)]
        self._health_url = self.address + health_path
        self._environment, self._log_file = clean_environment() | settings, log_file
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True, cwd=self._log_file.parent
            )
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                urllib.request.urlopen(self._health_url, timeout=5).close()
                return
            except OSError:
                assert self._process.poll() is None and time.monotonic() < deadline, self._log_file.read_text()
                time.sleep(0.2)

    def end(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the server, if there are any, and wait for its end."""
        if self._process is not None:
            os.killpg(self._process.pid, number)
            self._process.wait(timeout=60)
            self._process = None


def mlflow_server(folder: Path) -> RestartableServer:
    """Return an MLflow server on the sqlite database <folder>/server.db, not started."""
    store = ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder / "artifacts")]
    return RestartableServer(
        ["mlflow", "server", "--workers", "1", *store],
        health_path="/health",
        settings={"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        log_file=folder / "mlflow.log",
    )


def prefect_server(folder: Path) -> RestartableServer:
    """Return a Prefect server on a sqlite database in `folder`, not started."""
    return RestartableServer(
        ["prefect", "server", "start"],
        health_path="/api/health",
        settings={"PREFECT_HOME": str(folder / "prefect-server"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"},
        log_file=folder / "prefect.log",
    )


@contextmanager
def ended(server: RestartableServer) -> Iterator[RestartableServer]:
    """Yield the server; end it after the body."""
    try:
        yield server
    finally:
        server.end(signal.SIGTERM)
