"""`nightjar up` starts a planned run and leaves no process when it ends: `make drills`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.settings.config_file import load_config
from tasks.runs.run_record import RunRecord
from tests.drills.restartable_server import free_port
from tests.drills.test_kill_and_resume import write_config

pytestmark = pytest.mark.drill
DATABASE_TIMEOUT_S = 30.0
SERVICE_UNAVAILABLE = 503
TIMEOUT_S = 600.0
GONE_WITHIN_S = 10.0
LEAD_TIME = timedelta(minutes=3)


class Up:
    """A running `nightjar up`, with its output, its processes and the API of its Prefect server."""

    def __init__(self, config_path: Path, *settings: str) -> None:
        self.workspace = config_path.parent / "workspace"
        self.ports = free_port(), free_port()
        options = ["--prefect-port", str(self.ports[0]), "--mlflow-port", str(self.ports[1])]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "flows.cli",
                "up",
                str(config_path),
                *options,
                *(f"--set={setting}" for setting in settings),
            ],
            env={name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.stdout = ""
        assert self.process.stdout is not None
        while not re.search(r"^stop ", self.stdout, re.MULTILINE):
            line = self.process.stdout.readline()
            assert line, f"{self.stdout}{self.process.communicate()[1]}"
            self.stdout += line

    def api(self, path: str, body: Any = None) -> Any:
        """Return the Prefect server's answer to a POST request. Repeat the request if the database was locked."""
        secret = (self.workspace / "server-password").read_text().strip()
        headers = {"Content-Type": "application/json", "Authorization": f"Basic {b64encode(secret.encode()).decode()}"}
        url = f"http://127.0.0.1:{self.ports[0]}/api{path}"
        request = urllib.request.Request(url, data=json.dumps(body or {}).encode(), headers=headers)
        deadline = time.monotonic() + DATABASE_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code != SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                    raise
                time.sleep(1)

    def start_run(self) -> str:
        """Start a manual run; return the id of the flow run."""
        (deployment,) = self.api("/deployments/filter", {"flows": {"name": {"any_": ["nightly-retrain"]}}})
        return str(self.api(f"/deployments/{deployment['id']}/create_flow_run")["id"])

    def states(self) -> list[str]:
        """Return the states of the runs that are not planned for later."""
        runs = self.api("/flow_runs/filter", {"sort": "EXPECTED_START_TIME_ASC"})
        return [run["state"]["name"] for run in runs if run["state"]["name"] != "Scheduled"]

    def wait_for(self, *states: str) -> None:
        """Wait until the newest run is in one of the states."""
        deadline = time.monotonic() + TIMEOUT_S
        while (self.states() or [""])[-1] not in states:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, f"{self.states()}: {(self.workspace / 'up.log').read_text()}"
            time.sleep(1)

    def end(self, stop_signal: signal.Signals) -> tuple[float, list[str]]:
        """Send the signal; return the seconds until the end of the command, and the command lines of the processes left."""
        processes = psutil.Process(self.process.pid).children(recursive=True)
        signal_time_s = time.monotonic()
        self.process.send_signal(stop_signal)
        self.process.wait(60)
        seconds = time.monotonic() - signal_time_s
        _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN_S if stop_signal == signal.SIGKILL else 0.5)
        return seconds, [" ".join(process.cmdline()) for process in alive]


@contextmanager
def running(config_path: Path, *settings: str) -> Iterator[Up]:
    up = Up(config_path, *settings)
    try:
        yield up
    finally:
        if up.process.poll() is None:
            up.end(signal.SIGTERM)


def schedule_override() -> str:
    """Return an override with a planned start so late that the servers have started before it, also on a busy machine."""
    return f"schedule.cron={datetime.now(UTC) + LEAD_TIME:%M %H} * * *"


def record_of_newest_run(config_path: Path) -> RunRecord:
    workspace = load_config(config_path).workspace
    newest = max((workspace / "runs").iterdir())
    return RunRecord.model_validate_json((newest / "run.json").read_text())


def test_a_planned_run_starts_by_itself_and_registers_a_version(tmp_path: Path) -> None:
    config_path = write_config(tmp_path)
    with running(config_path, schedule_override()) as up:
        assert "next start" in up.stdout
        up.wait_for("Promoted", "Failed", "Crashed")
        assert up.states() == ["Promoted"]
        with urllib.request.urlopen(f"http://127.0.0.1:{up.ports[1]}/health", timeout=30) as answer:
            assert answer.status == 200
        seconds, alive = up.end(signal.SIGINT)
    assert (seconds < GONE_WITHIN_S, alive, up.process.returncode) == (True, [], 0)
    assert record_of_newest_run(config_path).state == "Promoted"
    releases = subprocess.run(
        [sys.executable, "-m", "flows.cli", "releases", str(config_path)], capture_output=True, text=True, check=True
    )
    assert "champion" in releases.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_signal_in_the_training_leaves_no_process_and_the_next_planned_run_starts(
    tmp_path: Path, number: signal.Signals
) -> None:
    config_path = write_config(tmp_path)
    runs_folder = tmp_path / "workspace" / "runs"
    with running(config_path, "training.epochs=10000", "training.validation=null") as up:
        up.start_run()
        deadline = time.monotonic() + TIMEOUT_S
        while not any(runs_folder.glob("*/train.work/metrics.jsonl")):
            assert time.monotonic() < deadline, (up.workspace / "up.log").read_text()
            time.sleep(0.5)
        seconds, alive = up.end(number)
    assert (seconds < GONE_WITHIN_S, alive) == (True, [])
    with running(config_path, schedule_override()) as up:
        up.wait_for("Promoted", "Failed")
        assert up.states() == ["Crashed", "Promoted"]


def test_a_second_run_at_the_same_time_is_cancelled(tmp_path: Path) -> None:
    with running(write_config(tmp_path), "training.epochs=10000", "training.validation=null") as up:
        first_run_id = up.start_run()
        up.wait_for("Running")
        up.start_run()
        up.wait_for("Cancelled")
        assert up.states() == ["Running", "Cancelled"]
        children = psutil.Process(up.process.pid).children(recursive=True)
        runs = [child for child in children if "prefect.engine" in child.cmdline()]
        up.api(f"/flow_runs/{first_run_id}/set_state", {"state": {"type": "CANCELLING"}, "force": True})
        _, alive = psutil.wait_procs(runs, timeout=2 * GONE_WITHIN_S)
        assert (len(runs), alive) == (1, [])
