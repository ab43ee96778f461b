"""Trials of a tuning study: interruptions, order, pruning, logging and files."""

import shutil
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from mlflow import MlflowClient
from optuna.trial import TrialState

from recsys_core.errors import StageError
from recsys_core.manifests import TrainManifest
from recsys_core.training.job import Progress
from tasks.registry.mlflow_client import connect
from tasks.runs.context import StageContext
from tasks.runs.run import Run
from tasks.tuning.config import RangeConfig, TuningConfig
from tasks.tuning.study import (
    BudgetSpent,
    fail_trial,
    finished_trials,
    log_missing_trials,
    log_trial,
    open_study,
    plot_history,
    run_trial,
    start_trial,
)

CONFIG = TuningConfig(
    seed=1,
    ranges={
        "layers": RangeConfig(choices=([64], [64, 32], None)),
        "rate": RangeConfig(low=0.001, high=1.0, log=True),
        "length": RangeConfig(low=4, high=20, step=4),
    },
)


def test_interruptions_do_not_change_the_settings_that_a_study_tries(tmp_path: Path) -> None:
    def settings_of_trials(study_folder: Path, *, is_interrupted: bool) -> list[dict[str, Any]]:
        study = open_study(study_folder)
        for number in range(12):  # the settings of trials 10 and 11 depend on earlier results
            if is_interrupted:
                start_trial(study, CONFIG)  # and is interrupted
                study = open_study(study_folder)
            trial = start_trial(study, CONFIG)
            assert trial.number == number
            study.tell(trial, 1 / (1 + number))
        return [trial.settings for trial in finished_trials(study)]

    expected_settings = settings_of_trials(tmp_path / "one", is_interrupted=False)
    assert settings_of_trials(tmp_path / "two", is_interrupted=True) == expected_settings
    assert all(settings["layers"] in ([64], [64, 32], None) for settings in expected_settings)
    assert {settings["length"] for settings in expected_settings} <= {4, 8, 12, 16, 20}
    assert len({settings["rate"] for settings in expected_settings}) == 12


def test_the_first_trials_have_the_given_settings_and_later_trials_have_sampled_settings(tmp_path: Path) -> None:
    first_settings = [{"layers": None, "rate": 0.05, "length": 12}, {"layers": [64, 32], "rate": 0.1, "length": 20}]
    study = open_study(tmp_path / "study")
    for number in range(4):
        start_trial(study, CONFIG, first_settings=first_settings)  # and is interrupted
        trial = start_trial(study, CONFIG, first_settings=first_settings)
        study.tell(trial, number / 10)
    trials = sorted(finished_trials(study), key=lambda trial: trial.number)
    assert [trial.settings for trial in trials[:2]] == first_settings
    assert [trial.settings in first_settings for trial in trials] == [True, True, False, False]


def test_a_trial_that_the_deadline_interrupts_is_continued_by_a_later_call(tmp_path: Path) -> None:
    study = open_study(tmp_path / "study")
    trained_epochs: list[int] = []

    def train(on_progress: Callable[[Progress], None]) -> Any:
        other_fields: dict[str, Any] = {"loss": 1.0, "learning_rate": 0.1, "samples_per_s": 1.0}
        for epoch in (1, 2, 3):
            trained_epochs.append(epoch)
            on_progress(Progress(step=epoch, total_steps=3, epoch=epoch, validation={"ndcg@10": 0.1}, **other_fields))
        return Mock(validation={"ndcg@10": 0.1})

    def run_next_trial(*, deadline_s: float) -> int:
        """Run a trial until the deadline (time.monotonic) and return its number."""
        trial, trial_folder = start_trial(study, CONFIG), tmp_path / "trial"
        (trial_folder / "train.work").mkdir(parents=True, exist_ok=True)
        (trial_folder / "train.work" / "weights").touch()
        run_trial.fn(
            study, trial, train, metric="ndcg@10", startup_trials=3, deadline_s=deadline_s, folder=trial_folder, label="1"
        )
        return trial.number

    # The first trial ignores the deadline, so that the study has a result.
    assert run_next_trial(deadline_s=0) == 0 and trained_epochs == [1, 2, 3]
    trained_epochs.clear()
    with pytest.raises(BudgetSpent):
        run_next_trial(deadline_s=0)
    assert trained_epochs == [1] and (tmp_path / "trial" / "train.work" / "weights").exists()
    assert [trial.number for trial in finished_trials(study)] == [0]
    assert run_next_trial(deadline_s=inf) == 1
    assert [trial.ending for trial in finished_trials(study)] == ["complete", "complete"]


