"""A search without configured ranges, on a small log. Its trials train real models."""

import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from flows import tuning as tuning_flow
from flows.settings.config_file import load_config
from flows.tuning import StudyResult, tune_settings
from recsys_core.ingest.synthetic import generate
from recsys_core.training import train
from recsys_core.training.export import export
from tasks.registry.mlflow_client import connect
from tests.flows.tuning_config import CONFIG
from tests.recsys_core.training.forked_training import launch_in_forks

CONFIG_WITHOUT_RANGES = CONFIG.partition("tuning:")[0] + "tuning: {trials: 2}\n"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, new_database: Path) -> StudyResult:
    """A finished study of two trials."""
    folder = tmp_path_factory.mktemp("tuning")
    generate(folder / "data", num_users=300, num_items=200, num_events=4_000, num_days=10, dim=16, num_cold_items=10)
    shutil.copy(new_database, folder / "mlflow.db")
    (folder / "nightly.yaml").write_text(CONFIG_WITHOUT_RANGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "launch_job", launch_in_forks)
        patch.setattr(export, "launch_job", launch_in_forks)
        patch.setattr(tuning_flow, "run_trial", tuning_flow.run_trial.fn)  # without a Prefect server
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("OMP_NUM_THREADS", "1")
        return tune_settings.fn(load_config(folder / "nightly.yaml"))


def test_the_first_trials_have_the_configured_and_the_suggested_settings(study: StudyResult) -> None:
    configured_trial, suggested_trial = sorted(study.trials, key=lambda trial: trial.number)
    assert configured_trial.settings.keys() == suggested_trial.settings.keys()
    setting_names = ("model.temperature", "model.history.pooling")
    assert [configured_trial.settings[name] for name in setting_names] == [1.0, "mean"]
    assert [suggested_trial.settings[name] for name in setting_names] == [
        0.2,
        "recency",
    ]  # the suggested settings for a dense log
    assert [trial.ending for trial in study.trials] == ["complete", "complete"], [trial.reason for trial in study.trials]


def test_the_best_settings_and_the_ranges_of_the_study_are_written(study: StudyResult) -> None:
    best_trial = study.best_trial
    assert best_trial is not None and best_trial.value == max(trial.value or 0 for trial in study.trials)
    yaml = YAML(typ="safe", pure=True)
    assert yaml.load(study.best_file)["model"]["temperature"] == best_trial.settings["model.temperature"]
    tuning = load_config(study.folder / "config.yaml").tuning
    assert tuning is not None and tuning.ranges.keys() == best_trial.settings.keys()


def test_a_study_that_was_killed_after_its_last_trial_gets_its_reports_and_mlflow_runs_and_keeps_no_model(
    study: StudyResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    best_yaml = study.best_file.read_text()
    study.best_file.write_text(best_yaml[:20])
    study.history_file.unlink()
    client = connect(study.folder.parents[1])
    (experiment,) = client.search_experiments(filter_string="name != 'Default'")
    (last_run,) = client.search_runs([experiment.experiment_id], "attributes.run_name = 'trial-1'")
    client.delete_run(last_run.info.run_id)
    checkpoint_path = study.folder / "trial-0" / "train" / "checkpoint"
    checkpoint_path.parent.mkdir()
    checkpoint_path.touch()
    resumed_study = tune_settings.fn(load_config(study.folder.parents[1] / "nightly.yaml"))
    assert resumed_study.trials == study.trials
    assert study.best_file.read_text() == best_yaml
    assert study.history_file.exists() and not checkpoint_path.exists()
    logged_runs = client.search_runs([experiment.experiment_id], "attributes.run_name LIKE 'trial-%'", order_by=["run_name"])
    assert [(run.info.run_name, run.info.status) for run in logged_runs] == [("trial-0", "FINISHED"), ("trial-1", "FINISHED")]
