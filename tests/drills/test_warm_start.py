"""A second run starts from the model of the first run, unless a training from scratch is due."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows import nightly
from recsys_core.ingest.synthetic import generate
from recsys_core.manifests import TrainManifest, require_manifest

CONFIG = """
workspace: .
interactions: {paths: data/interactions/*.parquet, timestamp_column: timestamp, split: {kind: time, test_days: 2}}
embeddings: {paths: data/item_embeddings.parquet, vector_column: embedding}
model: {embedding_dim: 16, learn_user_embedding: true}
training: {epochs: 1, batch_size: 64, warm_start: {full_retrain_every: 3}}
index: {nlist: 8}
registry: {smoke_test_users: 50, gate: {kind: margin, max_relative_drop: 0.9}, baselines: []}
"""


def run_pipeline(folder: Path, *arguments: str) -> tuple[TrainManifest, str]:
    """Run the pipeline; return the manifest of its train stage and its stderr."""
    server_prefixes = ("PREFECT_", "MLFLOW_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(server_prefixes)}
    process = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", str(folder / "nightly.yaml"), "--json", *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"}, cwd=Path(nightly.__file__).parents[1], capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    run_folder = Path(json.loads(process.stdout.splitlines()[-1])["run_dir"])
    return require_manifest(run_folder / "train", TrainManifest), process.stderr


@pytest.mark.drill
def test_the_second_run_starts_from_the_first_model_unless_a_training_from_scratch_is_due(tmp_path: Path) -> None:
    generate(tmp_path / "data", num_users=200, num_items=120, num_events=4_000, num_days=10, dim=16, num_cold_items=10)
    (tmp_path / "nightly.yaml").write_text(CONFIG)
    first_manifest, stderr = run_pipeline(tmp_path)
    assert (first_manifest.warm_from, first_manifest.num_warm_starts) == (None, 0)
    assert "training from scratch: nightjar had no champion" in stderr

    second_manifest, stderr = run_pipeline(tmp_path, "--until", "train")
    assert (second_manifest.warm_from, second_manifest.num_warm_starts) == (first_manifest.folder.parent.name, 1)
    assert f"warm start from run {second_manifest.warm_from}: table item: 120 of 120 rows from the champion, 0 new" in stderr

    run_id = second_manifest.folder.parent.name
    manifest_from_scratch, stderr = run_pipeline(
        tmp_path, "--until", "train", "--resume", run_id, "--set", "training.warm_start.full_retrain_every=1"
    )
    assert (manifest_from_scratch.warm_from, manifest_from_scratch.num_warm_starts) == (None, 0)
    first_run_id = first_manifest.folder.parent.name
    assert f"training from scratch: the champion (run {first_run_id}) is the result of 0 warm starts in a row" in stderr
    assert "(training.warm_start.full_retrain_every is 1)" in stderr
