"""In each stage of a run, the worker gets SIGTERM or SIGKILL, and the run is retried in Prefect: `make drills`."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from recsys_core.manifests import STAGES
from tests.drills.process_worker import GONE_WITHIN_S, TIMEOUT_S, PrefectPage, worker_of
from tests.drills.production_servers import USER_PASSWORD, Servers, production_servers
from tests.drills.test_kill_and_resume import is_stage_in_progress, write_config_with_every_stage

pytestmark = pytest.mark.drill


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with production_servers(tmp_path_factory.mktemp("servers")) as servers:
        yield servers


def registered_model(servers: Servers, name: str) -> Any:
    """Return the registered model of MLflow; an empty dict if it does not exist."""
    url = f"{servers.mlflow}/api/2.0/mlflow/registered-models/get"
    answer = requests.get(url, params={"name": name}, auth=("nightjar", USER_PASSWORD), timeout=60)
    return answer.json().get("registered_model", {})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_signal_to_the_worker_in_any_stage_ends_the_run_as_crashed_and_a_retry_continues_it(
    servers: Servers, tmp_path: Path, number: signal.Signals, record_property: Callable[[str, object], None]
) -> None:
    name = number.name.lower()
    config_path, runs = write_config_with_every_stage(tmp_path), tmp_path / "workspace" / "runs"
    config_path.write_text(f"{config_path.read_text()}name: {name}\n".replace("model_name: nightjar", f"model_name: {name}"))
    log_file = tmp_path / "worker.log"
    page = PrefectPage(servers, pipeline=name)
    flow_run_id, end_durations_s, crash_durations_s = "", [], []

    def has_begun(stage: str) -> bool:
        return any(is_stage_in_progress(stage, run) or (run / stage).is_dir() for run in runs.glob("*"))

    for stage in STAGES:
        with worker_of(servers, log_file=log_file) as worker:
            if flow_run_id:
                page.retry(flow_run_id)
            else:
                page.wait_for_pool()
                deploy = [sys.executable, "-m", "flows.cli", "deploy", str(config_path), "--work-pool", "nightjar"]
                subprocess.run(deploy, env=dict(servers.environment), check=True, capture_output=True)
                flow_run_id = page.start_run()
            page.wait_for(flow_run_id, "Running")  # a stage that had begun before the last signal has a folder already
            deadline = time.monotonic() + TIMEOUT_S
            while not has_begun(stage):
                assert time.monotonic() < deadline, f"{stage}: {page.flow_run(flow_run_id)['state']}; {log_file.read_text()}"
                time.sleep(0.002)
            signal_time_s = time.monotonic()
            seconds, alive = worker.end(number)
        assert not alive, f"{stage}: {alive}"
        page.wait_for(flow_run_id, "Crashed", timeout_s=GONE_WITHIN_S)
        end_durations_s.append(seconds)
        crash_durations_s.append(time.monotonic() - signal_time_s)
        (run,) = runs.iterdir()
        aliases = registered_model(servers, name).get("aliases", [])
        assert aliases in ([], [{"alias": "champion", "version": "1"}]), f"{stage}: {aliases}"
    with worker_of(servers, log_file=log_file):
        page.retry(flow_run_id)
        page.wait_for(flow_run_id, "Promoted")

    model = registered_model(servers, name)
    assert model["aliases"] == [{"alias": "champion", "version": "1"}]
    assert len(model["latest_versions"]) == 1
    assert page.flow_run(flow_run_id)["run_count"] == len(STAGES) + 1
    assert json.loads((run / "run.json").read_text())["num_starts"] == len(STAGES) + 1
    record_property(
        "figures",
        f"The worker received {number.name} in each of {len(STAGES)} stages. "
        f"All processes ended within {max(end_durations_s):.1f} s, "
        f"and Prefect showed Crashed within {max(crash_durations_s):.1f} s. "
        "Every run could be resumed, and no alias was wrong",
    )