@pytest.mark.parametrize("error", [None, StageError("the loss is nan")], ids=["complete", "failed"])
def test_the_duration_of_a_trial_is_measured_with_the_monotonic_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StageError | None
) -> None:
    now_s = 1_000.0
    clock = Mock(wraps=time)
    clock.monotonic = lambda: now_s
    monkeypatch.setattr("tasks.tuning.study.time", clock)

    def train(on_progress: Callable[[Progress], None]) -> Any:
        nonlocal now_s
        now_s += 90
        if error is not None:
            raise error
        return Mock(validation={"ndcg@10": 0.1})

    study = open_study(tmp_path / "study")
    trial = start_trial(study, CONFIG)
    run_trial.fn(study, trial, train, metric="ndcg@10", startup_trials=3, deadline_s=inf, folder=tmp_path, label="1")
    assert [trial.seconds for trial in finished_trials(study)] == [90]


def test_a_complete_trial_ranks_before_a_pruned_trial_with_a_better_metric(tmp_path: Path) -> None:
    study = open_study(tmp_path / "study")
    fail_trial(study, start_trial(study, CONFIG), reason="the loss is nan")
    pruned_trial = start_trial(study, CONFIG)
    pruned_trial.report(0.9, 1)
    study.tell(pruned_trial, state=TrialState.PRUNED)
    for metric in (0.2, 0.3):
        study.tell(start_trial(study, CONFIG), metric)
    trials = finished_trials(study)
    assert [(trial.number, trial.ending, trial.value) for trial in trials] == [
        (3, "complete", 0.3),
        (2, "complete", 0.2),
        (1, "pruned", 0.9),
        (0, "failed", None),
    ]
    assert trials[-1].reason == "the loss is nan"


def test_the_history_can_be_plotted_before_and_after_the_first_complete_trial(tmp_path: Path) -> None:
    study = open_study(tmp_path / "study")
    fail_trial(study, start_trial(study, CONFIG), reason="the loss is nan")
    for file_name in ("failed.png", "complete.png"):
        plot_history(study, metric="ndcg@10", path=tmp_path / file_name)
        assert (tmp_path / file_name).read_bytes().startswith(b"\x89PNG")
        study.tell(start_trial(study, CONFIG), 0.2)


def test_a_trial_is_pruned_after_1_2_or_4_epochs_unless_it_is_in_the_better_half(tmp_path: Path) -> None:
    study = open_study(tmp_path / "study")

    def run_trial_with_metrics(metric_by_epoch: Sequence[float]) -> tuple[str, int]:
        """Run a trial that measures these metrics. Return how the trial ends, and its number of epochs."""

        def train(on_progress: Callable[[Progress], None]) -> Any:
            for epoch, metric in enumerate(metric_by_epoch, start=1):
                other_fields: dict[str, Any] = {"loss": 1.0, "learning_rate": 0.1, "samples_per_s": 1.0}
                num_epochs = len(metric_by_epoch)
                validation = {"ndcg@10": metric}
                on_progress(Progress(step=epoch, total_steps=num_epochs, epoch=epoch, validation=validation, **other_fields))
            return Mock(validation={"ndcg@10": max(metric_by_epoch)})

        trial = start_trial(study, CONFIG)
        trial_folder = tmp_path / f"{trial.number}"
        run_trial.fn(study, trial, train, metric="ndcg@10", startup_trials=2, deadline_s=inf, folder=trial_folder, label="1")
        (finished_trial,) = [any_trial for any_trial in finished_trials(study) if any_trial.number == trial.number]
        return finished_trial.ending, len(finished_trial.epochs)

    # startup_trials is 2: the first two trials are not pruned.
    assert run_trial_with_metrics([0.5, 0.5, 0.5, 0.5, 0.5]) == ("complete", 5)
    assert run_trial_with_metrics([0.1, 0.1, 0.1, 0.1, 0.1]) == ("complete", 5)
    assert run_trial_with_metrics([0.2, 0.9, 0.9, 0.9, 0.9]) == ("pruned", 1)
    assert run_trial_with_metrics([0.6, 0.2, 0.9, 0.9, 0.9]) == ("pruned", 2)
    assert run_trial_with_metrics([0.6, 0.6, 0.6, 0.4, 0.9]) == ("pruned", 4)
    assert run_trial_with_metrics([0.7, 0.7, 0.1, 0.7, 0.7]) == ("complete", 5)


