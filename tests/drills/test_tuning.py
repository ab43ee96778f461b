"""A tuning with real trainings is killed in its second trial and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from flows.cli import main as cli
from recsys_core.ingest.synthetic import generate
from tasks.registry.mlflow_client import connect
from tests.flows.tuning_config import CONFIG, RATE

pytestmark = pytest.mark.drill
ROOT = Path(cli.__file__).parents[1]


class ResumedTuning:
    """A tuning that was killed in its second trial and resumed by a second command."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config_path = folder, folder / "nightly.yaml"
        generate(folder / "data", num_users=300, num_items=200, num_events=4_000, num_days=10, dim=16, num_cold_items=10)
        self.config_path.write_text(CONFIG)
        self._kill_in_second_trial()
        process = self.start("--json")
        output, error_output = process.communicate(timeout=400)
        assert process.returncode == 0, error_output
        self.stderr = error_output
        self.result: Any = json.loads(output.splitlines()[-1])
        self.study_folder = Path(self.result["folder"])
        self.trial_by_number = {trial["number"]: trial for trial in self.result["trials"]}

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start `nightjar tune CONFIG ARGUMENTS` without the Prefect and MLflow variables of the environment."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "tune", str(self.config_path), *arguments],
            env=environment | {"OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _kill_in_second_trial(self) -> None:
        process = self.start()
        deadline = time.monotonic() + 300
        while not list(self.folder.glob("tuning/*/trial-1/train.work/job.json")):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def tuning(tmp_path_factory: pytest.TempPathFactory) -> ResumedTuning:
    return ResumedTuning(tmp_path_factory.mktemp("tuning"))


def test_a_resumed_tuning_continues_with_the_interrupted_trial(tuning: ResumedTuning) -> None:
    assert f"{tuning.study_folder}, 1 of 3 trials done" in tuning.stderr
    assert any(line.startswith("ingest_interactions") and line.endswith("(kept)") for line in tuning.stderr.splitlines())
    assert sorted(tuning.trial_by_number) == [0, 1, 2]
    assert "trial 0 " not in tuning.stderr and "trial 1 " in tuning.stderr


def test_trials_are_listed_in_the_order_complete_pruned_failed(tuning: ResumedTuning) -> None:
    endings = [(trial["settings"][RATE], trial["ending"]) for trial in tuning.result["trials"]]
    assert endings == [(10, "complete"), (1e-9, "pruned"), (1e6, "failed")]
    best, pruned, failed = tuning.result["trials"]
    assert best["value"] == max(best["epochs"].values()) > pruned["value"]
    assert list(pruned["epochs"]) == ["1"]
    assert "the loss is" in failed["reason"]


def test_the_best_settings_are_written_as_yaml_and_the_history_is_plotted(tuning: ResumedTuning) -> None:
    text = (tuning.study_folder / "best.yaml").read_text()
    assert text.startswith("# trial 0 of study")
    assert YAML(typ="safe", pure=True).load(text) == {"training": {"table_optimizer": {"learning_rate": 10}}}
    assert (tuning.study_folder / "history.png").read_bytes().startswith(b"\x89PNG")


def test_mlflow_has_a_run_of_the_study_and_a_nested_run_of_each_trial(
    tuning: ResumedTuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)  # other tests call mlflow.set_tracking_uri, which sets it
    runs = connect(tuning.folder).search_runs(["1"])  # "0" is the default experiment of MLflow
    (parent,) = (run for run in runs if run.info.run_name.startswith("tune-"))
    trial_runs = {run.info.run_name: run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id}
    states = {name: run.info.status for name, run in trial_runs.items()}
    assert states == {"trial-0": "FINISHED", "trial-1": "FAILED", "trial-2": "KILLED"}
    complete_run = trial_runs["trial-0"]
    assert {name: float(value) for name, value in complete_run.data.params.items()} == {RATE: 10}
    curve = connect(tuning.folder).get_metric_history(complete_run.info.run_id, "validation/ndcg_at_10")
    assert [str(point.step) for point in curve] == list(tuning.trial_by_number[0]["epochs"])
    assert complete_run.data.metrics["validation/best/ndcg_at_10"] == parent.data.metrics["validation/best/ndcg_at_10"]


def test_a_tuning_leaves_no_process(tuning: ResumedTuning) -> None:
    assert not [process for process in psutil.process_iter(["cmdline"]) if str(tuning.folder) in str(process.info["cmdline"])]


def test_a_complete_trial_keeps_only_metrics_and_plan_and_a_pruned_trial_keeps_its_logs(tuning: ResumedTuning) -> None:
    assert not list(tuning.study_folder.glob("**/checkpoint*"))
    names = {path.name for path in (tuning.study_folder / "trial-0").iterdir()}
    assert names == {"metrics.jsonl", "plan"}
    assert list((tuning.study_folder / "trial-2").glob("train.work/logs/**/stderr.log"))
