"""`nightjar serve` on a real registry: the processes serve the current champion, and failures do not stop the server."""

import errno
import fcntl
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from mlflow import MlflowClient

from recsys_core.errors import InputError, StageError
from recsys_core.http_server.config import ServeConfig
from recsys_core.http_server.release import WorkerState
from tasks.registry import mlflow_client
from tasks.registry.mlflow_client import connect
from tasks.serve import registry_champion
from tasks.serve import server as server_module
from tasks.serve.server import serve
from tests.tasks.conftest import AddVersions

CONFIG = ServeConfig(port=0, workers=2, poll_interval_s=0.2)
ONE_WORKER_CONFIG = CONFIG.model_copy(update={"workers": 1})
TIMEOUT_S = 60.0


class RunningServer:
    """A server that runs in a thread of this process. Its workers are real processes."""

    def __init__(self, workspace: Path, config: ServeConfig) -> None:
        self._stop, self._ready = threading.Event(), threading.Event()
        self.url, self.error = "", None

        def serve_until_stopped() -> None:
            try:
                serve(config, workspace, model_name="m", stop_event=self._stop, on_ready=self._set_ready)
            except Exception as error:
                self.error = error
            finally:
                self._ready.set()

        self._thread = threading.Thread(target=serve_until_stopped)
        self._thread.start()

    def _set_ready(self, url: str, version: str) -> None:
        self.url = url
        self._ready.set()

    def wait_until_ready(self) -> None:
        """Wait until the server answers. Raise the error if it could not start."""
        assert self._ready.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def predict(self) -> dict[str, Any]:
        """Return the prediction for one user."""
        response = httpx.post(
            f"{self.url}/recommend", json={"rows": [{"user_id": "user-0"}], "params": {"k": 3}}, timeout=TIMEOUT_S
        )
        assert response.status_code == 200, response.text
        prediction: dict[str, Any] = response.json()["predictions"][0]
        return prediction

    def readiness(self) -> dict[str, Any]:
        """Return the answer of /readyz."""
        content: dict[str, Any] = httpx.get(f"{self.url}/readyz", timeout=TIMEOUT_S).json()
        return content

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, self.readiness()
            time.sleep(0.05)


@contextmanager
def run_server(workspace: Path, config: ServeConfig = CONFIG) -> Iterator[RunningServer]:
    server = RunningServer(workspace, config)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.end()


def workers() -> list[psutil.Process]:
    """Return the running worker processes."""
    children = (child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE)
    return [child for child in children if "recsys_core.http_server" in child.cmdline()]


def is_replaced(killed_worker: psutil.Process, *, num_workers: int) -> bool:
    """Return whether `num_workers` workers run, and the killed worker is not one of them."""
    running_pids = [worker.pid for worker in workers()]
    return len(running_pids) == num_workers and killed_worker.pid not in running_pids


