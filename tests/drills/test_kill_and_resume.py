"""A run is killed in each of its stages and resumed each time: `make drills`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from flows.settings import yaml_loader
from flows.settings.config_file import dump_config, load_config
from recsys_core.ingest.synthetic import generate
from recsys_core.manifests import MARKER_NAME, STAGES

pytestmark = pytest.mark.drill
NIGHTJAR = [sys.executable, "-m", "flows.cli"]
RUN_ID = "20260101-000000-d41d"
TIMEOUT_S = 120.0
ITEM_VECTOR_SETTINGS = {"paths": "data/item_embeddings.parquet", "vector_column": "embedding"}
USER_VECTOR_SETTINGS = {
    "table": "user",
    "paths": "data/user_embeddings.parquet",
    "id_column": "user_id",
    "vector_column": "embedding",
}


def write_config(folder: Path, *, embeddings: Sequence[dict[str, Any]] = (ITEM_VECTOR_SETTINGS,)) -> Path:
    """Write generated data and a config that trains on them in seconds; return the path of the config."""
    generate(folder / "data", num_users=300, num_items=200, num_events=6_000, num_days=10, dim=16, num_cold_items=10)
    config = {
        "interactions": {"paths": "data/interactions/*.parquet", "timestamp_column": "timestamp", "split": {"kind": "time"}},
        "embeddings": list(embeddings),
        "features": {
            "items": {
                "paths": "data/item_embeddings.parquet",
                "id_column": "item_id",
                "features": [{"name": "half", "column": "item_id", "kind": "numeric", "buckets": 2}],
            }
        },
        "model": {"embedding_dim": 16, "learn_user_embedding": True},
        "training": {"epochs": 3, "batch_size": 64, "log_every_steps": 5, "checkpoint_every_steps": 10, "warm_start": None},
        "index": {"nlist": 8},
        # There are too few test users for the default gate.
        "registry": {"model_name": "nightjar", "gate": {"kind": "margin"}, "baselines": []},
    }
    config_path = folder / "nightly.yaml"
    config_path.write_text(yaml_loader.dump(config))
    return config_path


def write_config_with_every_stage(folder: Path) -> Path:
    """Write data and the config of a run that has every stage: user vectors come from a file, item vectors from the log."""
    config_path = write_config(folder, embeddings=[USER_VECTOR_SETTINGS, {"source": "log", "dim": 16}])
    user_ids = pc.unique(pq.read_table(folder / "data" / "interactions", columns=["user_id"])["user_id"])
    vector_UD = np.random.default_rng(0).normal(size=(len(user_ids), 16)).astype(np.float32)
    pq.write_table(pa.table({"user_id": user_ids, "embedding": list(vector_UD)}), folder / "data" / "user_embeddings.parquet")
    return config_path


def run_pipeline(config_path: Path) -> dict:
    """Run the pipeline to its end; return the JSON object that it prints."""
    process = subprocess.run([*NIGHTJAR, "run", str(config_path), "--json"], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def is_stage_in_progress(stage: str, run_folder: Path) -> bool:
    """Return whether `stage` is in progress, or for the training, whether it has a checkpoint that a resumed run can load."""
    if stage == "train":
        return any((run_folder / "train.work" / "checkpoints").glob("step-*[0-9]"))
    return (run_folder / f"{stage}.tmp").is_dir()


def kill_in(stage: str, config_path: Path, run_folder: Path) -> list[psutil.Process]:
    """Start or resume the run and kill it with SIGKILL in `stage`; return the processes that it had started."""
    command = [*NIGHTJAR, "run", str(config_path), "--resume", RUN_ID]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_stage_in_progress(stage, run_folder):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline, f"{stage} did not begin"
            time.sleep(0.001)
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
    return children


def create_run_folder(config_path: Path, *, workspace: Path | None = None) -> Path:
    """Create the run folder that --resume needs, as `nightjar run` leaves it if it stops before the first stage."""
    config = load_config(config_path, () if workspace is None else (f"workspace={workspace}",))
    run_folder = config.workspace / "runs" / RUN_ID
    run_folder.mkdir(parents=True)
    (run_folder / MARKER_NAME).touch()
    dump_config(config, run_folder / "config.yaml")
    return run_folder


def test_a_run_killed_in_every_stage_has_the_metrics_of_an_undisturbed_run(tmp_path):
    undisturbed_output = run_pipeline(write_config_with_every_stage(tmp_path / "undisturbed"))
    config_path = write_config_with_every_stage(tmp_path / "killed")
    run_folder = create_run_folder(config_path)
    for stage in STAGES:
        children = kill_in(stage, config_path, run_folder)
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, f"{stage}: left running: {[process.cmdline() for process in alive]}"
        assert not (run_folder / stage).exists(), f"{stage} looks complete although it was killed"
    resumed_run = subprocess.run(
        [*NIGHTJAR, "run", str(config_path), "--resume", RUN_ID, "--json"], capture_output=True, text=True
    )
    assert resumed_run.returncode == 0, resumed_run.stderr
    output = json.loads(resumed_run.stdout.splitlines()[-1])
    assert output["metrics"] == undisturbed_output["metrics"]
    assert output["model"] == {"name": "nightjar", "version": "1", "alias": "champion"}
