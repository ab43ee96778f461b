"""The Prefect server is down during the training, and starts again or stays down: `make drills`."""

import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from recsys_core.manifests import STAGES
from tests.drills.restartable_server import prefect_server, running
from tests.drills.started_run import StartedRun, started_run
from tests.drills.test_kill_and_resume import is_stage_in_progress, write_config_with_every_stage

pytestmark = pytest.mark.drill
REGISTERED_MODEL = {"name": "nightjar", "version": "1", "alias": "champion"}


def states_of_runs(prefect_home: Path) -> tuple[list[str], dict[str, str]]:
    """Return the states of the flow runs, and a dict from the name of each task run to its state."""
    with closing(sqlite3.connect(prefect_home / "prefect.db", timeout=60)) as database:
        flow_runs = [row[0] for row in database.execute("SELECT state_name FROM flow_run")]
        return flow_runs, dict(
            database.execute("SELECT substr(name, 1, instr(name || '-', '-') - 1), state_name FROM task_run")
        )


def wait_for_training(run: StartedRun) -> None:
    run.wait_until(lambda folder: is_stage_in_progress("train", folder), description="training")


def assert_promoted(run: StartedRun, prefect_home: Path) -> None:
    """Wait for the end of the run; assert that its version is champion and that Prefect has its final states."""
    exit_code, stderr = run.wait()
    assert exit_code == 0, stderr
    assert run.json_output["model"] == REGISTERED_MODEL
    assert states_of_runs(prefect_home) == (["Promoted"], dict.fromkeys(STAGES, "Completed"))


def test_an_embedded_server_that_is_killed_in_the_training_is_replaced(tmp_path: Path) -> None:
    with started_run(write_config_with_every_stage(tmp_path)) as run:
        wait_for_training(run)
        (server,) = [child for child in run.children() if "flows.servers.prefect_app" in child.cmdline()]
        server.send_signal(signal.SIGKILL)
        assert_promoted(run, tmp_path / "workspace" / "prefect")
        assert "the embedded Prefect server was ended by SIGKILL; another server is started" in run.stderr


def test_a_server_that_was_stopped_for_twenty_seconds_of_the_training_records_all_states_of_the_run(tmp_path: Path) -> None:
    config_path = write_config_with_every_stage(tmp_path)
    with running(prefect_server(tmp_path)) as server, started_run(config_path, PREFECT_API_URL=f"{server.address}/api") as run:
        wait_for_training(run)
        server.stop(signal.SIGTERM)
        time.sleep(20)
        server.start()
        assert_promoted(run, tmp_path / "prefect-server")


def test_a_run_whose_server_stays_away_registers_its_version_and_warns(tmp_path: Path) -> None:
    config_path, server = write_config_with_every_stage(tmp_path), prefect_server(tmp_path)
    settings = {
        "PREFECT_API_URL": f"{server.address}/api",
        "PREFECT_CLIENT_MAX_RETRIES": "2",
    }  # retries for 6 s instead of two minutes
    with running(server), started_run(config_path, **settings) as run:
        wait_for_training(run)
        server.stop(signal.SIGKILL)
        exit_code, stderr = run.wait()
    assert exit_code == 0, stderr
    assert run.json_output["model"] == REGISTERED_MODEL
    last_line = stderr.splitlines()[-1]
    assert last_line.startswith(f"warning Prefect at {server.address}/api does not work: ConnectError: ")
    assert last_line.endswith("the run ended as Promoted, but Prefect did not receive this state")
    assert "Traceback" not in stderr
