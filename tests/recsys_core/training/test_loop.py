"""Epochs, validation, early stopping and resuming from a checkpoint: two gloo ranks on an ingested log."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.evaluate import evaluate
from recsys_core.models.history_config import SelfAttentionHistory
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.tables.table_config import DenseOptimizer, TableConfig, TableOptimizer, UnfreezeStep
from recsys_core.sharding.config import TableConstraint
from recsys_core.sharding.plan_file import PlanFile, layout_fingerprint
from recsys_core.training.config import ProfileConfig, TrainingConfig, ValidationConfig
from recsys_core.training.job import CHECKPOINTS_FOLDER
from tests.recsys_core.training.forked_training import (
    DIM,
    MODEL,
    Experiment,
    FinishedTraining,
    checkpoint_of,
    export_in_forks,
    exported,
    generate_dataset,
    make_experiment,
    train_in_forks,
    without_timings,
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
def data(tmp_path_factory):
    return generate_dataset(tmp_path_factory.mktemp("data"))


def training(**settings) -> TrainingConfig:
    return TRAINING.model_copy(update=settings)


def steps_of_epoch(finished_training: FinishedTraining) -> int:
    return finished_training.lines[0].total_steps // TRAINING.epochs


FORGETFUL = MODEL.model_copy(
    update={"learn_temperature": True, "history": MODEL.history.model_copy(update={"item_dropout": 0.2})}
)
REPLICATED = TableConstraint(sharding_types=("data_parallel",))
UNUSUAL = {
    "cross_rank": {
        "model": FORGETFUL,
        "loss": LossConfig(num_negatives=32, cross_rank_negatives=True, mask_negatives="seen"),
        "tables": {"item": TableConfig(transfer="residual", id_dropout=0.3)},
    },
    "sequence": {
        "model": MODEL.model_copy(update={"history": SelfAttentionHistory(length=6, num_heads=2, item_dropout=0.2)}),
        "loss": LossConfig(negatives="all", mask_negatives="seen"),
    },
    "gradual": {
        "tables": {"item": TableConfig(transfer="gradual", unfreeze=(UnfreezeStep(epoch=2, share=0.4),))},
        "training": training(table_optimizer=TableOptimizer(kind="adagrad", gradient_clip_value=1.0, weight_decay=0.01)),
    },
    "replicated": {
        "sharding": dict.fromkeys(("item", "user", "user.groups"), REPLICATED),
        "tables": {
            "item": TableConfig(optimizer=TableOptimizer(kind="adam", learning_rate=0.01, gradient_clip_value=0.5)),
            "user": TableConfig(optimizer=TableOptimizer(kind="adagrad")),
        },
        "training": training(dense_optimizer=DenseOptimizer(kind="adagrad", learning_rate=0.05, gradient_clip_norm=1.0)),
    },
    "sharded layers": {
        "model": MODEL.model_copy(update={"history": MODEL.history.model_copy(update={"pooling": "mean"})}),  # nothing for DDP
        "training": training(dense_parallel="sharded", dense_optimizer=DenseOptimizer(warmup_steps=5, gradient_clip_norm=0.5)),
    },
}
SLOW = ("replicated", "sharded layers")
DRILL = pytest.mark.drill


@pytest.mark.parametrize(
    "settings", [pytest.param(UNUSUAL[name], id=name, marks=DRILL if name in SLOW else ()) for name in UNUSUAL]
)
def test_a_run_that_is_stopped_twice_ends_bit_for_bit_like_an_undisturbed_one(data, settings, tmp_path):
    experiment = make_experiment(data, tmp_path / "plan", **{"training": TRAINING} | settings)
    undisturbed = train_in_forks(experiment, tmp_path / "whole")
    per_epoch = steps_of_epoch(undisturbed)
    for step in (per_epoch - 1, 2 * per_epoch + 1):
        train_in_forks(experiment, tmp_path / "stopped", stops_at=step)
    stopped = train_in_forks(experiment, tmp_path / "stopped")
    assert without_timings(stopped.lines) == without_timings(undisturbed.lines)
    assert stopped.result.model_dump(exclude={"samples_per_s"}) == undisturbed.result.model_dump(exclude={"samples_per_s"})
    assert sum(bool(line.validation) for line in undisturbed.lines) == TRAINING.epochs
    assert 60 <= float((undisturbed.work / "heartbeat").read_text()) < 600  # it follows the measured checkpoints
    expected = export_in_forks(experiment, checkpoint_of(undisturbed), tmp_path / "a")
    resumed = export_in_forks(experiment, checkpoint_of(stopped), tmp_path / "b")
    assert resumed.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)


def with_kernel(experiment: Experiment, kernel: str, folder: Path) -> Experiment:
    """Return the experiment with `kernel` for all tables; on a CPU, FBGEMM keeps the rows in main memory with every kernel."""
    plan = PlanFile.read(experiment.plan.path("plan.json"))
    share = 0.2 if kernel == "fused_uvm_caching" else None
    update = {"compute_kernel": kernel, "cache_load_factor": share}
    tables = {name: table.model_copy(update=update) for name, table in plan.tables.items()}
    fingerprint = layout_fingerprint(tables, device=plan.device, world_size=plan.world_size)
    shutil.copytree(experiment.plan.folder, folder)
    (folder / "plan.json").write_text(plan.model_copy(update={"tables": tables, "fingerprint": fingerprint}).model_dump_json())
    return experiment._replace(plan=experiment.plan.model_copy(update={"folder": folder}))


def test_cached_tables_have_the_same_losses_as_uncached_ones(data, tmp_path):
    experiment = make_experiment(data, tmp_path / "plan", training=training(epochs=2))
    losses = {}
    for kernel in ("fused", "fused_uvm_caching"):
        finished_training = train_in_forks(with_kernel(experiment, kernel, tmp_path / f"plan {kernel}"), tmp_path / kernel)
        losses[kernel] = [line.loss for line in finished_training.lines]
    assert losses["fused"][-1] < losses["fused"][0]
    assert losses["fused_uvm_caching"] == losses["fused"]


def test_training_stops_when_validation_no_longer_improves_and_the_best_epoch_is_the_result(data, tmp_path):
    patient = training(
        epochs=6, validation=ValidationConfig(patience=2), keep_checkpoints=1, table_optimizer=TableOptimizer(warmup_steps=5)
    )
    experiment = make_experiment(data, tmp_path / "plan", training=patient)
    stopped = train_in_forks(experiment, tmp_path / "stopped", scores=[0.1, 0.3, 0.2, 0.3, 0.9, 0.9])
    assert (stopped.result.num_epochs, stopped.result.best_epoch) == (4, 2)  # an equal score is no improvement
    assert stopped.result.validation == {"ndcg@10": 0.3}
    assert [line.validation["ndcg@10"] for line in stopped.lines if line.validation] == [0.1, 0.3, 0.2, 0.3]
    best, last = stopped.result.checkpoint, f"step-{stopped.result.num_steps:09d}"
    assert sorted(path.name for path in (stopped.work / CHECKPOINTS_FOLDER).iterdir()) == [best, last]

    short = experiment._replace(training=patient.model_copy(update={"epochs": 2, "validation": None}))
    two_epochs = train_in_forks(short, tmp_path / "short")
    assert two_epochs.result.best_epoch is None
    expected = export_in_forks(short, checkpoint_of(two_epochs), tmp_path / "a")
    for name, value in export_in_forks(experiment, checkpoint_of(stopped), tmp_path / "b").items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    # A run that had stopped and is started again has nothing left to do.
    assert without_timings(train_in_forks(experiment, stopped.work, scores=[]).lines) == without_timings(stopped.lines)


@pytest.mark.parametrize(("candidates", "prefix"), [("all", "validation"), ("cold", "validation/cold")])
def test_validation_during_training_has_the_metrics_of_the_evaluation_stage(data, candidates, prefix, tmp_path):
    settings = training(epochs=2, validation=ValidationConfig(metric="recall", k=5, candidates=candidates))
    experiment = make_experiment(data, tmp_path / "plan", training=settings)
    finished_training = train_in_forks(experiment, tmp_path / "work")
    export = exported(experiment, finished_training, tmp_path / "export")
    config = EvaluationConfig(ks=(5,))
    metrics = evaluate(config, export=export, dataset=data, folder=tmp_path / "evaluation").metrics
    assert set(finished_training.result.validation) == {"recall@5", "ndcg@5", "hit_rate@5"}
    for name, value in finished_training.result.validation.items():
        assert 0 < value < 1
        assert value == pytest.approx(metrics[f"{prefix}/{name}"], abs=1e-12)


def test_metrics_have_step_times_and_a_profile_is_written_if_configured(data, tmp_path):
    experiment = make_experiment(data, tmp_path / "plan", training=training(profile=ProfileConfig(after_steps=3, steps=2)))
    finished_training = train_in_forks(experiment, tmp_path / "work")
    for line in finished_training.lines:
        assert set(line.ms_per_step) == {"step", "data"}
        assert line.ms_per_step["step"] > line.ms_per_step["data"] >= 0
        assert line.memory_bytes["rss"] > 2**26
    # Every rank looks up its own users and distinct items, and each row is DIM numbers of four bytes.
    first = finished_training.lines[0]
    queries = 2 * TRAINING.log_every_steps * TRAINING.batch_size
    least, most = queries * DIM * 4, queries * 40 * DIM * 4
    assert least < first.embedding_bytes_per_s * queries / first.samples_per_s < most
    for rank in range(2):
        trace = json.loads(gzip.decompress((tmp_path / f"work/profile/rank-{rank}.json.gz").read_bytes()))
        names = {event["name"] for event in trace["traceEvents"]}
        assert any("backward" in name for name in names) and any("all_to_all" in name or "alltoall" in name for name in names)


def test_metrics_have_the_unfrozen_share_of_a_table_in_each_epoch(data, tmp_path):
    steps = (UnfreezeStep(epoch=2, share=0.25), UnfreezeStep(epoch=3, share=1.0))
    tables = {"item": TableConfig(transfer="gradual", unfreeze=steps)}
    finished_training = train_in_forks(
        make_experiment(data, tmp_path / "plan", training=TRAINING, tables=tables), tmp_path / "work"
    )
    assert {(line.epoch, line.unfrozen["item"]) for line in finished_training.lines} == {(1, 0.0), (2, 0.25), (3, 1.0)}


def test_bf16_comes_close_to_fp32(data, tmp_path):
    losses = {}
    for precision in ("fp32", "bf16"):
        experiment = make_experiment(data, tmp_path / f"plan-{precision}", training=training(precision=precision))
        losses[precision] = train_in_forks(experiment, tmp_path / precision).result.final_loss
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)
