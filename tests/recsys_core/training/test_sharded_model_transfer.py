"""Pretrained rows after training with each kind of transfer, on two gloo ranks, for every sharding type."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from recsys_core.dataset.feature_store import UNPOOLED
from recsys_core.launching.rank import Process
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import table_shards
from recsys_core.models.tables.table_config import OFFSET_TABLE, DenseOptimizer, TableConfig, TableOptimizer, UnfreezeStep
from recsys_core.training.config import TrainingConfig
from recsys_core.training.optimizers import LearningRates, make_optimizer, table_name_of
from tests.gloo import run_ranks
from tests.recsys_core.training.small_model import (
    NUM_ITEMS,
    NUM_USERS,
    RANKS,
    make_batch,
    pretrained_of,
    sharded_model,
    small_spec,
    with_optimizer,
)

KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
NUM_STEPS, NUM_QUERIES, NUM_NEGATIVES = 3, 8, 6
"""Steps of an epoch; queries and negatives of a rank in a step."""
STAGES = (UnfreezeStep(epoch=2, share=0.3), UnfreezeStep(epoch=3, share=0.7))
SOME_FORMS = {"item.genres": "list", "user.groups": "list"}


class Run(NamedTuple):
    """Result of a training. tables: each table before the first epoch and after each; state: names of optimizer states."""

    spec: ModelSpec
    tables: list[dict[str, np.ndarray]]
    state: dict[str, list[str]]

    def moved(self, table: str, *, epoch: int) -> np.ndarray:
        """Return a mask of the rows that the epoch changed. epoch: counted from 1."""
        before, after = self.tables[epoch - 1][table], self.tables[epoch][table]
        return (before != after).any(axis=1)


def training_of(**table_optimizer: object) -> TrainingConfig:
    return TrainingConfig(
        table_optimizer=TableOptimizer(**{"learning_rate": 0.1, "warmup_steps": 0} | table_optimizer),
        dense_optimizer=DenseOptimizer(warmup_steps=0),
        seed=5,
    )


def spec_of(kind: str, **settings: TableConfig) -> ModelSpec:
    """Return a spec for the sharding type `kind`; for column_wise its dim is large enough to be split."""
    dim = 256 if kind == "column_wise" else 8
    return small_spec(dim=dim, tables=settings, vectors=("item", "user"), forms=SOME_FORMS)


def train_rank(rank: int, folder: Path, spec: ModelSpec, kind: str, training: TrainingConfig, epochs: int) -> None:
    process = Process(rank=rank, world_size=2, device=torch.device("cpu"))
    kinds = dict.fromkeys(spec.tables, kind)
    model, _ = sharded_model(
        spec, kinds=kinds, training=training, loss=LossConfig(num_negatives=NUM_NEGATIVES), process=process
    )
    optimizer = make_optimizer(model, spec=spec, config=training)
    rates = LearningRates(optimizer, spec=spec, config=training, total_steps=epochs * NUM_STEPS)
    pipeline = TrainPipelineSparseDist(model, optimizer, process.device)
    shard_by_name = {}
    for epoch in range(epochs + 1):
        if epoch:
            model.train()
            get_unwrapped_module(model).head.set_epoch(epoch)
            steps = range((epoch - 1) * NUM_STEPS, epoch * NUM_STEPS)
            batches = iter(
                [make_batch(spec, ranks=[rank], step=step, queries=NUM_QUERIES, negatives=NUM_NEGATIVES) for step in steps]
            )
            for step in steps:
                rates.set_step(step)
                pipeline.progress(batches)
            pipeline.detach()
        for name in spec.tables:
            for shard in table_shards(model.state_dict(), table=name):
                shard_by_name[f"{epoch}/{name}/{shard.row}/{shard.column}"] = shard.weight_RD.numpy().copy()
    np.savez(folder / f"{rank}.npz", **shard_by_name)
    state = {name: sorted(value) for name, value in optimizer.state_dict()["state"].items()}
    (folder / f"{rank}.json").write_text(json.dumps(state))


def train(folder: Path, spec: ModelSpec, *, kind: str, training: TrainingConfig | None = None, epochs: int = 1) -> Run:
    training = training or training_of()
    spec = with_optimizer(spec, training.table_optimizer)
    run_ranks(train_rank, world_size=2, arguments=(folder, spec, kind, training, epochs))
    tables = [
        {name: np.full((table.num_rows, table.dim), np.nan, np.float32) for name, table in spec.tables.items()}
        for _ in range(epochs + 1)
    ]
    state: dict[str, list[str]] = {}
    for rank in range(2):
        for key, part in np.load(folder / f"{rank}.npz").items():
            epoch, name, row, column = key.split("/")
            rows, columns = part.shape
            tables[int(epoch)][name][int(row) : int(row) + rows, int(column) : int(column) + columns] = part
        for name, state_names in json.loads((folder / f"{rank}.json").read_text()).items():
            table = table_name_of(name, spec)
            if table is not None:
                state[table] = state_names
    assert all(np.isfinite(table).all() for epoch in tables for table in epoch.values())
    return Run(spec, tables, state)


def looked_up(spec: ModelSpec, *, epoch: int) -> dict[str, np.ndarray]:
    """Return the items and users in the batches of an epoch on both ranks."""
    is_used = {"item": np.zeros(NUM_ITEMS, bool), "user": np.zeros(NUM_USERS, bool)}
    for step in range((epoch - 1) * NUM_STEPS, epoch * NUM_STEPS):
        batch = make_batch(spec, ranks=[0, 1], step=step, queries=NUM_QUERIES, negatives=NUM_NEGATIVES)
        is_used["item"][batch.item_row_V] = True
        is_used["user"][batch.sparse[UNPOOLED]["user"].values()] = True
    return is_used


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_tables_stay_as_they_are_and_have_no_optimizer_state(kind, tmp_path):
    frozen = TableConfig(transfer="frozen")
    run = train(tmp_path, spec_of(kind, item=frozen, user=frozen), kind=kind)
    for name in ("item", "user"):
        np.testing.assert_array_equal(run.tables[0][name], run.tables[1][name])
        assert not run.state.get(name)
    for name in SOME_FORMS:
        assert run.moved(name, epoch=1).any()
        assert run.state[name]


@pytest.mark.parametrize("kind", KINDS)
def test_residual_learns_offsets_from_zero_next_to_frozen_vectors(kind, tmp_path):
    run = train(tmp_path, spec_of(kind, item=TableConfig(transfer="residual")), kind=kind)
    np.testing.assert_array_equal(run.tables[0]["item"], run.tables[1]["item"])
    assert not run.tables[0][OFFSET_TABLE].any()
    np.testing.assert_array_equal(run.moved(OFFSET_TABLE, epoch=1), looked_up(run.spec, epoch=1)["item"])
    assert not run.state.get("item") and run.state[OFFSET_TABLE]


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [*((kind, "rowwise_adagrad") for kind in KINDS), ("row_wise", "adagrad"), ("row_wise", "sgd"), ("data_parallel", "adam")],
)
def test_gradual_trains_the_most_frequent_rows_first_and_leaves_the_others_unchanged(kind, optimizer, tmp_path):
    gradual = TableConfig(transfer="gradual", unfreeze=STAGES)
    spec = spec_of(kind, item=gradual, user=gradual)
    run = train(tmp_path, spec, kind=kind, training=training_of(kind=optimizer), epochs=3)
    for name, rank in RANKS.items():
        for epoch, share in ((1, 0.0), (2, 0.3), (3, 0.7)):
            trained = rank < round(share * len(rank))
            seen = looked_up(spec, epoch=epoch)[name]
            assert (trained & seen).any() == (share > 0) and (~trained & seen).any()
            np.testing.assert_array_equal(run.tables[epoch][name][~trained], run.tables[0][name][~trained])
            moved = run.moved(name, epoch=epoch)
            assert moved[trained & seen].all()
            if optimizer != "adam":  # its momentum also moves the rows of earlier steps
                np.testing.assert_array_equal(moved, trained & seen)


def test_full_trains_every_row_that_is_looked_up(tmp_path):
    run = train(tmp_path, spec_of("table_wise"), kind="table_wise")
    for name, seen in looked_up(run.spec, epoch=1).items():
        np.testing.assert_array_equal(run.moved(name, epoch=1), seen)


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_a_table_with_a_smaller_learning_rate_of_its_own_moves_less(kind, tmp_path):
    slow = TableOptimizer(learning_rate=0.001, warmup_steps=0)
    # The first step of Adagrad moves a row by the learning rate for any gradient.
    run = train(tmp_path, spec_of(kind, item=TableConfig(optimizer=slow)), kind=kind)
    step = {name: np.abs(run.tables[1][name] - run.tables[0][name]).max() for name in ("item", "user", "item.genres")}
    assert step["item"] < 0.02 * min(step["user"], step["item.genres"])


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_weight_decay_pulls_the_rows_of_a_step_towards_zero_and_no_others(kind, tmp_path):
    strength, rate = 30.0, 0.01
    norms = {}
    for decay in (0.0, strength):
        optimizer = TableOptimizer(kind="sgd", learning_rate=rate, warmup_steps=0, weight_decay=decay)
        folder = tmp_path / str(decay)
        folder.mkdir()
        run = train(
            folder, spec_of(kind, user=TableConfig(optimizer=optimizer), item=TableConfig(optimizer=optimizer)), kind=kind
        )
        for name, seen in looked_up(run.spec, epoch=1).items():
            np.testing.assert_array_equal(run.moved(name, epoch=1), seen)
            norms[name, decay] = np.linalg.norm(run.tables[1][name][seen])
    assert norms["user", strength] < 0.95 * norms["user", 0.0]
    assert norms["item", strength] < 0.95 * norms["item", 0.0]


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_gradient_clipping_bounds_the_change_of_a_step(kind, tmp_path):
    limit, rate = 0.001, 0.5
    clipped = TableOptimizer(kind="sgd", learning_rate=rate, warmup_steps=0, gradient_clip_value=limit)
    free = clipped.model_copy(update={"gradient_clip_value": None})
    run = train(tmp_path, spec_of(kind, item=TableConfig(optimizer=clipped), user=TableConfig(optimizer=free)), kind=kind)
    step = {name: np.abs(run.tables[1][name] - run.tables[0][name]).max() for name in ("item", "user")}
    # A fused kernel clips the gradient of each lookup, of which a step has one per rank and distinct item.
    bound = NUM_STEPS * rate * limit * (1 if kind == "data_parallel" else 2)
    assert 0 < step["item"] <= bound * (1 + 1e-5)
    assert step["user"] > bound


def test_rows_without_a_vector_start_as_the_table_says(tmp_path):
    settings = {"item": TableConfig(missing_vector_init="zero"), "user": TableConfig(missing_vector_init="mean", rescale=False)}
    spec = spec_of("row_wise", **settings)
    start = train(tmp_path, spec, kind="row_wise", epochs=0).tables[0]
    vectors = pretrained_of(spec)
    lacks_vector = {name: vectors[name].vector_row < 0 for name in vectors}
    assert not start["item"][lacks_vector["item"]].any() and start["item"][~lacks_vector["item"]].all()
    user = vectors["user"].vectors[vectors["user"].vector_row]
    np.testing.assert_array_equal(start["user"][~lacks_vector["user"]], user[~lacks_vector["user"]])
    mean = user[~lacks_vector["user"]].mean(axis=0)
    np.testing.assert_allclose(start["user"][lacks_vector["user"]], np.tile(mean, (lacks_vector["user"].sum(), 1)), atol=1e-6)
