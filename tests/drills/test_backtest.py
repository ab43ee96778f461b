"""`nightjar backtest` over two days and `nightjar gate-noise` with two seeds, on generated data."""

import json
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from flows.repeated_runs import BACKTEST_NAME, BacktestRun, GateNoise
from flows.settings.config_file import load_config
from recsys_core.manifests import InteractionsManifest, require_manifest
from tests.drills.test_kill_and_resume import NIGHTJAR, write_config

pytestmark = pytest.mark.drill


def test_the_run_of_a_day_reads_the_log_up_to_this_day_and_a_second_backtest_repeats_no_stage(tmp_path: Path) -> None:
    config_path = write_config(tmp_path)
    command = [*NIGHTJAR, "backtest", str(config_path), "--days", "2"]
    workspace = load_config(config_path).workspace
    processes = [subprocess.run(command, capture_output=True, text=True, timeout=300) for _ in range(2)]
    assert [process.returncode for process in processes] == [0, 0], processes[0].stderr
    assert processes[0].stdout == processes[1].stdout and "champion before" in processes[0].stdout
    assert "(kept)" not in processes[0].stderr and processes[1].stderr.count("(kept)") >= 14

    (backtest_folder,) = (workspace / BACKTEST_NAME).glob(f"{BACKTEST_NAME}-*")
    runs = [BacktestRun.model_validate(run) for run in json.loads((backtest_folder / "backtest.json").read_text())]
    assert runs[1].until - runs[0].until == timedelta(days=1)
    manifests = [
        require_manifest(backtest_folder / "runs" / run.run_id / "ingest_interactions", InteractionsManifest) for run in runs
    ]
    assert all(manifest.last_time <= run.until.isoformat() for manifest, run in zip(manifests, runs, strict=True))
    # The first run leaves out the last day of the log, the second run reads the whole log.
    assert (
        manifests[0].num_removed_events_by_filter["outside_window"] > 0
        and "outside_window" not in manifests[1].num_removed_events_by_filter
    )
    assert "baseline/popularity/recall@20" in runs[0].metrics and "champion/recall@20" in runs[1].metrics
    assert (backtest_folder / "backtest.png").stat().st_size > 10_000
    assert not (workspace / "mlflow.db").exists()  # the backtest registers its versions in its own workspace


def test_gate_noise_measures_the_spread_between_trainings_with_consecutive_seeds(tmp_path: Path) -> None:
    config_path = write_config(tmp_path)
    command = [*NIGHTJAR, "gate-noise", str(config_path), "--seeds", "2"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    (noise_path,) = (load_config(config_path).workspace / "gate-noise").glob("gate-noise-*/gate-noise.json")
    noise = GateNoise.model_validate_json(noise_path.read_text())
    first_seed = load_config(config_path).training.seed
    assert [*noise.value_by_seed] == [first_seed, first_seed + 1]
    assert len(set(noise.value_by_seed.values())) == 2 and "standard deviation between seeds" in process.stdout
