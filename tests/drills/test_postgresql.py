"""PostgreSQL restarts during the training, and the run registers a version: `make drills`.

PostgreSQL is the database of the Prefect server and of the MLflow server.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.drills.postgresql_server import is_installed, postgresql_server
from tests.drills.production_servers import production_servers
from tests.drills.test_kill_and_resume import is_stage_in_progress, write_config

pytestmark = [pytest.mark.drill, pytest.mark.skipif(not is_installed(), reason="PostgreSQL is not installed")]
TIMEOUT_S = 600.0


def test_a_run_registers_a_version_although_postgresql_restarts_during_the_training(tmp_path: Path) -> None:
    server_folder, user_folder = tmp_path / "servers", tmp_path / "user"
    server_folder.mkdir()
    user_folder.mkdir()
    config_path = write_config(user_folder)
    with postgresql_server() as postgresql, production_servers(server_folder, postgresql_port=postgresql.port) as servers:
        command = [sys.executable, "-m", "flows.cli", "run", str(config_path), "--json"]
        with subprocess.Popen(
            command, env=dict(servers.environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            deadline = time.monotonic() + TIMEOUT_S
            while not any(
                is_stage_in_progress("train", run_folder) for run_folder in (user_folder / "workspace" / "runs").glob("*")
            ):
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < deadline, "the training did not begin"
                time.sleep(0.01)
            postgresql.restart()
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, stderr
        assert json.loads(stdout.splitlines()[-1])["model"]["version"] == "1"

        assert postgresql.query("mlflow", "SELECT count(*) FROM model_versions") == "1"
        (run_folder,) = (user_folder / "workspace" / "runs").iterdir()
        num_steps = len((run_folder / "train" / "metrics.jsonl").read_text().splitlines())
        assert postgresql.query("mlflow", "SELECT count(DISTINCT step) FROM metrics WHERE key = 'train/loss'") == str(num_steps)
        assert postgresql.query("prefect", "SELECT state_name FROM flow_run") == "Promoted"
        assert not (user_folder / "workspace" / "mlflow.db").exists()
        with pytest.raises(subprocess.CalledProcessError):
            postgresql.query("mlflow", "SELECT 1 FROM flow_run")
