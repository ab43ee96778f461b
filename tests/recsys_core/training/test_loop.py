"""Epochs, validation, early stopping and resuming from a checkpoint: two gloo ranks on an ingested log."""

import dataclasses
import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsys_core.errors import StageError
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.evaluate import evaluate
from recsys_core.models.history_config import SelfAttentionHistory
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.tables.table_config import DenseOptimizer, TableConfig, TableOptimizer, UnfreezeStep
from recsys_core.sharding.config import TableConstraint
from recsys_core.sharding.plan_file import PlanFile, layout_fingerprint
from recsys_core.training import loop
from recsys_core.training.config import ProfileConfig, TrainingConfig, ValidationConfig
from recsys_core.training.job import CHECKPOINTS_FOLDER, RESULT_FILE, TrainJob
from recsys_core.training.model.sharded_model import fused_kernels
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.training.forked_training import (
    DIM,
    MODEL,
    Experiment,
    checkpoint_of,
    export_in_forks,
    generate_dataset,
    make_experiment,
    train_in_forks,
    train_job,
    without_timings,
    write_export,
)

TRAINING = TrainingConfig(
    epochs=3,
    batch_size=256,
    log_every_steps=2,
    checkpoint_every_steps=4,
    table_optimizer=TableOptimizer(warmup_steps=5, lr_decay="cosine"),
    dense_optimizer=DenseOptimizer(warmup_steps=5),
    seed=3,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return generate_dataset(tmp_path_factory.mktemp("data"))


def training_with(**settings) -> TrainingConfig:
    return TRAINING.model_copy(update=settings)


def two_epochs_with(**settings) -> TrainingConfig:
    return training_with(epochs=2, **settings)


MODEL_WITH_ITEM_DROPOUT = MODEL.model_copy(
    update={"learn_temperature": True, "history": MODEL.history.model_copy(update={"item_dropout": 0.2})}
)
REPLICATED_TABLE = TableConstraint(sharding_types=("data_parallel",))
SETTINGS_BY_CASE = {
    "cross-rank negatives": {
        "model": MODEL_WITH_ITEM_DROPOUT,
        "loss": LossConfig(num_negatives=32, cross_rank_negatives=True, mask_negatives="seen"),
        "tables": {"item": TableConfig(transfer="residual", id_dropout=0.3)},
    },
    "self-attention": {
        "model": MODEL.model_copy(update={"history": SelfAttentionHistory(length=6, num_heads=2, item_dropout=0.2)}),
        "loss": LossConfig(negatives="all", mask_negatives="seen"),
        "training": two_epochs_with(averaged_epochs=2),
    },
    "gradual table": {
        "tables": {"item": TableConfig(transfer="gradual", unfreeze=(UnfreezeStep(epoch=2, share=0.4),))},
        "training": two_epochs_with(table_optimizer=TableOptimizer(kind="adagrad", gradient_clip_value=1.0, weight_decay=0.01)),
    },
    "replicated tables": {
        "constraints": dict.fromkeys(("item", "user", "user.groups"), REPLICATED_TABLE),
        "tables": {
            "item": TableConfig(optimizer=TableOptimizer(kind="adam", learning_rate=0.01, gradient_clip_value=0.5)),
            "user": TableConfig(optimizer=TableOptimizer(kind="adagrad")),
        },
        "training": two_epochs_with(dense_optimizer=DenseOptimizer(kind="adagrad", learning_rate=0.05, gradient_clip_norm=1.0)),
    },
    "sharded layers": {
        # Without learned weights in the history, no layer is left for DDP.
        "model": MODEL.model_copy(update={"history": MODEL.history.model_copy(update={"pooling": "mean"})}),
        "training": two_epochs_with(
            dense_parallel="sharded",
            dense_optimizer=DenseOptimizer(warmup_steps=5, gradient_clip_norm=0.5),
            averaged_epochs=2,
        ),
    },
}
SLOW_CASES = ("replicated tables", "sharded layers")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=pytest.mark.drill if name in SLOW_CASES else ())
        for name, settings in SETTINGS_BY_CASE.items()
    ],
)
def test_a_training_that_is_stopped_twice_equals_an_undisturbed_training_bit_for_bit(dataset, settings, tmp_path):
    experiment = make_experiment(dataset, tmp_path / "plan", **{"training": two_epochs_with()} | settings)
    undisturbed_training = train_in_forks(experiment, tmp_path / "undisturbed")
    steps_per_epoch = undisturbed_training.lines[0].total_steps // 2
    for stop_step in (steps_per_epoch - 1, steps_per_epoch + 3):
        train_in_forks(experiment, tmp_path / "stopped", stop_after_step=stop_step)
    resumed_training = train_in_forks(experiment, tmp_path / "stopped")
    assert without_timings(resumed_training.lines) == without_timings(undisturbed_training.lines)
    assert resumed_training.result.model_dump(exclude={"samples_per_s"}) == undisturbed_training.result.model_dump(
        exclude={"samples_per_s"}
    )
    assert sum(bool(line.validation) for line in undisturbed_training.lines) == 2
    heartbeat_timeout_s = float((undisturbed_training.work_folder / "heartbeat").read_text())
    assert 60 <= heartbeat_timeout_s < 600  # shorter than the default, because checkpoints have been timed
    expected_export = export_in_forks(experiment, checkpoint_of(undisturbed_training), tmp_path / "undisturbed export")
    resumed_export = export_in_forks(experiment, checkpoint_of(resumed_training), tmp_path / "resumed export")
    assert resumed_export.keys() == expected_export.keys()
    for name, expected_array in expected_export.items():
        np.testing.assert_array_equal(resumed_export[name], expected_array, err_msg=name)


