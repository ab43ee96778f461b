"""A search without ranges on a tiny log: its space fits the data, and its first trials train real models."""

import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from flows import tuning
from flows.settings.config_file import load_config
from flows.tuning import StudyResult, tune_settings
from recsys_core.ingest.synthetic import generate
from tests.flows.tuning_config import CONFIG

NO_RANGES = CONFIG.partition("tuning:")[0] + "tuning: {trials: 2}\n"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, new_database: Path) -> StudyResult:
    folder = tmp_path_factory.mktemp("tuning")
    generate(folder / "data", num_users=300, num_items=200, num_events=4_000, num_days=10, dim=16, num_cold_items=10)
    shutil.copy(new_database, folder / "mlflow.db")
    (folder / "nightly.yaml").write_text(NO_RANGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "run_trial", tuning.run_trial.fn)  # without a Prefect server
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("OMP_NUM_THREADS", "1")
        return tune_settings.fn(load_config(folder / "nightly.yaml"))


def test_the_first_trials_have_the_settings_of_the_file_and_the_suggested_ones(study: StudyResult) -> None:
    of_file, suggested = sorted(study.trials, key=lambda trial: trial.number)
    assert of_file.settings.keys() == suggested.settings.keys()
    assert (of_file.settings["model.temperature"], suggested.settings["model.temperature"]) == (1.0, 0.2)  # a dense log
    assert (of_file.settings["model.history.pooling"], suggested.settings["model.history.pooling"]) == ("mean", "recency")
    assert [trial.ending for trial in study.trials] == ["complete", "complete"], [trial.reason for trial in study.trials]


def test_the_best_settings_and_the_ranges_of_the_study_are_written(study: StudyResult) -> None:
    best = study.best_trial
    assert best is not None and best.value == max(trial.value or 0 for trial in study.trials)
    yaml = YAML(typ="safe", pure=True)
    assert yaml.load(study.best_file)["model"]["temperature"] == best.settings["model.temperature"]
    ranges = load_config(study.folder / "config.yaml").tuning
    assert ranges is not None and ranges.ranges.keys() == best.settings.keys()
