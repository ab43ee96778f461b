"""Supervision of the processes of the HTTP server: start, switch to another version, restart, and end."""

import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from prometheus_client.multiprocess import mark_process_dead

from recsys_core.errors import InputError, StageError
from recsys_core.http_server.access import token_from_environment
from recsys_core.http_server.config import ServeConfig
from recsys_core.http_server.release import CONFIG_FILE_NAME, RELEASE_FILE_NAME, Champion, WorkerState, worker_path
from recsys_core.termination import parent_environment
from tasks.serve.registry_champion import RegistryChampion

LOG = logging.getLogger("nightjar")
START_TIMEOUT_S = 600.0
MAX_RESTARTS = 10
"""Largest number of consecutive restarts of a worker that dies before it serves. More restarts would not help against a bug."""
BACKLOG = 2048
METRICS_FOLDER = "metrics"
CHECK_INTERVAL_S = 0.2


class _Worker:
    """A process that answers requests, and that is restarted when it dies."""

    def __init__(self, index: int, *, folder: Path, listener: socket.socket, num_threads: int) -> None:
        self._index, self._folder, self._listener, self._num_threads = index, folder, listener, num_threads
        self.num_restarts = 0
        self.process = self._start()

    @property
    def state(self) -> WorkerState | None:
        """Last state that the process has written; None if it has not written a state yet."""
        state = WorkerState.read(worker_path(self._folder, self._index))
        return state if state is not None and state.pid == self.process.pid else None

    def problem_with(self, version: str) -> str | None:
        """Return the reason if the process has refused `version`, or has ended before it served `version`; otherwise None.

        A process that ends while it loads a new version may have needed too much memory.
        """
        state = self.state
        if state is not None and state.refused_version == version:
            return state.problem
        exit_status = self.process.poll()
        if exit_status is None or (state is not None and state.version == version):
            return None
        return f"worker {self._index} ended with status {exit_status} before it served the version"

    def restart_if_dead(self) -> None:
        """Start the process again if it has ended. Raise StageError after MAX_RESTARTS."""
        exit_status = self.process.poll()
        if exit_status is None:
            return
        if (state := self.state) is not None and state.version is not None:
            self.num_restarts = 0
        if self.num_restarts >= MAX_RESTARTS:
            raise StageError(f"worker {self._index} ended {MAX_RESTARTS + 1} times, the last time with status {exit_status}")
        LOG.error("worker %d ended with status %s; it is started again", self._index, exit_status)
        mark_process_dead(self.process.pid, str(self._folder / METRICS_FOLDER))  # removes the gauges of the dead process
        self.num_restarts += 1
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        listener_fd = self._listener.fileno()
        metrics_folder = self._folder / METRICS_FOLDER
        # FAISS reads the number of threads when it is imported; omp_set_num_threads has no effect on threads that start later.
        worker_variables = {"OMP_NUM_THREADS": str(self._num_threads), "PROMETHEUS_MULTIPROC_DIR": str(metrics_folder)}
        environment = os.environ | parent_environment() | worker_variables
        command = [sys.executable, "-m", "recsys_core.http_server", str(listener_fd), str(self._folder), str(self._index)]
        return subprocess.Popen(command, env=environment, pass_fds=[listener_fd], process_group=0)


