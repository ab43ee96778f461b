"""Supervision of the processes of the HTTP server: start, the version to serve, restarts, and the end."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from recsys_core.errors import InputError, StageError
from recsys_core.http_server.access import token_from_environment
from recsys_core.http_server.config import ServeConfig
from recsys_core.http_server.release import CONFIG_NAME, RELEASE_NAME, WorkerState, worker_path
from recsys_core.parent_process import parent_environment
from tasks.serve.registry_champion import RegistryChampion

LOG = logging.getLogger("nightjar")
START_TIMEOUT_S = 600.0
MAX_RESTARTS = 10
"""Restarts of a worker that dies. A worker that dies in each start is a bug that a restart does not repair."""
BACKLOG = 2048
CHECK_INTERVAL_S = 0.2


class _Worker:
    """A process that answers requests, started again when it dies."""

    def __init__(self, index: int, *, folder: Path, listener: socket.socket) -> None:
        self._index, self._folder, self._listener = index, folder, listener
        self.num_restarts = 0
        self.process = self._start()

    @property
    def state(self) -> WorkerState | None:
        """What the process serves; None until it has written it."""
        state = WorkerState.read(worker_path(self._folder, self._index))
        return state if state is not None and state.pid == self.process.pid else None

    def restart_if_dead(self) -> None:
        """Start the process again if it has ended. Raise StageError after MAX_RESTARTS."""
        status = self.process.poll()
        if status is None:
            return
        if self.num_restarts >= MAX_RESTARTS:
            raise StageError(f"worker {self._index} ended {MAX_RESTARTS + 1} times, the last time with status {status}")
        LOG.error("worker %d ended with status %s; it is started again", self._index, status)
        self.num_restarts += 1
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        descriptor = self._listener.fileno()
        metrics_folder = self._folder / "metrics"
        environment = os.environ | parent_environment() | {"PROMETHEUS_MULTIPROC_DIR": str(metrics_folder)}
        command = [sys.executable, "-m", "recsys_core.http_server", str(descriptor), str(self._folder), str(self._index)]
        return subprocess.Popen(command, env=environment, pass_fds=[descriptor], process_group=0)


def serve(
    config: ServeConfig,
    champion: RegistryChampion,
    *,
    stop: threading.Event,
    on_ready: Callable[[str, str], None] = lambda url, version: None,
) -> None:
    """Serve the champion until `stop` is set.

    Args:
        on_ready: called when all processes answer, with the address and the version.

    Raises:
        InputError: the address cannot be used, or the token is invalid.
        StageError, TrackingServerError: there is no champion that loads, or the registry does not answer.
    """
    token_from_environment()  # raises InputError
    with _listener(config) as listener, TemporaryDirectory(prefix="nightjar-serve-") as folder_name:
        folder = Path(folder_name)
        (folder / "metrics").mkdir()
        (folder / CONFIG_NAME).write_text(config.model_dump_json())
        champion.poll().write(folder / RELEASE_NAME)
        workers = [_Worker(index, folder=folder, listener=listener) for index in range(config.num_workers)]
        try:
            if not _wait_until_ready(workers, stop=stop):
                return
            host, port = listener.getsockname()[:2]
            on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}", champion.poll().release.version)
            _follow(config, champion, workers, release_path=folder / RELEASE_NAME, stop=stop)
        finally:
            _end(workers, timeout_s=config.shutdown_timeout_s + 5.0)


def _listener(config: ServeConfig) -> socket.socket:
    """Return the listening socket that all workers share."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise InputError(
            f"serve: cannot listen on {config.host} port {config.port} ({error.strerror}); choose another serve.host or "
            "serve.port"
        ) from None
    return listener


def _wait_until_ready(workers: list[_Worker], *, stop: threading.Event) -> bool:
    """Return True when each worker serves a version, and False if `stop` is set before."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not stop.wait(CHECK_INTERVAL_S):
        states = [worker.state for worker in workers]
        for worker, state in zip(workers, states, strict=True):
            if worker.process.poll() is not None:
                problem = "it ended before it was ready; its last line says why" if state is None else state.problem
                raise StageError(f"the champion cannot be served: {problem}")
        if all(state is not None and state.version is not None for state in states):
            return True
        if time.monotonic() > deadline:
            raise StageError(f"the champion was not loaded within {START_TIMEOUT_S:,.0f} s")
    return False


def _follow(
    config: ServeConfig, champion: RegistryChampion, workers: list[_Worker], *, release_path: Path, stop: threading.Event
) -> None:
    """Write the version to serve whenever it changes, and restart workers that die, until `stop` is set."""
    next_poll_s = time.monotonic()
    while not stop.wait(CHECK_INTERVAL_S):
        for worker in workers:
            worker.restart_if_dead()
        if time.monotonic() >= next_poll_s:
            champion.poll().write(release_path)
            next_poll_s = time.monotonic() + config.poll_interval_s


def _end(workers: list[_Worker], *, timeout_s: float) -> None:
    """End the workers: they finish open requests, and get SIGKILL after the timeout."""
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        try:
            worker.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