def test_the_first_steps_after_a_resume_do_not_shorten_the_heartbeat_timeout(dataset, tmp_path):
    training = training_with(validation=None, log_every_steps=5, checkpoint_every_steps=4)  # lines after steps 4, 5, 8, 10, 12
    experiment = make_experiment(dataset, tmp_path / "plan", training=training)
    heartbeat_path = tmp_path / "work" / "heartbeat"
    train_in_forks(experiment, tmp_path / "work", stop_after_step=9)
    assert float(heartbeat_path.read_text()) == 60  # ten times the duration of steps 1 to 4, but at least 60 s
    train_in_forks(experiment, tmp_path / "work", stop_after_step=11)  # resumes after step 4 or 8
    assert float(heartbeat_path.read_text()) == 600


def train_and_check_iterations(rank: int, job: TrainJob, stop_after_step: int) -> None:
    """Train until `stop_after_step`. After each step, assert that every sharded table has counted all steps so far."""

    def check_iterations(loss: torch.Tensor, *, step: int, model: DistributedModelParallel, **_: Any) -> None:
        counting_kernels = [kernel for kernel in fused_kernels(model) if kernel.optimizer != EmbOptimType.EXACT_SGD]
        assert counting_kernels and {int(kernel.iter_cpu) for kernel in counting_kernels} == {step}
        if step == stop_after_step:
            os._exit(0)

    loop.raise_if_not_finite = check_iterations
    loop.run_training(job, process=cpu_process(rank))


def test_tables_count_the_steps_of_a_resumed_training_without_the_lookups_of_validations(dataset, tmp_path):
    """FBGEMM corrects the bias of Adam by the number of iterations, which it does not save."""
    experiment = make_experiment(dataset, tmp_path / "plan", training=training_with(epochs=2))
    for stop_after_step in (10, 1_000):  # the second attempt is not stopped
        job = train_job(experiment, tmp_path / "work")
        run_ranks(train_and_check_iterations, world_size=2, arguments=(job, stop_after_step))
    assert job.resume_folder is not None and (tmp_path / "work" / RESULT_FILE).is_file()


def train_and_record_checks(rank: int, job: TrainJob) -> None:
    """Train with a trainer that takes the CPU for a GPU, and write the steps after which it checks the loss."""
    checked_steps: list[int] = []
    loop.raise_if_not_finite = lambda loss, *, step, **_: checked_steps.append(step)
    initialise = loop.Trainer.__init__

    def initialise_as_on_a_gpu(trainer: loop.Trainer, *arguments: Any, **options: Any) -> None:
        initialise(trainer, *arguments, **options)
        trainer.process = dataclasses.replace(trainer.process, device=torch.device("cuda"))

    loop.Trainer.__init__ = initialise_as_on_a_gpu  # type: ignore[method-assign]
    loop.run_training(job, process=cpu_process(rank))
    (job.work_folder / f"checked-{rank}.json").write_text(json.dumps(checked_steps))


