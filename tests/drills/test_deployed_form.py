"""Runs with the parameters of the form in Prefect have the right names, tags, end states and events: `make drills`."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flows.servers.prefect_server import embedded_server
from flows.settings.config_file import load_config
from tasks.registry.mlflow_client import connect
from tests.drills.test_kill_and_resume import write_config

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

pytestmark = pytest.mark.drill
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600.0
SERVE_SCRIPT = """
import sys
from flows.scheduled.deployed import deployed_retrain

deployed_retrain.serve("drill", parameters={"pipeline": sys.argv[1]}, pause_on_shutdown=False)
"""


class Form:
    """The form of the deployment in the Prefect UI: a client sends the same requests as the UI."""

    def __init__(self, client: "SyncPrefectClient", config_path: Path) -> None:
        self.client, self.config_path = client, config_path

    def start(self, **parameters: Any) -> "FlowRun":
        """Start a run with these parameters of the form, wait for its end and return it.

        Prefect sets a run with unknown parameters to Crashed, and then calls the hook that sets it to Failed.
        """
        deployment = self.client.read_deployment_by_name("nightly-retrain/drill")
        run = self.client.create_flow_run_from_deployment(
            deployment.id, parameters={"pipeline": str(self.config_path), **parameters}
        )
        deadline = time.monotonic() + TIMEOUT_S
        while run.state is None or not run.state.is_final() or run.state.is_crashed():
            assert time.monotonic() < deadline, run.state
            time.sleep(0.5)
            run = self.client.read_flow_run(run.id)
        return run

    def events_of(self, run: "FlowRun") -> set[str]:
        """Return the names of the events of an ended flow run. Prefect stores them some seconds after the end."""
        search = {"filter": {"resource": {"id": [f"prefect.flow-run.{run.id}"]}}, "limit": 50}
        deadline = time.monotonic() + 60
        while True:
            answer = self.client.request("POST", "/events/filter", json=search).json()
            names = {event["event"] for event in answer["events"]}
            if f"prefect.flow-run.{run.state_name}" in names or time.monotonic() > deadline:
                return names
            time.sleep(1)


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Form]:
    folder = tmp_path_factory.mktemp("form")
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.setenv("PREFECT_HOME", str(folder / "prefect"))
        server, log = stack.enter_context(embedded_server()), stack.enter_context((folder / "serve.log").open("wb"))
        assert server is not None
        server.start_prefect(log_file=folder / "prefect.log")
        server.wait_until_ready()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PREFECT_RUNNER_POLL_FREQUENCY": "1", "OMP_NUM_THREADS": "1"}
        config_path = write_config(folder)
        serving_process = subprocess.Popen(
            [sys.executable, "-c", SERVE_SCRIPT, str(config_path)], cwd=folder, env=environment, stdout=log, stderr=log
        )
        try:
            from prefect.client.orchestration import get_client  # reads the address of the server when it is imported

            with get_client(sync_client=True) as client:
                deadline = time.monotonic() + TIMEOUT_S
                while not client.read_deployments():
                    assert serving_process.poll() is None and time.monotonic() < deadline, (folder / "serve.log").read_text()
                    time.sleep(0.5)
                yield Form(client, config_path)
        finally:
            serving_process.terminate()
            serving_process.wait(60)


def test_runs_that_the_form_starts_have_the_right_name_tags_state_and_events(form: Form) -> None:
    config = load_config(form.config_path)
    client = connect(config.workspace)
    name = config.registry.model_name

    first_run = form.start(reason="first run", overrides=["training.epochs=1"])
    assert first_run.state_name == "Promoted", first_run.state
    run_id = first_run.name.removeprefix(f"{config.name} ").removesuffix(": first run")
    run_config = load_config(config.workspace / "runs" / run_id / "config.yaml")
    assert run_config.training.epochs == 1
    assert {f"pipeline:{config.name}", "reason:first run"} <= set(first_run.tags)
    assert "prefect.flow-run.Promoted" in form.events_of(first_run)

    # A run reads the config file when it starts, so the next run has the new name.
    form.config_path.write_text(form.config_path.read_text() + "name: renamed\n")
    unpromoted_run = form.start(promote="never", full_retrain=True, overrides=["training.epochs=1"])
    assert (
        unpromoted_run.state_name == "NotPromoted" and unpromoted_run.state is not None and unpromoted_run.state.is_completed()
    ), unpromoted_run.state
    assert unpromoted_run.name.startswith("renamed ")
    assert "prefect.flow-run.NotPromoted" in form.events_of(unpromoted_run)
    assert {alias: str(version) for alias, version in client.get_registered_model(name).aliases.items()} == {
        "champion": "1",
        "challenger": "2",
    }

    resumed_run = form.start(resume=run_id)
    assert resumed_run.state_name == "Failed" and resumed_run.state is not None
    assert f"cannot resume {run_id}: " in str(resumed_run.state.message) and "name 'renamed'" in str(resumed_run.state.message)

    rejected_run = form.start(overrides=["data_report.min_train_events=1000000000"])
    assert rejected_run.state_name == "DataRejected" and rejected_run.state is not None and rejected_run.state.is_failed(), (
        rejected_run.state
    )
    assert "prefect.flow-run.DataRejected" in form.events_of(rejected_run)

    failed_run = form.start(overrides=["training.epoch=1"])
    assert failed_run.state_name == "Failed" and failed_run.state is not None
    assert "training.epoch: unknown key; did you mean training.epochs?" in str(failed_run.state.message)
    unstarted_run = form.start(epochs=3)
    assert unstarted_run.state_name == "Failed" and unstarted_run.state is not None
    assert str(unstarted_run.state.message).startswith("unknown parameters epochs; the parameters of nightly-retrain are ")
    assert len(client.search_model_versions(f"name = '{name}'")) == 2


def test_the_server_rejects_parameters_that_do_not_fit_the_form(form: Form) -> None:
    from prefect.exceptions import PrefectHTTPStatusError

    for parameters in ({"promote": "always"}, {"until": "trian"}, {"reason": "x" * 201}, {"dry_run": "perhaps"}):
        with pytest.raises(PrefectHTTPStatusError, match="409") as error_info:
            form.start(**parameters)
        assert next(iter(parameters)) in json.dumps(error_info.value.response.json())
