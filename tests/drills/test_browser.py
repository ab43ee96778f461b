"""In a browser, the form of the Prefect UI starts a run of `nightjar up`, and the MLflow UI shows the registered version."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.drills.chromium import log_in_to_prefect, take_picture
from tests.drills.restartable_server import free_port
from tests.drills.test_kill_and_resume import write_config

pytestmark = pytest.mark.drill
ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S, RUN_TIMEOUT_S, STOP_TIMEOUT_S = 240, 600, 10
REASON = "new catalogue"
ADDRESS_PATTERN = re.compile(r"^(Prefect|MLflow) +(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Up:
    """A running `nightjar up`: its process, the addresses that it prints, and the password of both servers."""

    process: "subprocess.Popen[str]"
    prefect: str
    mlflow: str
    password: str

    @property
    def authorization(self) -> str:
        """Value of the HTTP header Authorization for both servers."""
        return "Basic " + b64encode(self.password.encode()).decode()

    def mlflow_api(self, path: str) -> Any:
        """Return the JSON answer of MLflow's API."""
        request = urllib.request.Request(f"{self.mlflow}/api/2.0/mlflow/{path}", headers={"Authorization": self.authorization})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def prefect_api(self, path: str, content: Any = None) -> Any:
        """Return the JSON answer of Prefect's API to a POST request with `content`, or to a GET request without content."""
        request = urllib.request.Request(
            f"{self.prefect}/api/{path}", None if content is None else json.dumps(content).encode()
        )
        request.add_header("Authorization", self.authorization)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)


def wait_for(condition: Callable[[], Any], *, timeout_s: float, subject: str) -> Any:
    """Return the first true value of `condition`. A network error counts as false."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if value := condition():
                return value
        except OSError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"{subject}: not after {timeout_s} s")


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    config_path, log_path = write_config(tmp_path), tmp_path / "output.log"
    ports = ("--prefect-port", str(free_port()), "--mlflow-port", str(free_port()))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    with log_path.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "up", str(config_path), *ports],
            cwd=ROOT, env=environment | {"COLUMNS": "120"}, stdout=output, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    try:
        address_by_server = wait_for(
            lambda: len(addresses := dict(ADDRESS_PATTERN.findall(log_path.read_text()))) == 2 and addresses,
            timeout_s=START_TIMEOUT_S,
            subject="the addresses of `nightjar up`",
        )
        password = (tmp_path / "workspace" / "server-password").read_text().strip()
        up = Up(process, address_by_server["Prefect"], address_by_server["MLflow"], password)
        wait_for(lambda: up.prefect_api("deployments/filter", {}), timeout_s=START_TIMEOUT_S, subject="the deployment")
        yield up
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_the_form_starts_a_run_that_registers_a_version_which_mlflow_shows(page: Any, up: Up) -> None:
    log_in_to_prefect(page, up.prefect, password=up.password)
    (deployment,) = up.prefect_api("deployments/filter", {"flows": {"name": {"any_": ["nightly-retrain"]}}})
    page.goto(f"{up.prefect}/deployments/deployment/{deployment['id']}/run")
    page.get_by_text("Reason (Optional)").wait_for()
    page.locator("textarea").nth(1).fill(REASON)
    take_picture(page, "prefect-form")
    page.get_by_role("button", name="Submit").click()

    ended_runs = wait_for(
        lambda: [run for run in up.prefect_api("flow_runs/filter", {}) if run["end_time"]],
        timeout_s=RUN_TIMEOUT_S,
        subject="the end of the run",
    )
    (run,) = ended_runs
    assert run["state_name"] == "Promoted", run["state"]
    assert run["parameters"]["reason"] == REASON and REASON in run["name"]
    page.goto(f"{up.prefect}/runs/flow-run/{run['id']}")
    page.get_by_text("Promoted").first.wait_for()
    page.get_by_text("register").first.wait_for()
    take_picture(page, "prefect-run")
    page.get_by_text("Artifacts", exact=True).click()
    take_picture(page, "prefect-artifacts")

    page.set_extra_http_headers({"Authorization": up.authorization})
    page.goto(f"{up.mlflow}/#/models/nightjar/versions/1")
    page.get_by_text("champion").first.wait_for()
    take_picture(page, "mlflow-version", width=945)  # leaves out the assistant on the right
    mlflow_run = find_mlflow_run(up)
    page.goto(f"{up.mlflow}/#/experiments/{mlflow_run['experiment_id']}/runs/{mlflow_run['run_id']}")
    take_picture(page, "mlflow-run", width=945)
    page.get_by_text("Model metrics", exact=True).click()
    page.get_by_placeholder("Search metric charts").fill("test/recall_at_20")
    page.get_by_text("recall_at_20", exact=True).first.wait_for()
    page.get_by_text("Artifacts", exact=True).click()
    page.get_by_text("loss.png").first.wait_for()

    descendants = psutil.Process(up.process.pid).children(recursive=True)
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(STOP_TIMEOUT_S) in (0, 143)
    _, alive = psutil.wait_procs(descendants, timeout=STOP_TIMEOUT_S)
    assert not alive, [process.cmdline() for process in alive]


def find_mlflow_run(up: Up) -> dict[str, str]:
    """Return experiment_id and run_id of the MLflow run of version 1."""
    run_id = up.mlflow_api("model-versions/get?name=nightjar&version=1")["model_version"]["run_id"]
    return {"run_id": run_id, "experiment_id": up.mlflow_api(f"runs/get?run_id={run_id}")["run"]["info"]["experiment_id"]}
