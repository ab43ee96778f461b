"""Runs on servers that use PostgreSQL and S3: a Prefect worker starts, cancels, retries and resumes them: `make drills`."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from flows.settings import yaml_loader
from tasks.runs.run_record import RunRecord
from tests.drills import postgresql_server as postgresql_module
from tests.drills import s3_server as s3_module
from tests.drills.chromium import log_in_to_prefect, take_picture
from tests.drills.postgresql_server import PostgresqlServer, postgresql_server
from tests.drills.process_worker import GONE_WITHIN_S, TIMEOUT_S, PrefectPage, Worker, worker_of
from tests.drills.production_servers import PREFECT_LOGIN, Servers, production_servers
from tests.drills.s3_server import S3Server, s3_server
from tests.drills.test_kill_and_resume import is_stage_in_progress, write_config

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(not postgresql_module.is_installed(), reason="PostgreSQL is not installed"),
    pytest.mark.skipif(not s3_module.is_installed(), reason="moto_server is not installed (tests/drills/s3_server.py)"),
]
NIGHTJAR = [sys.executable, "-m", "flows.cli"]
LONGER_TRAINING = ["training.epochs=12", "training.warm_start=null"]
LEAD_TIME = timedelta(seconds=90)  # the worker must have started at the planned time


def nightjar(*arguments: str, servers: Servers) -> str:
    """Run a command with the environment of the worker; return its output."""
    command = subprocess.run(
        [*NIGHTJAR, *arguments], env=dict(servers.environment), capture_output=True, text=True, timeout=600
    )
    assert command.returncode == 0, command.stderr
    return command.stdout


def wait_until(condition: Callable[[], bool], *, description: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S:g} s: {description}"
        time.sleep(0.02)


def cancel_in_training(page: PrefectPage, worker: Worker, runs: Path, *, reason: str) -> tuple[str, Path, float]:
    """Start a run and cancel it in the training.

    Returns:
        The id of the flow run, the folder of the run, and the seconds until no process of the run was left.
    """
    earlier_folders = set(runs.glob("*"))
    flow_run = page.start_run(reason=reason, overrides=LONGER_TRAINING)
    wait_until(
        lambda: any(is_stage_in_progress("train", run) for run in set(runs.glob("*")) - earlier_folders), description="training"
    )
    (run,) = set(runs.glob("*")) - earlier_folders
    processes = worker.children()
    cancel_time_s = time.monotonic()
    page.cancel(flow_run)
    _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
    seconds = time.monotonic() - cancel_time_s
    assert not alive, [process.cmdline() for process in alive]
    page.wait_for(flow_run, "Cancelled", timeout_s=30)
    return flow_run, run, seconds


def record_of(run: Path) -> RunRecord:
    return RunRecord.model_validate_json((run / "run.json").read_text())


@dataclass(frozen=True)
class Production:
    """The Prefect and MLflow servers, and the database and the object store that they use."""

    servers: Servers
    postgresql: PostgresqlServer
    s3: S3Server

    def aliases(self, model_name: str) -> dict[str, str]:
        """Return the version of each alias of a registered model."""
        sql = f"SELECT alias, version FROM registered_model_aliases WHERE name = '{model_name}'"
        return dict(line.split("|") for line in self.postgresql.query("mlflow", sql).splitlines())


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Production]:
    folder = tmp_path_factory.mktemp("servers")
    with (
        postgresql_server() as postgresql,
        s3_server(folder) as s3,
        production_servers(folder, postgresql_port=postgresql.port, s3_address=s3.address) as servers,
    ):
        yield Production(servers, postgresql, s3)


def test_a_planned_run_starts_on_the_worker_and_its_version_is_in_postgresql_and_s3(
    production: Production, tmp_path: Path
) -> None:
    servers, config_path = production.servers, write_config(tmp_path)
    with worker_of(servers, log_file=tmp_path / "worker.log"):
        page = PrefectPage(servers)
        page.wait_for_pool()
        planned_start = datetime.now(UTC) + LEAD_TIME
        output = nightjar(
            "deploy", str(config_path), "--work-pool", "nightjar", "--cron", f"{planned_start:%M %H} * * *", servers=servers
        )
        assert re.search(r"nightly-retrain/nightly +created", output), output
        flow_run = page.wait_for_planned_run()
        page.wait_for(flow_run, "Promoted")
    assert page.flow_run(flow_run)["run_count"] == 1
    assert f"{planned_start:%Y-%m-%dT%H:%M}" in page.flow_run(flow_run)["expected_start_time"]
    assert production.aliases("nightjar") == {"champion": "1"}
    assert production.postgresql.query("prefect", "SELECT count(*) FROM flow_run WHERE state_name = 'Promoted'") == "1"
    assert not (tmp_path / "workspace" / "mlflow.db").exists()
    assert any(key.endswith("/MLmodel") for key in production.s3.object_keys())
    answer = nightjar("query", str(config_path), "--user", "u1", "-k", "3", "--json", servers=servers)
    assert len(json.loads(answer)["items"]) == 3, answer


def test_a_cancelled_run_leaves_no_process_and_a_retry_or_a_resume_registers_a_version(
    production: Production, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    servers, config_path, runs = production.servers, write_config(tmp_path), tmp_path / "workspace" / "runs"
    config_path.write_text(
        f"{config_path.read_text()}name: cancelled\n".replace("model_name: nightjar", "model_name: cancelled")
    )
    with worker_of(servers, log_file=tmp_path / "worker.log") as worker:
        page = PrefectPage(servers, pipeline="cancelled")
        page.wait_for_pool()
        nightjar("deploy", str(config_path), "--work-pool", "nightjar", servers=servers)

        flow_run, run, retried_run_end_s = cancel_in_training(page, worker, runs, reason="retry")
        ingest_time_ns = (run / "ingest_interactions").stat().st_mtime_ns
        page.retry(flow_run)
        page.wait_for(flow_run, "Promoted")
        assert record_of(run).num_starts == page.flow_run(flow_run)["run_count"] == 2
        assert (run / "ingest_interactions").stat().st_mtime_ns == ingest_time_ns, "the retry repeated a complete stage"
        assert production.aliases("cancelled") == {"champion": "1"}

        _, run, resumed_run_end_s = cancel_in_training(page, worker, runs, reason="resume")
        flow_run = page.start_run(resume=run.name, reason="resume", overrides=LONGER_TRAINING)
        state = page.wait_for(flow_run, "Promoted", "NotPromoted")
        assert record_of(run).num_starts == 2
    assert len(list(runs.iterdir())) == 2
    assert production.aliases("cancelled") == (
        {"champion": "2"} if state == "Promoted" else {"champion": "1", "challenger": "2"}
    )
    seconds = max(retried_run_end_s, resumed_run_end_s)
    record_property(
        "figures",
        f"After a cancel through the API, all processes ended within {seconds:.1f} s. Every run could be resumed, and no "
        "alias was wrong",
    )


def test_a_planned_run_is_cancelled_and_retried_on_its_page(
    page: Any, production: Production, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    servers, config_path, runs = production.servers, write_config(tmp_path), tmp_path / "workspace" / "runs"
    settings = YAML(typ="safe", pure=True).load(config_path.read_text()) | {"name": "browser"}
    settings["registry"]["model_name"] = "browser"
    settings["training"]["epochs"] = 12
    config_path.write_text(yaml_loader.dump(settings))
    with worker_of(servers, log_file=tmp_path / "worker.log") as worker:
        api = PrefectPage(servers, pipeline="browser")
        api.wait_for_pool()
        planned_start = datetime.now(UTC) + LEAD_TIME
        nightjar(
            "deploy", str(config_path), "--work-pool", "nightjar", "--cron", f"{planned_start:%M %H} * * *", servers=servers
        )
        flow_run = api.wait_for_planned_run()
        log_in_to_prefect(page, servers.prefect, password=PREFECT_LOGIN)
        page.goto(f"{servers.prefect}/runs/flow-run/{flow_run}")
        wait_until(lambda: any(is_stage_in_progress("train", run) for run in runs.glob("*")), description="training")
        take_picture(page, "production-training")
        processes = worker.children()
        page.get_by_role("button", name="Cancel").click()
        cancel_time_s = time.monotonic()
        page.get_by_role("button", name="Confirm").click()
        _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
        seconds = time.monotonic() - cancel_time_s
        assert not alive, [process.cmdline() for process in alive]
        page.get_by_text("Cancelled").first.wait_for()
        take_picture(page, "production-cancelled")
        page.get_by_role("button", name="Retry").first.click()
        page.get_by_text("This will retry flow run").wait_for()
        page.get_by_role("button", name="Retry").last.click()
        api.wait_for(flow_run, "Promoted")
        page.get_by_text("Promoted").first.wait_for()
        take_picture(page, "production-promoted")
    (run,) = runs.iterdir()
    assert record_of(run).num_starts == 2
    assert production.aliases("browser") == {"champion": "1"}
    record_property(
        "figures",
        f"After a cancel in the browser, all processes ended within {seconds:.1f} s. Every run could be resumed, and no "
        "alias was wrong",
    )