def test_on_a_gpu_the_loss_is_checked_before_each_line_checkpoint_and_validation(dataset, tmp_path):
    training = training_with(epochs=2, log_every_steps=5, checkpoint_every_steps=4)
    job = train_job(make_experiment(dataset, tmp_path / "plan", training=training), tmp_path / "work")
    run_ranks(train_and_record_checks, world_size=2, arguments=(job,))
    num_steps = json.loads((tmp_path / "work" / RESULT_FILE).read_bytes())["num_steps"]
    assert num_steps % 4 and num_steps % 5, f"a line or a checkpoint is due after the last step {num_steps}"
    due_steps = {*range(4, num_steps, 4), *range(5, num_steps, 5), num_steps // 2, num_steps}
    for rank in range(2):
        assert json.loads((tmp_path / "work" / f"checked-{rank}.json").read_text()) == sorted(due_steps)


def train_until_the_loss_is_not_finite(rank: int, job: TrainJob) -> None:
    with pytest.raises(StageError, match=r"step \d+, epoch 1, rank 0: the loss is (nan|inf) \(table") as error_info:
        loop.run_training(job, process=cpu_process(rank))
    assert "lower the learning_rate of training.table_optimizer" in str(error_info.value)


def test_a_loss_that_is_not_finite_is_raised_with_its_step(dataset, tmp_path):
    diverging_optimizer = TableOptimizer(kind="sgd", learning_rate=1e6, weight_decay=1000, warmup_steps=0)
    training = training_with(table_optimizer=diverging_optimizer)
    experiment = make_experiment(dataset, tmp_path / "plan", training=training, world_size=1)
    job = train_job(experiment, tmp_path / "work")
    run_ranks(train_until_the_loss_is_not_finite, world_size=1, arguments=(job,))
    assert not (tmp_path / "work" / RESULT_FILE).exists()


def with_kernel(experiment: Experiment, kernel: str, folder: Path) -> Experiment:
    """Return the experiment with `kernel` for all tables. On a CPU, FBGEMM keeps the rows in main memory with every kernel."""
    plan = PlanFile.read(experiment.plan.path("plan.json"))
    cache_load_factor = 0.2 if kernel == "fused_uvm_caching" else None
    kernel_settings = {"compute_kernel": kernel, "cache_load_factor": cache_load_factor}
    tables = {name: table.model_copy(update=kernel_settings) for name, table in plan.tables.items()}
    fingerprint = layout_fingerprint(tables, device=plan.device, world_size=plan.world_size)
    shutil.copytree(experiment.plan.folder, folder)
    (folder / "plan.json").write_text(plan.model_copy(update={"tables": tables, "fingerprint": fingerprint}).model_dump_json())
    return experiment._replace(plan=experiment.plan.model_copy(update={"folder": folder}))


def test_tables_with_and_without_a_cache_have_the_same_losses(dataset, tmp_path):
    experiment = make_experiment(dataset, tmp_path / "plan", training=training_with(epochs=2))
    losses_by_kernel = {}
    for kernel in ("fused", "fused_uvm_caching"):
        finished_training = train_in_forks(with_kernel(experiment, kernel, tmp_path / f"plan {kernel}"), tmp_path / kernel)
        losses_by_kernel[kernel] = [line.loss for line in finished_training.lines]
    assert losses_by_kernel["fused"][-1] < losses_by_kernel["fused"][0]
    assert losses_by_kernel["fused_uvm_caching"] == losses_by_kernel["fused"]


def test_early_stopping_ends_the_training_and_keeps_the_best_epoch(dataset, tmp_path):
    training_with_patience = training_with(
        epochs=6, validation=ValidationConfig(patience=2), keep_checkpoints=1, table_optimizer=TableOptimizer(warmup_steps=5)
    )
    experiment = make_experiment(dataset, tmp_path / "plan", training=training_with_patience)
    stopped_training = train_in_forks(experiment, tmp_path / "stopped", metric_values=[0.1, 0.3, 0.2, 0.3, 0.9, 0.9])
    # An equal value is no improvement.
    assert (stopped_training.result.num_epochs, stopped_training.result.best_epoch) == (4, 2)
    assert stopped_training.result.validation == {"ndcg@10": 0.3}
    assert [line.validation["ndcg@10"] for line in stopped_training.lines if line.validation] == [0.1, 0.3, 0.2, 0.3]
    last_checkpoint = f"step-{stopped_training.result.num_steps:09d}"
    checkpoint_names = sorted(path.name for path in (stopped_training.work_folder / CHECKPOINTS_FOLDER).iterdir())
    assert checkpoint_names == [stopped_training.result.checkpoint, last_checkpoint]

    two_epoch_experiment = experiment._replace(
        training=training_with_patience.model_copy(update={"epochs": 2, "validation": None})
    )
    training_of_two_epochs = train_in_forks(two_epoch_experiment, tmp_path / "two epochs")
    assert training_of_two_epochs.result.best_epoch is None
    expected_export = export_in_forks(two_epoch_experiment, checkpoint_of(training_of_two_epochs), tmp_path / "expected export")
    best_epoch_export = export_in_forks(experiment, checkpoint_of(stopped_training), tmp_path / "export of best epoch")
    for name, exported_array in best_epoch_export.items():
        np.testing.assert_array_equal(exported_array, expected_export[name], err_msg=name)
    # A restarted training trains and validates nothing, because the stopped training has ended.
    restarted_training = train_in_forks(experiment, stopped_training.work_folder, metric_values=[])
    assert without_timings(restarted_training.lines) == without_timings(stopped_training.lines)


@pytest.mark.parametrize(("candidates", "metric_prefix"), [("all", "validation"), ("cold", "validation/cold")])
def test_validation_during_training_computes_the_metrics_of_the_evaluation_stage(dataset, candidates, metric_prefix, tmp_path):
    training = training_with(epochs=2, validation=ValidationConfig(metric="recall", k=5, candidates=candidates))
    experiment = make_experiment(dataset, tmp_path / "plan", training=training)
    finished_training = train_in_forks(experiment, tmp_path / "work")
    export = write_export(experiment, finished_training, tmp_path / "export")
    config = EvaluationConfig(ks=(5,))
    metrics = evaluate(config, export=export, dataset=dataset, folder=tmp_path / "evaluation").metrics
    assert set(finished_training.result.validation) == {"recall@5", "ndcg@5", "hit_rate@5"}
    for name, metric_value in finished_training.result.validation.items():
        assert 0 < metric_value < 1
        assert metric_value == pytest.approx(metrics[f"{metric_prefix}/{name}"], abs=1e-12)


def test_the_metrics_contain_step_times_and_a_profile_is_written_if_configured(dataset, tmp_path):
    experiment = make_experiment(
        dataset, tmp_path / "plan", training=training_with(profile=ProfileConfig(after_steps=3, steps=2))
    )
    finished_training = train_in_forks(experiment, tmp_path / "work")
    for line in finished_training.lines:
        assert set(line.ms_per_step) == {"step", "data"}
        assert line.ms_per_step["step"] > line.ms_per_step["data"] >= 0
        assert line.memory_bytes["rss"] > 2**26
    first_line, row_bytes = finished_training.lines[0], DIM * 4
    bytes_per_query = first_line.embedding_bytes_per_s / first_line.samples_per_s
    assert row_bytes < bytes_per_query < 40 * row_bytes  # a query looks up its user, and fewer than 40 items and features
    for rank in range(2):
        trace = json.loads(gzip.decompress((tmp_path / f"work/profile/rank-{rank}.json.gz").read_bytes()))
        event_names = {event["name"] for event in trace["traceEvents"]}
        assert any("backward" in name for name in event_names)
        assert any("all_to_all" in name or "alltoall" in name for name in event_names)


def test_the_metrics_contain_the_unfrozen_share_of_a_table_in_each_epoch(dataset, tmp_path):
    unfreeze_steps = (UnfreezeStep(epoch=2, share=0.25), UnfreezeStep(epoch=3, share=1.0))
    tables = {"item": TableConfig(transfer="gradual", unfreeze=unfreeze_steps)}
    training = training_with(batch_size=2048)  # one step per epoch
    finished_training = train_in_forks(
        make_experiment(dataset, tmp_path / "plan", training=training, tables=tables), tmp_path / "work"
    )
    assert {(line.epoch, line.unfrozen["item"]) for line in finished_training.lines} == {(1, 0.0), (2, 0.25), (3, 1.0)}


def test_the_final_loss_with_bf16_differs_from_fp32_by_less_than_one_percent(dataset, tmp_path):
    loss_by_precision = {}
    for precision in ("fp32", "bf16"):
        experiment = make_experiment(
            dataset, tmp_path / f"plan-{precision}", training=training_with(precision=precision, epochs=1)
        )
        loss_by_precision[precision] = train_in_forks(experiment, tmp_path / precision).result.final_loss
    assert loss_by_precision["bf16"] != loss_by_precision["fp32"]
    assert loss_by_precision["bf16"] == pytest.approx(loss_by_precision["fp32"], rel=0.01)
