"""An MLflow server that is gone before, during and after the training, and comes back or does not: `make drills`."""

import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from recsys_core.manifests import MANIFEST_NAME
from tests.drills.restartable_server import ended, mlflow_server
from tests.drills.started_run import started_run
from tests.drills.test_kill_and_resume import is_in, write_config

pytestmark = pytest.mark.drill
POINTS = {
    "the model is logged": "SELECT count(*) FROM logged_models",
    "the version is registered": "SELECT count(*) FROM model_versions",
    "the smoke test has passed": "SELECT count(*) FROM model_version_tags WHERE key = 'nightjar.smoke'",
}
"""Points of the registration, in order: each query returns 0 before the point."""


def query(folder: Path, sql: str) -> Any:
    """Return the first value of a query of the server's database."""
    with closing(sqlite3.connect(f"file:{folder}/server.db?mode=ro", uri=True, timeout=60)) as database:
        return database.execute(sql).fetchone()[0]


def registered(folder: Path) -> tuple[int, int, str]:
    """Return the number of MLflow runs without a parent, the number of versions, and the champion."""
    runs = query(folder, "SELECT count(*) FROM tags WHERE key = 'nightjar.run_id'")
    champion = query(folder, "SELECT group_concat(alias || ' ' || version) FROM registered_model_aliases")
    return runs, query(folder, "SELECT count(*) FROM model_versions"), champion


def assert_each_step_is_in_mlflow_once(folder: Path, run_folder: Path) -> None:
    num_steps = len((run_folder / "train" / "metrics.jsonl").read_text().splitlines())
    logged = "SELECT count(step) || ' ' || count(DISTINCT step) FROM metrics WHERE key = 'train/loss'"
    assert query(folder, logged) == f"{num_steps} {num_steps}"


def test_a_run_without_mlflow_trains_and_fails_at_its_end_and_a_resume_registers_one_version(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    with ended(mlflow_server(tmp_path)) as server:
        with started_run(file, MLFLOW_TRACKING_URI=server.address) as run:
            run.wait_until(lambda folder: is_in("register", folder), what="register")
            begun = time.monotonic()
            exit_code, stderr = run.end()
            seconds = time.monotonic() - begun
            run_folder = run.folder
        assert exit_code == 1
        last_line = stderr.splitlines()[-1]
        assert last_line.startswith(f"MLflow at {server.address} does not work: ")
        assert last_line.endswith(f"resume the run with --resume {run_folder.name}")
        assert "Traceback" not in stderr
        assert seconds < 150, "two minutes of retries and a short end"
        kept = {path: path.read_bytes() for path in run_folder.glob(f"*/{MANIFEST_NAME}")}
        assert len(kept) == 10

        server.start()
        with started_run(file, "--resume", run_folder.name, MLFLOW_TRACKING_URI=server.address) as run:
            exit_code, stderr = run.end()
        assert exit_code == 0, stderr
        assert run.answer["model"] == {"name": "nightjar", "version": "1", "alias": "champion"}
        assert {path: path.read_bytes() for path in kept} == kept
        assert registered(tmp_path) == (1, 1, "champion 1")
        assert_each_step_is_in_mlflow_once(tmp_path, run_folder)


def test_mlflow_is_killed_in_the_training_and_at_each_point_of_the_registration_and_comes_back(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    with ended(mlflow_server(tmp_path)) as server:
        server.start()
        with started_run(file, MLFLOW_TRACKING_URI=server.address) as run:
            run.wait_until(lambda folder: is_in("train", folder), what="training")
            server.end(signal.SIGKILL)
            run.wait_until(lambda folder: is_in("export", folder), what="export, without MLflow")
            server.start()
            for point, sql in POINTS.items():
                run.wait_until(lambda _, sql=sql: query(tmp_path, sql) > 0, what=point)
                server.end(signal.SIGKILL)
                time.sleep(3)
                server.start()
            exit_code, stderr = run.end()
        assert exit_code == 0, stderr
        assert run.answer["model"] == {"name": "nightjar", "version": "1", "alias": "champion"}
        assert registered(tmp_path) == (1, 1, "champion 1")
        assert_each_step_is_in_mlflow_once(tmp_path, run.folder)
        assert not (tmp_path / "workspace" / "mlflow.db").exists()