def test_the_server_follows_the_champion_and_keeps_it_without_a_registry(
    workspace: Path, add_versions: AddVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_versions("good", "good")
    client = connect(workspace)
    client.set_registered_model_alias("m", "champion", "1")
    with run_server(workspace) as server:
        assert server.predict()["version"] == "1"
        client.set_registered_model_alias("m", "champion", "2")
        server.wait_for(lambda: all(server.predict()["version"] == "2" for _ in range(10)))  # the answers of both workers
        client.set_registered_model_alias("m", "champion", "1")
        server.wait_for(lambda: all(server.predict()["version"] == "1" for _ in range(10)))

        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # no server is at this address
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        server.wait_for(lambda: server.readiness()["registry"]["down_since"] is not None)
        assert (server.readiness()["status"], server.predict()["version"]) == ("ready", "1")
        monkeypatch.delenv("MLFLOW_TRACKING_URI")
        server.wait_for(lambda: server.readiness()["registry"]["down_since"] is None)

        killed_worker, *_ = workers()
        killed_worker.kill()
        server.wait_for(lambda: is_replaced(killed_worker, num_workers=CONFIG.workers))
        assert server.predict()["version"] == "1"
        assert "nightjar_requests_total" in httpx.get(f"{server.url}/metrics").text
    assert workers() == []


def test_the_temporary_folder_is_locked_so_that_systemd_tmpfiles_keeps_its_old_files(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock_folder(champion: registry_champion.RegistryChampion) -> None:
        descriptor = os.open(champion._folder.parent, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as systemd-tmpfiles does before it removes old files
        finally:
            os.close(descriptor)

    monkeypatch.setattr(registry_champion.RegistryChampion, "poll", lock_folder)
    with pytest.raises(BlockingIOError):
        serve(CONFIG, workspace, model_name="m", stop_event=threading.Event())


def damage_index(workspace: Path, client: MlflowClient, version: str) -> None:
    """Change bytes of the index of a version."""
    model_id = str(client.get_model_version("m", version).source).removeprefix("models:/")
    (index_file,) = (path for path in (workspace / "mlartifacts").rglob("package/index.faiss") if model_id in str(path))
    with index_file.open("r+b") as file:
        file.seek(60)
        file.write(b"damaged")


def test_a_damaged_champion_is_not_served_even_after_a_restart(workspace: Path, add_versions: AddVersions) -> None:
    add_versions("good", "good", "good")
    client = connect(workspace)
    client.set_registered_model_alias("m", "champion", "1")
    damage_index(workspace, client, "2")
    with run_server(workspace, ONE_WORKER_CONFIG) as server:
        client.set_registered_model_alias("m", "champion", "2")
        server.wait_for(lambda: "index.faiss" in (server.readiness()["problem"] or ""))
        assert server.predict()["version"] == "1"

        (killed_worker,) = workers()
        killed_worker.kill()
        server.wait_for(lambda: is_replaced(killed_worker, num_workers=1))
        assert server.predict()["version"] == "1"
        assert server.readiness()["problem"].startswith("version 2 is not served: ")

        client.set_registered_model_alias("m", "champion", "3")
        server.wait_for(lambda: server.predict()["version"] == "3")
        assert server.readiness()["problem"] is None


def test_the_server_survives_a_full_disk_of_the_registry_and_ends_while_the_registry_hangs(
    workspace: Path, add_versions: AddVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_versions("good")
    is_called, may_return = threading.Event(), threading.Event()
    monkeypatch.setattr(mlflow_client, "ANSWER_TIMEOUT_S", 10 * TIMEOUT_S)

    def fail_with_full_disk(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def hang(*_: Any) -> None:
        is_called.set()
        may_return.wait(10 * TIMEOUT_S)

    with run_server(workspace, ONE_WORKER_CONFIG) as server:
        assert workers()[0].environ()["OMP_NUM_THREADS"] == "1"
        monkeypatch.setattr(registry_champion, "version_number_by_alias", fail_with_full_disk)
        server.wait_for(lambda: "grow" in (server.readiness()["registry"]["problem"] or ""))
        assert server.predict()["version"] == "1"

        monkeypatch.setattr(registry_champion, "version_number_by_alias", hang)
        assert is_called.wait(TIMEOUT_S)
        server.end()  # fails if the command waits for the registry
    may_return.set()


def test_the_start_fails_without_a_champion_on_a_used_port_or_with_a_short_token(
    workspace: Path, add_versions: AddVersions, new_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_workspace = workspace / "empty"
    empty_workspace.mkdir()
    shutil.copy(new_database, empty_workspace)
    with pytest.raises(InputError, match="has no version with the alias champion; register one"), run_server(empty_workspace):
        pass
    add_versions("good")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1 port {port}"):
            serve(ServeConfig(port=port), workspace, model_name="m", stop_event=threading.Event())
    monkeypatch.setenv("NIGHTJAR_SERVE_TOKEN", "short")
    with pytest.raises(InputError, match="must have at least 16 ASCII characters"), run_server(workspace):
        pass


def test_open_requests_are_answered_before_a_worker_ends(workspace: Path, add_versions: AddVersions) -> None:
    add_versions("good")
    config = ONE_WORKER_CONFIG.model_copy(update={"max_wait_ms": 800.0})
    statuses: list[int] = []
    with run_server(workspace, config) as server:
        request_json = {"rows": [{"user_id": "user-0"}]}
        post_thread = threading.Thread(
            target=lambda: statuses.append(httpx.post(f"{server.url}/recommend", json=request_json, timeout=30).status_code)
        )
        post_thread.start()
        time.sleep(0.3)  # the worker waits up to 0.8 s for more requests before it answers
        os.kill(workers()[0].pid, signal.SIGTERM)
        post_thread.join()
    assert statuses == [200]


@pytest.mark.parametrize("worker_state", [None, WorkerState(pid=1, version="1")], ids=["loading", "ready"])
def test_the_start_fails_if_a_worker_is_killed_before_all_workers_are_ready(
    worker_state: WorkerState | None,
) -> None:
    killed_worker: Any = SimpleNamespace(state=worker_state, process=SimpleNamespace(poll=lambda: -signal.SIGKILL))
    loading_worker: Any = SimpleNamespace(state=None, process=SimpleNamespace(poll=lambda: None))
    with pytest.raises(StageError, match="the champion cannot be served: a worker ended with status -9 before all workers"):
        server_module._wait_until_ready([loading_worker, killed_worker], stop_event=threading.Event())
