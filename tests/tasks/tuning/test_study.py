"""A tuning study: the trials after an interruption, their order, and the files that remain after a trial."""

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from optuna.trial import TrialState

from recsys_core.errors import StageError
from recsys_core.manifests import TrainManifest
from recsys_core.training.job import Progress
from tasks.tuning.config import RangeConfig, TuningConfig
from tasks.tuning.study import BudgetSpent, fail_trial, finished_trials, open_study, plot_history, run_trial, start_trial

CONFIG = TuningConfig(
    seed=1,
    ranges={
        "layers": RangeConfig(choices=([64], [64, 32], None)),
        "rate": RangeConfig(low=0.001, high=1.0, log=True),
        "length": RangeConfig(low=4, high=20, step=4),
    },
)


def test_a_study_that_is_interrupted_in_each_trial_tries_the_settings_of_an_undisturbed_one(tmp_path: Path) -> None:
    def tries(folder: Path, *, reopen: bool) -> list[dict[str, Any]]:
        study = open_study(CONFIG, folder=folder)
        for number in range(12):  # from the eleventh trial on the settings depend on the earlier results
            if reopen:
                start_trial(study, CONFIG)  # and is interrupted
                study = open_study(CONFIG, folder=folder)
            trial = start_trial(study, CONFIG)
            assert trial.number == number
            study.tell(trial, 1 / (1 + number))
        return [trial.settings for trial in finished_trials(study)]

    undisturbed = tries(tmp_path / "one", reopen=False)
    assert tries(tmp_path / "two", reopen=True) == undisturbed
    assert all(settings["layers"] in ([64], [64, 32], None) for settings in undisturbed)
    assert {settings["length"] for settings in undisturbed} <= {4, 8, 12, 16, 20}
    assert len({settings["rate"] for settings in undisturbed}) == 12


def test_the_first_trials_have_the_given_settings_and_later_ones_are_drawn(tmp_path: Path) -> None:
    first_settings = [{"layers": None, "rate": 0.05, "length": 12}, {"layers": [64, 32], "rate": 0.1, "length": 20}]
    study = open_study(CONFIG, folder=tmp_path / "study")
    for number in range(4):
        start_trial(study, CONFIG, first_settings=first_settings)  # and is interrupted
        trial = start_trial(study, CONFIG, first_settings=first_settings)
        study.tell(trial, number / 10)
    settings = [trial.settings for trial in sorted(finished_trials(study), key=lambda trial: trial.number)]
    assert settings[:2] == first_settings
    assert settings[2] not in first_settings and settings[3] not in first_settings


def test_after_the_deadline_the_running_trial_is_interrupted_and_a_later_call_continues_it(tmp_path: Path) -> None:
    study = open_study(CONFIG, folder=tmp_path / "study")
    epochs: list[int] = []

    def train(on_progress: Callable[[Progress], None]) -> Any:
        numbers: dict[str, Any] = {"loss": 1.0, "learning_rate": 0.1, "samples_per_s": 1.0}
        for epoch in (1, 2, 3):
            epochs.append(epoch)
            on_progress(Progress(step=epoch, total_steps=3, epoch=epoch, validation={"ndcg@10": 0.1}, **numbers))
        return Mock(validation={"ndcg@10": 0.1})

    def run(*, deadline: float) -> int:
        trial, folder = start_trial(study, CONFIG), tmp_path / "trial"
        (folder / "train.work").mkdir(parents=True, exist_ok=True)
        (folder / "train.work" / "weights").touch()
        run_trial.fn(study, trial, train, metric="ndcg@10", startup_trials=3, deadline_s=deadline, folder=folder, label="1")
        return trial.number

    assert run(deadline=0) == 0 and epochs == [1, 2, 3]  # the first trial ends, so that there is a result
    epochs.clear()
    with pytest.raises(BudgetSpent):
        run(deadline=0)
    assert epochs == [1] and (tmp_path / "trial" / "train.work" / "weights").exists()
    assert [trial.number for trial in finished_trials(study)] == [0]
    assert run(deadline=inf) == 1
    assert [trial.ending for trial in finished_trials(study)] == ["complete", "complete"]


