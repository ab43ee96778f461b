"""Warnings before a launch, and the number of ranks of each attempt after a failure. The launches are faked."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from recsys_core.errors import LaunchError, StageError
from recsys_core.models.tables.table_config import DenseOptimizer, TableOptimizer
from recsys_core.sharding.config import ClusterConfig, ShardingConfig
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training import train as train_module
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job import TrainJob
from recsys_core.training.setup import TrainingSetup
from tests.recsys_core.training.forked_training import Experiment, generate_dataset, make_experiment, train_job
from tests.recsys_core.training.small_model import with_optimizer

TRAINING = TrainingConfig(batch_size=64, max_attempts=3, min_processes=2)
NUM_PLANNED_RANKS = 8


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    folder = tmp_path_factory.mktemp("experiment")
    return make_experiment(generate_dataset(folder), folder / "cpu plan", training=TRAINING)


@pytest.mark.parametrize(("num_gpus_left", "expected_world_sizes"), [(3, [8, 2]), (8, [8, 8, 4])])
def test_fewer_ranks_are_a_divisor_of_the_planned_ranks_and_have_a_gpu_each(
    experiment: Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_gpus_left: int,
    expected_world_sizes: list[int],
) -> None:
    cluster = ClusterConfig(device="cuda", processes_per_node=NUM_PLANNED_RANKS)
    setup = TrainingSetup(experiment.spec, TRAINING, experiment.loss, ShardingConfig(cluster=cluster))
    plan = setup.plan(experiment.dataset, folder=tmp_path / "plan")
    world_sizes: list[int] = []

    def fail_until_the_last_launch(job: TrainJob, **_: object) -> None:
        world_size = PlanFile.read(job.plan_path).world_size
        assert job.training.batch_size * world_size == TRAINING.batch_size * NUM_PLANNED_RANKS
        world_sizes.append(world_size)
        if len(world_sizes) < len(expected_world_sizes):
            raise LaunchError("a GPU has failed")

    monkeypatch.setattr(train_module, "launch_job", fail_until_the_last_launch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus_left)
    train_module.run_attempts(train_job(experiment._replace(plan=plan), tmp_path / "work"), setup=setup, poll=lambda: None)
    assert world_sizes == expected_world_sizes


def test_an_attempt_with_fewer_ranks_never_has_a_batch_size_above_the_limit(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = TRAINING.model_copy(update={"batch_size": 600_000, "min_processes": 1, "max_attempts": 4})
    cluster = ClusterConfig(device="cpu", processes_per_node=2)
    setup = TrainingSetup(experiment.spec, training, experiment.loss, ShardingConfig(cluster=cluster))
    plan = setup.plan(experiment.dataset, folder=tmp_path / "plan")
    started_jobs: list[TrainJob] = []

    def fail(job: TrainJob, **_: object) -> None:
        started_jobs.append(job)
        raise LaunchError("a rank has failed")

    monkeypatch.setattr(train_module, "launch_job", fail)
    job = train_job(experiment._replace(plan=plan), tmp_path / "work").model_copy(update={"training": training})
    with pytest.raises(LaunchError, match="a rank has failed"):
        train_module.run_attempts(job, setup=setup, poll=lambda: None)
    for started_job in started_jobs:
        assert TrainJob.model_validate_json(started_job.model_dump_json()) == started_job
    assert "there is no attempt with 1 ranks instead of 2: its training.batch_size would be 1200000, but at most 1048576" in (
        caplog.text
    )


@pytest.mark.parametrize(("warmup_steps", "has_warning"), [(10, True), (9, False)])
def test_a_warm_up_that_ends_after_the_last_step_is_reported(
    experiment: Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    warmup_steps: int,
    has_warning: bool,
) -> None:
    optimizer = TableOptimizer(warmup_steps=warmup_steps)
    user_table = experiment.spec.tables["user"]
    user_settings = user_table.settings.model_copy(update={"optimizer": optimizer})
    spec = with_optimizer(experiment.spec, TableOptimizer(warmup_steps=0))
    user_table = user_table.model_copy(update={"settings": user_settings, "optimizer": optimizer})
    spec = spec.model_copy(update={"tables": spec.tables | {"user": user_table}})
    num_events_per_rank = experiment.dataset.interactions.num_train_events // experiment.plan.world_size
    training = TRAINING.model_copy(
        update={"epochs": 10, "batch_size": num_events_per_rank, "dense_optimizer": DenseOptimizer(warmup_steps=warmup_steps)}
    )

    def fail(job: TrainJob, **_: object) -> None:
        raise StageError("stopped before the launch")

    monkeypatch.setattr(train_module, "launch_job", fail)
    setup = TrainingSetup(spec, training, experiment.loss, ShardingConfig())
    with pytest.raises(StageError, match="stopped before the launch"):
        train_module.train(
            setup, dataset=experiment.dataset, plan=experiment.plan, folder=tmp_path / "train", on_progress=lambda _: None
        )
    warnings = [message for message in caplog.messages if "warmup_steps" in message]
    assert [warning.partition(" is ")[0] for warning in warnings] == (
        ["tables.user.optimizer.warmup_steps", "training.dense_optimizer.warmup_steps"] if has_warning else []
    )
    assert all("is 10, but the training has only 10 steps" in warning for warning in warnings)


def test_a_stage_error_of_a_rank_is_raised_and_not_retried(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Mock(side_effect=StageError("the loss is nan"))
    monkeypatch.setattr(train_module, "launch_job", launch)
    with pytest.raises(StageError, match="the loss is nan") as error_info:
        train_module.run_attempts(
            train_job(experiment, tmp_path / "work"),
            setup=TrainingSetup(experiment.spec, TRAINING, experiment.loss),
            poll=lambda: None,
        )
    assert not isinstance(error_info.value, LaunchError)
    assert launch.call_count == 1
