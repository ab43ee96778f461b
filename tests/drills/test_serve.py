"""`nightjar serve` answers 8 clients for a minute, during three promotions and a rollback: `make drills`."""

import http.client
import json
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flows.settings.config_file import load_config
from tasks.registry.loading import load_version
from tests.drills.test_kill_and_resume import NIGHTJAR, write_config

pytestmark = pytest.mark.drill
DRILL_S = 60.0
TIMEOUT_S = 120.0
NUM_CLIENTS, NUM_ROWS, K = 8, 3, 10
MODEL_NAME = "nightjar"


class Client(threading.Thread):
    """A client that sends requests over one connection, one after the other.

    Attributes:
        problems: what was wrong with each response, or the error that the client got.
        num_responses_by_version: number of correct responses of each version.
    """

    def __init__(self, port: int, user_ids: list[Any], expected_by_version: dict[str, dict[Any, list[Any]]]) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        self._user_ids, self._expected_by_version = user_ids, expected_by_version
        self.stop_event = threading.Event()
        self.problems: list[str] = []
        self.num_responses_by_version: Counter[str] = Counter()

    def run(self) -> None:
        first_row = 0
        while not self.stop_event.is_set():
            user_ids = [self._user_ids[(first_row + row) % len(self._user_ids)] for row in range(NUM_ROWS)]
            first_row += 1
            try:
                self._request(user_ids)
            except (OSError, http.client.HTTPException) as error:
                self.problems.append(f"{type(error).__name__}: {error}")
                self._connection.close()

    def _request(self, user_ids: list[Any]) -> None:
        body = json.dumps({"rows": [{"user_id": user_id} for user_id in user_ids], "params": {"k": K}})
        self._connection.request("POST", "/recommend", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        content = response.read()
        if response.status != http.client.OK:
            self.problems.append(f"status {response.status}: {content.decode()}")
            return
        predictions = json.loads(content)["predictions"]
        versions = {prediction["version"] for prediction in predictions}
        if len(versions) != 1:
            self.problems.append(f"versions {sorted(versions)} in one response")
            return
        (version,) = versions
        expected_ids = [self._expected_by_version[version][user_id] for user_id in user_ids]
        if [prediction["item_ids"] for prediction in predictions] != expected_ids:
            self.problems.append(f"other items than version {version}")
        self.num_responses_by_version[version] += 1


@contextmanager
def running_server(config_path: Path, log_path: Path) -> Iterator[int]:
    """Run `nightjar serve` with two processes; yield its port."""
    options = ["--port", "0", "--workers", "2", "--set", "serve.poll_interval_s=0.5"]
    with log_path.open("w") as log:
        process = subprocess.Popen([*NIGHTJAR, "serve", str(config_path), *options], stdout=log, stderr=log)
    try:
        wait_for(lambda: process.poll() is not None or "/readyz" in log_path.read_text())
        address = re.search(r"http://127\.0\.0\.1:(\d+)/readyz", log_path.read_text())
        assert address is not None, log_path.read_text()
        yield int(address[1])
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0, log_path.read_text()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def served_version(port: int) -> str:
    """Return the version that one of the processes serves."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("GET", "/readyz")
    version = str(json.loads(connection.getresponse().read())["version"])
    connection.close()
    return version


def expected_items(workspace: Path, user_ids: list[Any], version: str) -> dict[Any, list[Any]]:
    """Return the item ids that a version, loaded into this process, recommends to each user."""
    retriever = load_version(workspace, model_name=MODEL_NAME, version=version).retriever
    return {user_id: answer.item_ids for user_id, answer in zip(user_ids, retriever.recommend(user_ids, K), strict=True)}


def test_no_request_fails_during_promotions_and_each_response_has_the_items_of_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config_path = write_config(tmp_path)
    for seed in (1, 2):
        subprocess.run([*NIGHTJAR, "run", str(config_path), "--set", f"training.seed={seed}"], check=True)
    workspace = load_config(config_path, ()).workspace
    users_path = next((workspace / "runs").glob("*/ingest_interactions/users.parquet"))
    user_ids = pq.read_table(users_path, columns=["id"])["id"].to_pylist()[:50]
    expected_by_version = {version: expected_items(workspace, user_ids, version) for version in ("1", "2")}
    assert expected_by_version["1"] != expected_by_version["2"]

    with running_server(config_path, tmp_path / "serve.log") as port:
        clients = [Client(port, user_ids, expected_by_version) for _ in range(NUM_CLIENTS)]
        end_s = time.monotonic() + DRILL_S
        for client in clients:
            client.start()
        first_version = served_version(port)
        second_version = "2" if first_version == "1" else "1"
        changes = [
            *(("promote", "--version", version) for version in (second_version, first_version, second_version)),
            ("rollback",),
        ]
        for change, expected_version in zip(
            changes, (second_version, first_version, second_version, first_version), strict=True
        ):
            subprocess.run([*NIGHTJAR, change[0], str(config_path), *change[1:], "--reason", "drill"], check=True)
            wait_for(lambda version=expected_version: all(served_version(port) == version for _ in range(10)))
        time.sleep(max(0.0, end_s - time.monotonic()))
        for client in clients:
            client.stop_event.set()
        for client in clients:
            client.join(TIMEOUT_S)
    num_responses_by_version = sum((client.num_responses_by_version for client in clients), Counter[str]())
    record_property("figures", f"{num_responses_by_version.total():,} requests, {len(changes)} changes of the champion")
    assert [problem for client in clients for problem in client.problems] == []
    assert num_responses_by_version.keys() == {"1", "2"}