def test_a_setting_with_a_quoted_name_is_logged_to_mlflow(
    tmp_path: Path, new_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(new_database, tmp_path / "mlflow.db")
    ranges = {'tables."item.brand".dim': RangeConfig(choices=(8,))}
    study = open_study(tmp_path / "study")
    study.tell(start_trial(study, TuningConfig(ranges=ranges)), 0.2)
    context = StageContext(Run("study", workspace=tmp_path, parent_name=""), experiment="tests")
    log_trial(context, *finished_trials(study), metric="ndcg@10")
    client = connect(tmp_path)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (mlflow_run,) = client.search_runs([experiment.experiment_id], "attributes.run_name = 'trial-0'")
    assert (mlflow_run.info.status, mlflow_run.data.params) == ("FINISHED", {"tables.item.brand.dim": "8"})


def test_a_trial_that_was_not_completely_logged_to_mlflow_is_logged_once(
    tmp_path: Path, new_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(new_database, tmp_path / "mlflow.db")
    study = open_study(tmp_path / "study")
    for metric in (0.1, 0.2, 0.3):
        study.tell(start_trial(study, CONFIG), metric)
    context = StageContext(Run("study", workspace=tmp_path, parent_name=""), experiment="tests")
    trials = sorted(finished_trials(study), key=lambda trial: trial.number)
    log_trial(context, trials[0], metric="ndcg@10")
    with monkeypatch.context() as patch:  # the process is killed before the last request
        patch.setattr(MlflowClient, "set_terminated", lambda *_: None)
        log_trial(context, trials[1], metric="ndcg@10")
    for _ in range(2):
        log_missing_trials(context, trials, metric="ndcg@10")
    client = connect(tmp_path)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    mlflow_runs = client.search_runs([experiment.experiment_id], "attributes.run_name LIKE 'trial-%'", order_by=["run_name"])
    names_and_statuses = [(mlflow_run.info.run_name, mlflow_run.info.status) for mlflow_run in mlflow_runs]
    assert names_and_statuses == [(f"trial-{number}", "FINISHED") for number in range(3)]
    assert [mlflow_run.data.metrics["validation/best/ndcg_at_10"] for mlflow_run in mlflow_runs] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("link_name", ["train", "train.work"])
def test_a_failed_trial_removes_no_file_behind_a_link(tmp_path: Path, link_name: str) -> None:
    def train_and_fail(**_: Any) -> TrainManifest:
        raise StageError("rank 0 failed")

    archive = tmp_path / "archive"
    (archive / "checkpoint").mkdir(parents=True)
    file_names = ("metrics.jsonl", "values.npy", "checkpoint/weights.bin")
    for name in file_names:
        (archive / name).write_bytes(b"precious")
    trial_folder = tmp_path / "trial"
    trial_folder.mkdir()
    (trial_folder / link_name).symlink_to(archive)
    study = open_study(tmp_path / "study")
    trial = start_trial(study, CONFIG)
    run_trial.fn(
        study, trial, train_and_fail, metric="ndcg@10", startup_trials=3, deadline_s=inf, folder=trial_folder, label="1"
    )
    assert [(trial.ending, trial.reason) for trial in finished_trials(study)] == [("failed", "rank 0 failed")]
    assert all((archive / name).is_file() for name in file_names)
