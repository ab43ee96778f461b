"""The embedded Prefect server as the command line sees it: a process of its own session, supervised, that ends with this one.

Signals of the terminal do not reach it, so it answers until the run is closed. The listening socket belongs to this process:
when the server dies, clients wait in the socket's queue for the one that takes its place on the same database.
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
from recsys_core.parent_process import as_parent

HOST = "127.0.0.1"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
MOST_RESTARTS = 5
LAST_LINES = 5
BACKLOG = 1024
LEAST_BYTES = 2**25
"""Of a new database, its log and the files of a run's start."""
LOG = logging.getLogger("nightjar")


class EmbeddedServer:
    """Starts to import at once; serves after `begin`, answers after `wait`."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0), backlog=BACKLOG)
        self._orders: dict[str, str] = {}
        self._log: Path | None = None
        self._log_start = self._restarts = 0
        self._stopping = threading.Event()
        self._supervisor: threading.Thread | None = None
        self._process = self._start()

    @property
    def api(self) -> str:
        """The address of the API."""
        return f"http://{HOST}:{self._listener.getsockname()[1]}/api"

    @property
    def pid(self) -> int:
        """Of the process that serves now."""
        return self._process.pid

    def begin(self, *, log: Path) -> None:
        """Serves the database of PREFECT_HOME and sets PREFECT_API_URL and its secret here; the server's output goes to `log`.

        Call before Prefect is imported.
        """
        for folder in (log.parent, Path(os.environ.get("PREFECT_HOME", log.parent))):
            require_free(folder, LEAST_BYTES, what="the embedded Prefect server with its database")
        secret = f"nightjar:{secrets.token_urlsafe(32)}"  # every user of this host can reach the port
        self._log, self._log_start = log, log.stat().st_size if log.is_file() else 0
        os.environ.update(PREFECT_API_URL=self.api, PREFECT_API_AUTH_STRING=secret)
        self._orders = {
            **os.environ,
            "PREFECT_SERVER_API_AUTH_STRING": secret,
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
            # Blocks are for the UI, whose own server registers them.
            "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
            "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
        }
        self._give_orders()

    def wait(self) -> None:
        """Returns once the server answers and supervises it from then on. Raises StageError if it ends, with its last lines."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback is never behind a proxy
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with opener.open(f"{self.api}/health", timeout=2):
                    self._supervisor = threading.Thread(target=self._supervise, daemon=True)
                    self._supervisor.start()
                    return
            except OSError:  # refused, reset, timed out: not there yet
                time.sleep(0.1)
        if self._log is not None:
            require_free(self._log.parent, LEAST_BYTES, what="the embedded Prefect server, which has ended,")
        late = f"gave no answer within {START_TIMEOUT_S:g} s" if self._process.poll() is None else self._ending()
        raise StageError(f"the embedded Prefect server {late}{self._last_lines()}")

    def stop(self) -> None:
        """Ends the server; what it holds in memory is written first."""
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
            env=os.environ | as_parent(),
            pass_fds=[self._listener.fileno()],
            start_new_session=True,
        )

    def _give_orders(self) -> None:
        """Through a pipe: a command line is everybody's to read."""
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                pipe.write(json.dumps({"log": str(self._log), "environment": self._orders}).encode())
        except BrokenPipeError:  # it is dead: `wait` and the supervisor see that
            pass

    def _supervise(self) -> None:
        while True:
            self._process.wait()
            if self._stopping.is_set():
                return
            if self._restarts == MOST_RESTARTS:
                LOG.error(
                    "the embedded Prefect server %s again, after %d restarts%s",
                    self._ending(),
                    self._restarts,
                    self._last_lines(),
                )
                self._listener.close()  # clients fail at once instead of waiting for nobody
                return
            self._restarts += 1
            LOG.warning("the embedded Prefect server %s; another one takes its place%s", self._ending(), self._last_lines())
            self._process = self._start()
            self._give_orders()

    def _ending(self) -> str:
        code = self._process.returncode
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _last_lines(self) -> str:
        """What the server wrote last, of the part of the log that is its own."""
        if self._log is None or not self._log.is_file():
            return ""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join((f"; the last lines of {self._log}:", *lines)) if lines else f"; {self._log} has no line of it"


@contextmanager
def embedded_server() -> Iterator[EmbeddedServer | None]:
    """A server for the body; None where PREFECT_API_URL names the user's own."""
    if "PREFECT_API_URL" in os.environ:
        yield None
        return
    theirs = os.environ.get("PREFECT_API_AUTH_STRING")
    server = EmbeddedServer()
    try:
        yield server
    finally:
        server.stop()
        os.environ.pop("PREFECT_API_URL", None)
        os.environ.pop("PREFECT_API_AUTH_STRING", None)
        if theirs is not None:
            os.environ["PREFECT_API_AUTH_STRING"] = theirs


@contextmanager
def prefect_session(server: EmbeddedServer | None, *, log: Path) -> Iterator[None]:
    """A body that may import Prefect and call flows; what it logs is sent before the server ends."""
    if server is not None:
        server.begin(log=log)
    from prefect.logging.handlers import APILogWorker  # seconds, while the server starts

    if server is not None:
        server.wait()
    try:
        yield
    finally:
        APILogWorker.drain_all()  # Prefect does so while it exits, too late for the server
