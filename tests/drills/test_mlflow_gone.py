"""MLflow is down during a run, or its database is locked: `make drills`."""

import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from recsys_core.manifests import MANIFEST_NAME, STAGES
from tests.drills.restartable_server import mlflow_server, running
from tests.drills.started_run import StartedRun, started_run
from tests.drills.test_kill_and_resume import is_stage_in_progress, write_config_with_every_stage

pytestmark = pytest.mark.drill
COUNT_SQL_BY_POINT = {
    "the model is logged": "SELECT count(*) FROM logged_models",
    "the version is registered": "SELECT count(*) FROM model_versions",
    "the smoke test has passed": "SELECT count(*) FROM model_version_tags WHERE key = 'nightjar.smoke'",
}
"""Points of the registration, in order, and queries that return 0 before the point and more after it."""
LOCK_DURATION_S = 40.0


def first_value(database_file: Path, sql: str) -> Any:
    """Return the first value that a query of MLflow's database returns."""
    with closing(sqlite3.connect(f"file:{database_file}?mode=ro", uri=True, timeout=60)) as database:
        return database.execute(sql).fetchone()[0]


def assert_registered_once(run: StartedRun, database_file: Path) -> None:
    """Assert that MLflow has one run with each training step once, and one version, which is champion."""
    assert run.json_output["model"] == {"name": "nightjar", "version": "1", "alias": "champion"}
    assert first_value(database_file, "SELECT count(*) FROM tags WHERE key = 'nightjar.run_id'") == 1
    assert first_value(database_file, "SELECT count(*) FROM model_versions") == 1
    assert first_value(database_file, "SELECT count(*) FROM logged_models WHERE lifecycle_stage = 'active'") == 1
    assert (
        first_value(database_file, "SELECT group_concat(alias || ' ' || version) FROM registered_model_aliases") == "champion 1"
    )
    num_steps = len((run.folder / "train" / "metrics.jsonl").read_text().splitlines())
    step_counts_sql = "SELECT count(step) || ' ' || count(DISTINCT step) FROM metrics WHERE key = 'train/loss'"
    assert first_value(database_file, step_counts_sql) == f"{num_steps} {num_steps}"


def lock(database_file: Path, *, seconds: float) -> None:
    """Hold an exclusive transaction of the database for `seconds`."""
    with closing(sqlite3.connect(database_file, timeout=60, isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        time.sleep(seconds)
        database.execute("ROLLBACK")


def test_a_run_without_mlflow_fails_only_at_its_last_stage_and_a_resume_registers_one_version(tmp_path: Path) -> None:
    config_path, server = write_config_with_every_stage(tmp_path), mlflow_server(tmp_path)
    with started_run(config_path, MLFLOW_TRACKING_URI=server.address) as run:
        run.wait_until(lambda folder: (folder / "package").is_dir(), description="package")
        start_s = time.monotonic()
        exit_code, stderr = run.wait()
        seconds = time.monotonic() - start_s
    assert exit_code == 1
    last_line = stderr.splitlines()[-1]
    assert last_line.startswith(f"error: MLflow at {server.address} does not work: ")
    assert last_line.endswith(f"resume the run with --resume {run.folder.name}")
    assert "Traceback" not in stderr
    assert seconds < 240, "two minutes of retries, and one short wait at the end"
    manifests = {path: path.read_bytes() for path in run.folder.glob(f"*/{MANIFEST_NAME}")}
    assert len(manifests) == len(STAGES) - 1

    with running(server), started_run(config_path, "--resume", run.folder.name, MLFLOW_TRACKING_URI=server.address) as resumed:
        exit_code, stderr = resumed.wait()
    assert exit_code == 0, stderr
    assert {path: path.read_bytes() for path in manifests} == manifests
    assert_registered_once(resumed, tmp_path / "server.db")


def test_a_run_registers_once_although_mlflow_is_killed_and_restarted_in_the_training_and_in_the_registration(
    tmp_path: Path,
) -> None:
    config_path = write_config_with_every_stage(tmp_path)
    with running(mlflow_server(tmp_path)) as server, started_run(config_path, MLFLOW_TRACKING_URI=server.address) as run:
        run.wait_until(lambda folder: is_stage_in_progress("train", folder), description="training")
        server.stop(signal.SIGKILL)
        run.wait_until(lambda folder: is_stage_in_progress("export", folder), description="export, without MLflow")
        server.start()
        for point, sql in COUNT_SQL_BY_POINT.items():
            run.wait_until(lambda _, sql=sql: first_value(tmp_path / "server.db", sql) > 0, description=point)
            server.stop(signal.SIGKILL)
            time.sleep(3)
            server.start()
        exit_code, stderr = run.wait()
    assert exit_code == 0, stderr
    assert_registered_once(run, tmp_path / "server.db")
    assert not (tmp_path / "workspace" / "mlflow.db").exists()


def test_a_run_registers_once_although_the_database_is_locked_in_the_training_and_in_the_registration(tmp_path: Path) -> None:
    database_file = tmp_path / "workspace" / "mlflow.db"
    with started_run(write_config_with_every_stage(tmp_path)) as run:
        for stage in ("train", "register"):
            run.wait_until(lambda folder, stage=stage: is_stage_in_progress(stage, folder), description=stage)
            lock(database_file, seconds=LOCK_DURATION_S)
        exit_code, stderr = run.wait()
    assert exit_code == 0, stderr
    assert_registered_once(run, database_file)