def test_a_complete_trial_ranks_before_a_pruned_one_with_a_better_metric(tmp_path: Path) -> None:
    study = open_study(CONFIG, folder=tmp_path / "study")
    fail_trial(study, start_trial(study, CONFIG), reason="the loss is nan")
    pruned_trial = start_trial(study, CONFIG)
    pruned_trial.report(0.9, 1)
    study.tell(pruned_trial, state=TrialState.PRUNED)
    for value in (0.2, 0.3):
        study.tell(start_trial(study, CONFIG), value)
    trials = finished_trials(study)
    assert [(trial.number, trial.ending, trial.value) for trial in trials] == [
        (3, "complete", 0.3),
        (2, "complete", 0.2),
        (1, "pruned", 0.9),
        (0, "failed", None),
    ]
    assert trials[-1].reason == "the loss is nan"


def test_the_history_is_plotted_before_and_after_the_first_complete_trial(tmp_path: Path) -> None:
    study = open_study(CONFIG, folder=tmp_path / "study")
    fail_trial(study, start_trial(study, CONFIG), reason="the loss is nan")
    for name in ("failed.png", "complete.png"):
        plot_history(study, metric="ndcg@10", path=tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        study.tell(start_trial(study, CONFIG), 0.2)


def test_a_trial_ends_after_1_2_or_4_epochs_unless_it_is_in_the_better_half(tmp_path: Path) -> None:
    study = open_study(CONFIG, folder=tmp_path / "study")

    def run(values: Sequence[float]) -> tuple[str, int]:
        """Return how a trial with these metrics ends, and its number of epochs."""

        def train(on_progress: Callable[[Progress], None]) -> Any:
            for epoch, value in enumerate(values, start=1):
                numbers: dict[str, Any] = {"loss": 1.0, "learning_rate": 0.1, "samples_per_s": 1.0}
                on_progress(
                    Progress(step=epoch, total_steps=len(values), epoch=epoch, validation={"ndcg@10": value}, **numbers)
                )
            return Mock(validation={"ndcg@10": max(values)})

        trial = start_trial(study, CONFIG)
        folder = tmp_path / f"{trial.number}"
        run_trial.fn(study, trial, train, metric="ndcg@10", startup_trials=2, deadline_s=inf, folder=folder, label="1")
        (finished,) = [result for result in finished_trials(study) if result.number == trial.number]
        return finished.ending, len(finished.epochs)

    assert run([0.5, 0.5, 0.5, 0.5, 0.5]) == ("complete", 5)
    assert run([0.1, 0.1, 0.1, 0.1, 0.1]) == ("complete", 5)  # the second of two trials that are never pruned
    assert run([0.2, 0.9, 0.9, 0.9, 0.9]) == ("pruned", 1)
    assert run([0.6, 0.2, 0.9, 0.9, 0.9]) == ("pruned", 2)
    assert run([0.6, 0.6, 0.6, 0.4, 0.9]) == ("pruned", 4)
    assert run([0.7, 0.7, 0.1, 0.7, 0.7]) == ("complete", 5)


@pytest.mark.parametrize("linked", ["train", "train.work"])
def test_a_failed_trial_removes_no_file_behind_a_link(tmp_path: Path, linked: str) -> None:
    def failing_training(**_: Any) -> TrainManifest:
        raise StageError("rank 0 failed")

    archive = tmp_path / "archive"
    (archive / "checkpoint").mkdir(parents=True)
    names = ("metrics.jsonl", "values.npy", "checkpoint/weights.bin")
    for name in names:
        (archive / name).write_bytes(b"precious")
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / linked).symlink_to(archive)
    study = open_study(CONFIG, folder=tmp_path / "study")
    trial = start_trial(study, CONFIG)
    run_trial.fn(study, trial, failing_training, metric="ndcg@10", startup_trials=3, deadline_s=inf, folder=folder, label="1")
    assert [(trial.ending, trial.reason) for trial in finished_trials(study)] == [("failed", "rank 0 failed")]
    assert all((archive / name).is_file() for name in names)
