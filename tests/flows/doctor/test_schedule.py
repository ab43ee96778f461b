"""Checks of the planned runs and refreshes, with the lock of `nightjar up` and with a real Prefect server."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from flows.doctor.schedule import check_schedule
from flows.doctor.servers import check_prefect, short_prefect_client
from flows.servers.prefect_server import embedded_server
from flows.settings.pipeline import PipelineConfig
from flows.settings.schedule import ScheduleConfig
from tasks.runs.workspace import UP_LOCK_NAME

RETRAIN, REFRESH = "nightly-retrain", "refresh"


def with_schedule(config: PipelineConfig, **settings: str) -> PipelineConfig:
    return config.model_copy(update={"schedule": ScheduleConfig.model_validate(settings)})


@pytest.mark.parametrize(("flow_name", "setting"), [(RETRAIN, "cron"), (REFRESH, "refresh_cron")])
def test_a_schedule_without_a_process_that_starts_the_runs_is_a_problem(
    config: PipelineConfig, flow_name: str, setting: str
) -> None:
    assert check_schedule(config, flow_name=flow_name) == (
        "not used",
        f"schedule.{setting} is empty: {flow_name} is started by hand only",
    )
    config = with_schedule(config, **{setting: "15 2 * * *"})
    finding = check_schedule(config, flow_name=flow_name)
    assert finding.status == "problem" and f"schedule.{setting} is 15 2 * * *, but nothing starts the runs" in finding.text
    config.workspace.mkdir()
    with FileLock(config.workspace / UP_LOCK_NAME):
        finding = check_schedule(config, flow_name=flow_name)
        assert finding.status == "ok" and finding.text.startswith("`nightjar up` is running: next run at 20")
    assert check_schedule(config, flow_name=flow_name).status == "problem"


@pytest.fixture
def prefect_server(config: PipelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A real Prefect server with a password, named by PREFECT_API_URL."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    with embedded_server() as server:
        assert server is not None
        server.start_prefect(log_file=tmp_path / "prefect.log")
        server.wait_until_ready()
        yield


@pytest.mark.usefixtures("prefect_server")
def test_deployments_and_workers_are_checked_on_a_real_server(config: PipelineConfig) -> None:
    def call_server(method: str, path: str, content: dict[str, object]) -> Any:
        with short_prefect_client() as client:
            return client._client.request(method, path, json=content).json()

    def assert_problem(text: str, *, flow_name: str = RETRAIN) -> None:
        finding = check_schedule(config, flow_name=flow_name)
        assert finding.status == "problem" and text in finding.text, finding

    assert check_prefect().text.endswith("version 3.9.1, with password")
    assert_problem("the server has no deployment nightly-retrain/nightly; create it with")
    call_server("POST", "/work_pools/", {"name": "hosts", "type": "process"})
    flow = call_server("POST", "/flows/", {"name": "nightly-retrain"})
    schedule = {"schedule": {"cron": "15 2 * * *", "timezone": "Europe/Berlin"}, "active": True}
    deployment_fields = {"name": config.name, "flow_id": flow["id"], "schedules": [schedule], "work_pool_name": "hosts"}
    deployment = call_server("POST", "/deployments/", deployment_fields)
    assert_problem("has the schedule 15 2 * * * Europe/Berlin, but the config has none")
    config = with_schedule(config, cron="15 2 * * *")
    assert_problem("has the schedule 15 2 * * * Europe/Berlin, but the config has 15 2 * * * UTC")
    config = with_schedule(config, cron="15 2 * * *", timezone="Europe/Berlin")
    assert_problem("nightly-retrain/nightly; start a worker: prefect worker start --pool hosts")
    call_server("POST", "/work_pools/hosts/get_scheduled_flow_runs", {})  # a worker sends this every few seconds
    with short_prefect_client() as client:
        while client.read_deployment(deployment["id"]).status == "NOT_READY":
            time.sleep(0.05)  # the server stores the poll in the background
    call_server("POST", f"/deployments/{deployment['id']}/schedule", {"min_runs": 1})
    finding = check_schedule(config, flow_name=RETRAIN)
    assert finding.status == "ok" and "next run at " in finding.text
    call_server("POST", f"/deployments/{deployment['id']}/pause_deployment", {})
    assert_problem("is paused")

    assert check_schedule(config, flow_name=REFRESH).status == "not used"
    config = with_schedule(config, refresh_cron="0 8 * * *")
    assert_problem("the server has no deployment refresh/nightly; create it with", flow_name=REFRESH)
    refresh_flow = call_server("POST", "/flows/", {"name": "refresh"})
    call_server("POST", "/deployments/", {"name": config.name, "flow_id": refresh_flow["id"]})
    assert_problem("has the schedule none, but the config has 0 8 * * * UTC (schedule.refresh_cron and", flow_name=REFRESH)
