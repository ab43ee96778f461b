"""`nightjar serve` on a real registry: two processes follow the champion, survive damage, and end without a failed request."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from mlflow import MlflowClient

from recsys_core.errors import InputError, StageError
from recsys_core.http_server.config import ServeConfig
from tasks.registry import mlflow_client
from tasks.registry.mlflow_client import connect
from tasks.serve import registry_champion
from tasks.serve.server import serve
from tests.tasks.conftest import Stages
from tests.tasks.registration import context_of, register_version

pytestmark = pytest.mark.usefixtures("empty_plots")

BuildStages = Callable[..., Stages]
CONFIG = ServeConfig(port=0, workers=2, poll_interval_s=0.2)
PATIENCE_S = 60.0


class Running:
    """A server in a thread of this process; its workers are real processes."""

    def __init__(self, workspace: Path, config: ServeConfig) -> None:
        self._stop, self._ready = threading.Event(), threading.Event()
        self.url, self.error = "", None

        def run() -> None:
            try:
                serve(config, workspace, model_name="m", stop=self._stop, on_ready=self._set_ready)
            except Exception as error:
                self.error = error
            finally:
                self._ready.set()

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def _set_ready(self, url: str, version: str) -> None:
        self.url = url
        self._ready.set()

    def wait(self) -> None:
        assert self._ready.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def predict(self) -> dict[str, Any]:
        response = httpx.post(
            f"{self.url}/recommend", json={"rows": [{"user_id": "user-0"}], "params": {"k": 3}}, timeout=PATIENCE_S
        )
        assert response.status_code == 200, response.text
        prediction: dict[str, Any] = response.json()["predictions"][0]
        return prediction

    def readiness(self) -> dict[str, Any]:
        content: dict[str, Any] = httpx.get(f"{self.url}/readyz", timeout=PATIENCE_S).json()
        return content

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.readiness()
            time.sleep(0.05)


@contextmanager
def running(workspace: Path, config: ServeConfig = CONFIG) -> Iterator[Running]:
    server = Running(workspace, config)
    try:
        server.wait()
        yield server
    finally:
        server.end()


def workers() -> list[psutil.Process]:
    children = (child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE)
    return [child for child in children if "recsys_core.http_server" in child.cmdline()]


def test_the_server_follows_the_champion_and_keeps_it_without_a_registry(
    workspace: Path, stages: BuildStages, predicted_uris: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for run_id in ("one", "two"):
        register_version(stages(), context_of(workspace, run_id))
    client = connect(workspace)
    client.set_registered_model_alias("m", "champion", "1")
    with running(workspace) as server:
        assert server.predict()["version"] == "1"
        client.set_registered_model_alias("m", "champion", "2")
        server.wait_for(lambda: all(server.predict()["version"] == "2" for _ in range(10)))
        client.set_registered_model_alias("m", "champion", "1")
        server.wait_for(lambda: all(server.predict()["version"] == "1" for _ in range(10)))

        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # the registry is away
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        server.wait_for(lambda: server.readiness()["registry"]["down_since"] is not None)
        assert (server.readiness()["status"], server.predict()["version"]) == ("ready", "1")
        monkeypatch.delenv("MLFLOW_TRACKING_URI")
        server.wait_for(lambda: server.readiness()["registry"]["down_since"] is None)

        killed, *_ = workers()
        killed.kill()
        server.wait_for(lambda: len(workers()) == CONFIG.workers and killed.pid not in [worker.pid for worker in workers()])
        assert server.predict()["version"] == "1"
        assert "nightjar_requests_total" in httpx.get(f"{server.url}/metrics").text
    assert workers() == []


def damage(workspace: Path, client: MlflowClient, version: str) -> None:
    """Change bytes of the index of a version."""
    model_id = str(client.get_model_version("m", version).source).removeprefix("models:/")
    (index_file,) = (path for path in (workspace / "mlartifacts").rglob("package/index.faiss") if model_id in str(path))
    with index_file.open("r+b") as file:
        file.seek(60)
        file.write(b"damaged")


def test_a_damaged_champion_is_not_served_even_after_a_restart_and_readyz_says_why(
    workspace: Path, stages: BuildStages, predicted_uris: list[str]
) -> None:
    for run_id in ("one", "two", "three"):
        register_version(stages(), context_of(workspace, run_id))
    client = connect(workspace)
    client.set_registered_model_alias("m", "champion", "1")
    damage(workspace, client, "2")
    with running(workspace) as server:
        client.set_registered_model_alias("m", "champion", "2")
        server.wait_for(lambda: "index.faiss" in (server.readiness()["problem"] or ""))
        assert server.predict()["version"] == "1"

        old_pids = {worker.pid for worker in workers()}
        for worker in workers():
            worker.kill()
        server.wait_for(lambda: len(workers()) == CONFIG.workers and not old_pids & {worker.pid for worker in workers()})
        assert server.predict()["version"] == "1"
        assert server.readiness()["problem"].startswith("version 2 is not served: ")

        client.set_registered_model_alias("m", "champion", "3")
        server.wait_for(lambda: all(server.predict()["version"] == "3" for _ in range(10)))
        assert server.readiness()["problem"] is None


def test_a_registry_that_hangs_does_not_delay_the_end(
    workspace: Path, stages: BuildStages, predicted_uris: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register_version(stages(), context_of(workspace, "one"))
    is_asked, is_over = threading.Event(), threading.Event()
    monkeypatch.setattr(mlflow_client, "ANSWER_TIMEOUT_S", 10 * PATIENCE_S)

    def hang(*_: Any) -> None:
        is_asked.set()
        is_over.wait(10 * PATIENCE_S)

    with running(workspace, CONFIG.model_copy(update={"workers": 1})) as server:
        assert workers()[0].environ()["OMP_NUM_THREADS"] == "1"
        monkeypatch.setattr(registry_champion, "version_number_by_alias", hang)
        assert is_asked.wait(PATIENCE_S)
        server.end()  # fails if the command waits for the registry
    is_over.set()


def test_a_registry_whose_disk_is_full_does_not_end_the_server(
    workspace: Path, stages: BuildStages, predicted_uris: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register_version(stages(), context_of(workspace, "one"))

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with running(workspace, CONFIG.model_copy(update={"workers": 1})) as server:
        monkeypatch.setattr(registry_champion, "version_number_by_alias", fail)
        server.wait_for(lambda: "grow" in (server.readiness()["registry"]["problem"] or ""))
        assert server.predict()["version"] == "1"


def test_without_a_champion_or_with_a_used_port_the_start_ends_with_a_sentence(
    workspace: Path, stages: BuildStages, predicted_uris: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StageError, match="has no version with the alias champion; register one"), running(workspace):
        pass
    register_version(stages(), context_of(workspace, "one"))
    with running(workspace, CONFIG.model_copy(update={"workers": 1})) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1 port {port}"):
            serve(ServeConfig(port=port), workspace, model_name="m", stop=threading.Event())
    monkeypatch.setenv("NIGHTJAR_SERVE_TOKEN", "short")
    with pytest.raises(InputError, match="must have at least 16 ASCII characters"), running(workspace):
        pass


def test_open_requests_are_answered_before_the_end(workspace: Path, stages: BuildStages, predicted_uris: list[str]) -> None:
    register_version(stages(), context_of(workspace, "one"))
    config = CONFIG.model_copy(update={"workers": 1, "max_wait_ms": 800.0})
    statuses: list[int] = []
    with running(workspace, config) as server:
        rows = {"rows": [{"user_id": "user-0"}]}
        post = threading.Thread(
            target=lambda: statuses.append(httpx.post(f"{server.url}/recommend", json=rows, timeout=30).status_code)
        )
        post.start()
        time.sleep(0.3)
        os.kill(workers()[0].pid, signal.SIGTERM)
        post.join()
    assert statuses == [200]
