"""The choice of the temperature by one epoch with each candidate, and trainings that need no choice."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from recsys_core.errors import InputError
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.training.config import ProfileConfig, TrainingConfig, ValidationConfig
from recsys_core.training.job import RESULT_FILE, TrainJob, TrainResult
from recsys_core.training.temperature import CANDIDATE_TEMPERATURES, TRIALS_FILE, TRIALS_FOLDER, TemperatureTrials
from recsys_core.training.warm.starting_model import Champion

RECALL_BY_TEMPERATURE = {0.07: 0.1, 0.1: 0.3, 0.15: 0.4, 0.2: 0.2}
TRAINING = TrainingConfig(epochs=7, validation=ValidationConfig(metric="recall", k=5))


class FakeTrainings:
    """Trainings that only record their job and write the metric of RECALL_BY_TEMPERATURE.

    interrupted_temperature: temperature whose training is interrupted.
    """

    def __init__(self, *, interrupted_temperature: float | None = None, metric_name: str = "recall@5") -> None:
        self.jobs: list[TrainJob] = []
        self.interrupted_temperature, self.metric_name = interrupted_temperature, metric_name

    def __call__(self, job: TrainJob) -> None:
        temperature = job.spec.config.start_temperature
        if temperature == self.interrupted_temperature:
            raise KeyboardInterrupt
        self.jobs.append(job)
        validation = {self.metric_name: RECALL_BY_TEMPERATURE[temperature]}
        train_result = TrainResult(
            num_steps=1, num_epochs=1, num_examples=1, final_loss=1, samples_per_s=1, world_size=1,
            checkpoint="step-1", best_epoch=1, validation=validation,
        )  # fmt: skip
        (job.work_folder / RESULT_FILE).write_text(train_result.model_dump_json())

    @property
    def trained_temperatures(self) -> list[float]:
        return [job.spec.config.start_temperature for job in self.jobs]


def train_job(folder: Path, *, temperature: object = "auto", training: TrainingConfig = TRAINING) -> TrainJob:
    """Return a job that needs trials unless `temperature` is a number."""
    config = TwoTowerConfig.model_validate({"temperature": temperature})
    spec = ModelSpec.sized(config, num_users=3, num_items=4, ingested_by_feature={}, vector_dim_by_table={})
    folder.mkdir(exist_ok=True)
    return TrainJob(
        work_folder=folder, fingerprint="f", spec=spec, loss=LossConfig(), training=training,
        interactions_folder=folder, plan_path=folder / "plan.json",
    )  # fmt: skip


def run_trials(
    job: TrainJob, trainings: FakeTrainings, *, champion: Champion | None = None, num_validation_events: int = 9
) -> TemperatureTrials:
    return TemperatureTrials.run(job, champion=champion, num_validation_events=num_validation_events, train=trainings)


def test_each_candidate_is_trained_for_one_epoch_and_the_best_metric_wins(tmp_path: Path) -> None:
    trainings = FakeTrainings()
    training = TRAINING.model_copy(update={"profile": ProfileConfig()})
    trials = run_trials(train_job(tmp_path / "work", training=training), trainings)
    assert trainings.trained_temperatures == list(CANDIDATE_TEMPERATURES)
    assert {(job.training.epochs, job.training.profile) for job in trainings.jobs} == {(1, None)}
    assert trials.temperature == 0.15
    assert trials.metric_by_temperature == {"0.07": 0.1, "0.1": 0.3, "0.15": 0.4, "0.2": 0.2}
    assert list((tmp_path / "work" / TRIALS_FOLDER).iterdir()) == []


def test_an_interrupted_choice_continues_with_the_first_incomplete_candidate(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_trials(train_job(tmp_path / "work"), FakeTrainings(interrupted_temperature=0.15))
    trainings = FakeTrainings()
    assert run_trials(train_job(tmp_path / "work"), trainings) == run_trials(train_job(tmp_path / "other"), FakeTrainings())
    assert trainings.trained_temperatures == [0.15, 0.2]


def test_a_file_of_trials_that_a_power_failure_has_cut_off_is_ignored(tmp_path: Path) -> None:
    job, trainings = train_job(tmp_path / "work"), FakeTrainings()
    (job.work_folder / TRIALS_FILE).write_text('{"temperature": 0')
    assert run_trials(job, trainings).temperature == 0.15
    assert trainings.trained_temperatures == list(CANDIDATE_TEMPERATURES)


def test_a_temperature_from_the_config_or_from_the_champion_needs_no_trial(tmp_path: Path) -> None:
    trainings = FakeTrainings()
    assert run_trials(train_job(tmp_path, temperature=0.3), trainings) == TemperatureTrials(temperature=0.3)
    champion = Mock(train=Mock(temperature=0.2))
    assert run_trials(train_job(tmp_path), trainings, champion=champion) == TemperatureTrials(temperature=0.2)
    champion.train.temperature = None  # as in a manifest of an earlier version of nightjar
    champion.spec = train_job(tmp_path, temperature=0.4).spec
    assert run_trials(train_job(tmp_path), trainings, champion=champion) == TemperatureTrials(temperature=0.4)
    assert trainings.jobs == []


@pytest.mark.parametrize(
    ("training", "num_validation_events", "metric_name", "message"),
    [
        (TRAINING.model_copy(update={"validation": None}), 9, "recall@5", "training.validation is null; set model.temperature"),
        (TRAINING, 0, "recall@5", "the split holds no event; set model.temperature to a number"),
        (TRAINING, 9, "other", "no user in the split has a target"),
    ],
    ids=["no validation", "no event", "no metric"],
)
def test_without_a_metric_the_choice_is_rejected(
    tmp_path: Path, training: TrainingConfig, num_validation_events: int, metric_name: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        trainings = FakeTrainings(metric_name=metric_name)
        run_trials(train_job(tmp_path, training=training), trainings, num_validation_events=num_validation_events)