def serve(
    config: ServeConfig,
    workspace: Path,
    *,
    model_name: str,
    alias: str = "champion",
    stop_event: threading.Event,
    on_ready: Callable[[str, str], None] = lambda url, version: None,
) -> None:
    """Serve the version that has `alias` until `stop_event` is set.

    Args:
        workspace: workspace of the pipeline, whose MLflow is used unless MLFLOW_TRACKING_URI is set.
        on_ready: called when all processes answer, with the address and the version.

    Raises:
        InputError: the address cannot be used, the token is invalid, or no version has the alias.
        StageError, TrackingServerError: the version with the alias does not load, or the registry does not answer.
    """
    token_from_environment()  # raises InputError for an invalid token
    with _open_listener(config) as listener, _temporary_folder() as folder:
        (folder / METRICS_FOLDER).mkdir()
        (folder / CONFIG_FILE_NAME).write_text(config.model_dump_json())
        registry_champion = RegistryChampion(workspace, model_name=model_name, alias=alias, folder=folder / "versions")
        poll_future = _start_in_thread(registry_champion.poll)  # so that `stop_event` ends the function during a long download
        while not poll_future.done():
            if stop_event.wait(CHECK_INTERVAL_S):
                return
        champion = poll_future.result()
        champion.write(folder / RELEASE_FILE_NAME)
        workers = [
            _Worker(index, folder=folder, listener=listener, num_threads=config.threads) for index in range(config.num_workers)
        ]
        try:
            if not _wait_until_ready(workers, stop_event=stop_event):
                return
            host, port = listener.getsockname()[:2]
            on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}", champion.release.version)
            _follow_champion(
                config, registry_champion, champion, workers, release_path=folder / RELEASE_FILE_NAME, stop_event=stop_event
            )
        finally:
            listener.close()  # refuses new connections, which would wait for a process that ends
            _end_workers(workers, timeout_s=config.shutdown_timeout_s + 5.0)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Yield a folder that is removed at the end.

    systemd-tmpfiles removes files below /tmp that no process has opened for some days, such as config.json. The folder is
    locked, because systemd-tmpfiles skips a locked folder.
    """
    with TemporaryDirectory(prefix="nightjar-serve-", ignore_cleanup_errors=True) as folder_name:
        folder_fd = os.open(folder_name, os.O_RDONLY)
        try:
            fcntl.flock(folder_fd, fcntl.LOCK_SH)
            yield Path(folder_name)
        finally:
            os.close(folder_fd)


def _open_listener(config: ServeConfig) -> socket.socket:
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


def _wait_until_ready(workers: list[_Worker], *, stop_event: threading.Event) -> bool:
    """Return True when each worker serves a version, and False if `stop_event` is set before."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not stop_event.wait(CHECK_INTERVAL_S):
        states = [worker.state for worker in workers]
        for worker, state in zip(workers, states, strict=True):
            if (exit_status := worker.process.poll()) is not None:
                problem = None if state is None else state.problem
                end_text = (
                    f"a worker ended with status {exit_status} before all workers were ready; its last line has the reason"
                )
                raise StageError(f"the champion cannot be served: {problem or end_text}")
        if all(state is not None and state.version is not None for state in states):
            return True
        if time.monotonic() > deadline_s:
            raise StageError(f"the champion was not loaded within {START_TIMEOUT_S:,.0f} s")
    return False


def _follow_champion(
    config: ServeConfig,
    registry_champion: RegistryChampion,
    champion: Champion,
    workers: list[_Worker],
    *,
    release_path: Path,
    stop_event: threading.Event,
) -> None:
    """Write the version to serve whenever it changes, and restart workers that die, until `stop_event` is set.

    If a worker cannot serve a new version, all workers return to the former version. The registry is polled in a thread,
    because its answer may take minutes.

    Args:
        champion: the version that the workers serve at the start.
    """
    poll_future: Future[Champion] | None = None
    next_poll_s = time.monotonic()
    while not stop_event.wait(CHECK_INTERVAL_S):
        problem = _problem_with(champion.release.version, workers)
        if poll_future is None and problem is None and all(_serves(worker, champion.release.version) for worker in workers):
            registry_champion.accept()
        if poll_future is None and problem is not None and (former_champion := registry_champion.refuse(problem)) is not None:
            champion = former_champion
            _write_release(champion, release_path)
        # A problem is handled after the poll. Until then, a dead worker is not restarted, because its state may be the only
        # sign of the problem.
        if poll_future is None or problem is None:
            for worker in workers:
                worker.restart_if_dead()
        if poll_future is None and time.monotonic() >= next_poll_s:
            poll_future = _start_in_thread(registry_champion.poll)
        if poll_future is not None and poll_future.done():
            champion = poll_future.result()
            _write_release(champion, release_path)
            poll_future, next_poll_s = None, time.monotonic() + config.poll_interval_s


def _write_release(champion: Champion, release_path: Path) -> None:
    """Write release.json; log an error of the disk, because the workers can serve without the file."""
    try:
        champion.write(release_path)
    except OSError as error:
        LOG.error("%s cannot be written (%s); the workers keep their version", release_path, error.strerror)


def _serves(worker: _Worker, version: str) -> bool:
    state = worker.state
    return state is not None and state.version == version


def _problem_with(version: str, workers: list[_Worker]) -> str | None:
    """Return why a worker cannot serve `version`; None if no worker has a problem."""
    return next((problem for worker in workers if (problem := worker.problem_with(version)) is not None), None)


def _start_in_thread(call: Callable[[], Champion]) -> Future[Champion]:
    """Run a call in a thread. The process can end before the thread."""
    future: Future[Champion] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised again by future.result()
            future.set_exception(error)

    threading.Thread(target=run, name="registry", daemon=True).start()
    return future


def _end_workers(workers: list[_Worker], *, timeout_s: float) -> None:
    """End the workers. They finish open requests, and are killed after the timeout."""
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + timeout_s
    for worker in workers:
        try:
            worker.process.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
