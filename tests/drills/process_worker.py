"""A worker with the settings of infra/compose.yaml, and the requests of the Prefect UI that start, cancel and retry runs."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from tests.drills.production_servers import PREFECT_LOGIN, SERVICES, Servers

TIMEOUT_S = 600.0
GONE_WITHIN_S = 10.0
POOL = "nightjar"


class PrefectPage:
    """The requests of the Prefect UI about the deployment of one pipeline."""

    def __init__(self, servers: Servers, *, pipeline: str = "nightly") -> None:
        self._pipeline = pipeline
        self._api = f"{servers.prefect}/api"
        self._session = requests.Session()
        self._session.auth = tuple(PREFECT_LOGIN.split(":"))
        # A busy server answers 503. A person would click again.
        self._session.mount(
            self._api, HTTPAdapter(max_retries=Retry(3, status_forcelist=[503], allowed_methods=None, backoff_factor=1))
        )

    def request(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._session.request(method, f"{self._api}{path}", json=body, timeout=60)
        answer.raise_for_status()
        return answer.json()

    def wait_for_pool(self) -> None:
        """Wait until the worker has created its work pool."""
        deadline = time.monotonic() + TIMEOUT_S
        while POOL not in [pool["name"] for pool in self.request("POST", "/work_pools/filter", {})]:
            assert time.monotonic() < deadline, "the worker does not start"
            time.sleep(0.3)

    def start_run(self, **parameters: Any) -> str:
        """Start a run with the parameters of the form; return the id of the flow run."""
        deployment = self.request("GET", f"/deployments/name/nightly-retrain/{self._pipeline}")
        body = {"parameters": {**deployment["parameters"], **parameters}}
        return str(self.request("POST", f"/deployments/{deployment['id']}/create_flow_run", body)["id"])

    def cancel(self, flow_run_id: str) -> None:
        """Send the request of the button Cancel."""
        self._set_state(flow_run_id, {"type": "CANCELLING", "name": "Cancelling"})

    def retry(self, flow_run_id: str) -> None:
        """Send the request of the button Retry."""
        self._set_state(flow_run_id, {"type": "SCHEDULED", "name": "AwaitingRetry"})

    def _set_state(self, flow_run_id: str, state: dict[str, str]) -> None:
        self.request("POST", f"/flow_runs/{flow_run_id}/set_state", {"state": state, "force": True})

    def flow_run(self, flow_run_id: str) -> Any:
        return self.request("GET", f"/flow_runs/{flow_run_id}")

    def wait_for_planned_run(self) -> str:
        """Wait until the scheduler has created the deployment's next flow run; return its id."""
        query = {"deployments": {"name": {"any_": [self._pipeline]}}, "sort": "EXPECTED_START_TIME_ASC", "limit": 1}
        deadline = time.monotonic() + TIMEOUT_S
        while not (runs := self.request("POST", "/flow_runs/filter", query)):
            assert time.monotonic() < deadline, "the schedule creates no flow run"
            time.sleep(0.3)
        assert "auto-scheduled" in runs[0]["tags"], runs[0]
        return str(runs[0]["id"])

    def wait_for(self, flow_run_id: str, *states: str, timeout_s: float = TIMEOUT_S) -> str:
        """Wait until the flow run is in one of the states; return its state. Another final state is an error."""
        deadline = time.monotonic() + timeout_s
        while (state := self.flow_run(flow_run_id)["state"])["name"] not in states:
            assert state["type"] not in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"), state
            assert time.monotonic() < deadline, state
            time.sleep(0.3)
        return str(state["name"])


class Worker:
    """A worker process, whose child processes execute the runs."""

    def __init__(self, servers: Servers, *, log_file: Path) -> None:
        program, *arguments = SERVICES["worker"]["command"]
        environment = dict(servers.environment) | {"PREFECT_WORKER_QUERY_SECONDS": "1"}
        with log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", program, *arguments], env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def children(self) -> list[psutil.Process]:
        """Return all processes of its runs."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, stop_signal: signal.Signals) -> tuple[float, list[str]]:
        """Send the signal to the worker.

        Returns:
            The seconds until no process of the runs is left, and the command lines of the processes left after 10 s.
        """
        processes = self.children()
        signal_time_s = time.monotonic()
        self.process.send_signal(stop_signal)
        _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
        seconds = time.monotonic() - signal_time_s
        self.process.wait(60)
        return seconds, [*_command_lines(alive)]


def _command_lines(processes: Iterable[psutil.Process]) -> Iterator[str]:
    """Yield the command lines of the processes that have not ended. A zombie has ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            yield " ".join(process.cmdline())


@contextmanager
def worker_of(servers: Servers, *, log_file: Path) -> Iterator[Worker]:
    """Start a worker. At the end, stop the worker and its runs."""
    worker = Worker(servers, log_file=log_file)
    try:
        yield worker
    finally:
        if worker.process.poll() is None:
            worker.end(signal.SIGTERM)
