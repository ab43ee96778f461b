"""Pretrained rows after training with each kind of transfer, on two gloo ranks, for every sharding type."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from recsys_core.dataset.feature_store import UNPOOLED
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import table_shards
from recsys_core.models.tables.table_config import OFFSET_TABLE, DenseOptimizer, TableConfig, TableOptimizer, UnfreezeStep
from recsys_core.training.config import TrainingConfig
from recsys_core.training.model.optimizers import LearningRates, make_optimizer, table_name_of
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.training.small_model import (
    NUM_ITEMS,
    NUM_USERS,
    POPULARITY_RANK_BY_TABLE,
    make_batch,
    pretrained_vectors,
    sharded_model,
    small_spec,
    with_optimizer,
)

SHARDING_TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel")
NUM_STEPS, NUM_QUERIES, NUM_NEGATIVES = 3, 8, 6
"""Steps of an epoch, and queries and sampled negatives of a rank in a step."""
UNFREEZE_STEPS = (UnfreezeStep(epoch=2, share=0.3), UnfreezeStep(epoch=3, share=0.7))
FORM_BY_FEATURE = {"item.genres": "list", "user.groups": "list"}


class TrainedModel(NamedTuple):
    """Tables before and after each epoch of a training, and the optimizer states.

    Attributes:
        tables_by_epoch: whole tables by name, before the first epoch (index 0) and after each epoch.
        state_names_by_table: names of the optimizer states of each table.
    """

    spec: ModelSpec
    tables_by_epoch: list[dict[str, np.ndarray]]
    state_names_by_table: dict[str, list[str]]

    def is_changed(self, table: str, *, epoch: int) -> np.ndarray:
        """Return a mask [R] of the rows that the epoch changed; 1 is the first epoch."""
        table_before_RD, table_after_RD = self.tables_by_epoch[epoch - 1][table], self.tables_by_epoch[epoch][table]
        return (table_before_RD != table_after_RD).any(axis=1)


def training_of(**table_optimizer: object) -> TrainingConfig:
    return TrainingConfig(
        table_optimizer=TableOptimizer(**{"learning_rate": 0.1, "warmup_steps": 0} | table_optimizer),
        dense_optimizer=DenseOptimizer(warmup_steps=0),
        seed=5,
    )


def spec_of(sharding_type: str, **tables: TableConfig) -> ModelSpec:
    """Return a spec whose tables are wide enough for column shards if the sharding type is column_wise."""
    dim = 256 if sharding_type == "column_wise" else 8
    return small_spec(dim=dim, tables=tables, pretrained_tables=("item", "user"), forms=FORM_BY_FEATURE)


def train_rank(rank: int, folder: Path, spec: ModelSpec, sharding_type: str, training: TrainingConfig, num_epochs: int) -> None:
    """Train one rank, and write its shards before the training and after each epoch."""
    process = cpu_process(rank)
    model, _ = sharded_model(
        spec,
        sharding_type_by_table=dict.fromkeys(spec.tables, sharding_type),
        training=training,
        loss=LossConfig(num_negatives=NUM_NEGATIVES),
        process=process,
    )
    optimizer = make_optimizer(model, spec=spec, config=training)
    learning_rates = LearningRates(optimizer, spec=spec, config=training, total_steps=num_epochs * NUM_STEPS)
    pipeline = TrainPipelineSparseDist(model, optimizer, process.device)
    shard_by_key = {}
    for epoch in range(num_epochs + 1):
        if epoch > 0:
            model.train()
            get_unwrapped_module(model).head.set_epoch(epoch)
            steps = range((epoch - 1) * NUM_STEPS, epoch * NUM_STEPS)
            batches = iter(
                [
                    make_batch(spec, ranks=[rank], step=step, num_queries=NUM_QUERIES, num_negatives=NUM_NEGATIVES)
                    for step in steps
                ]
            )
            for step in steps:
                learning_rates.set_step(step)
                pipeline.progress(batches)
            pipeline.detach()
        for name in spec.tables:
            for shard in table_shards(model.state_dict(), table=name):
                shard_by_key[f"{epoch}/{name}/{shard.first_row}/{shard.first_column}"] = shard.weight_RD.numpy().copy()
    np.savez(folder / f"{rank}.npz", **shard_by_key)
    state_names_by_parameter = {name: sorted(state) for name, state in optimizer.state_dict()["state"].items()}
    (folder / f"{rank}.json").write_text(json.dumps(state_names_by_parameter))


def train(
    folder: Path, spec: ModelSpec, *, sharding_type: str, training: TrainingConfig | None = None, num_epochs: int = 1
) -> TrainedModel:
    """Train on two ranks. Return the whole tables before the training (epoch 0) and after each epoch."""
    training = training or training_of()
    spec = with_optimizer(spec, training.table_optimizer)
    run_ranks(train_rank, world_size=2, arguments=(folder, spec, sharding_type, training, num_epochs))
    tables_by_epoch = [
        {name: np.full((table.num_rows, table.dim), np.nan, np.float32) for name, table in spec.tables.items()}
        for _ in range(num_epochs + 1)
    ]
    state_names_by_table: dict[str, list[str]] = {}
    for rank in range(2):
        for key, shard in np.load(folder / f"{rank}.npz").items():
            epoch, name, first_row, first_column = key.split("/")
            row, column = int(first_row), int(first_column)
            tables_by_epoch[int(epoch)][name][row : row + shard.shape[0], column : column + shard.shape[1]] = shard
        for parameter_name, state_names in json.loads((folder / f"{rank}.json").read_text()).items():
            table = table_name_of(parameter_name, spec)
            if table is not None:
                state_names_by_table[table] = state_names
    assert all(np.isfinite(table).all() for tables in tables_by_epoch for table in tables.values())
    return TrainedModel(spec, tables_by_epoch, state_names_by_table)


def lookup_masks(spec: ModelSpec, *, epoch: int) -> dict[str, np.ndarray]:
    """Return masks of the items and users that the batches of an epoch look up, by table."""
    is_looked_up_by_table = {"item": np.zeros(NUM_ITEMS, bool), "user": np.zeros(NUM_USERS, bool)}
    for step in range((epoch - 1) * NUM_STEPS, epoch * NUM_STEPS):
        batch = make_batch(spec, ranks=[0, 1], step=step, num_queries=NUM_QUERIES, num_negatives=NUM_NEGATIVES)
        is_looked_up_by_table["item"][batch.item_row_V] = True
        is_looked_up_by_table["user"][batch.sparse[UNPOOLED]["user"].values()] = True
    return is_looked_up_by_table


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
def test_transfer_frozen_keeps_the_tables_and_needs_no_optimizer_state(sharding_type, tmp_path):
    frozen_table = TableConfig(transfer="frozen")
    trained_model = train(tmp_path, spec_of(sharding_type, item=frozen_table, user=frozen_table), sharding_type=sharding_type)
    for name in ("item", "user"):
        np.testing.assert_array_equal(trained_model.tables_by_epoch[0][name], trained_model.tables_by_epoch[1][name])
        assert not trained_model.state_names_by_table.get(name)
    for name in FORM_BY_FEATURE:
        assert trained_model.is_changed(name, epoch=1).any()
        assert trained_model.state_names_by_table[name]


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
def test_transfer_residual_learns_offsets_that_start_at_zero_and_keeps_the_vectors(sharding_type, tmp_path):
    trained_model = train(tmp_path, spec_of(sharding_type, item=TableConfig(transfer="residual")), sharding_type=sharding_type)
    np.testing.assert_array_equal(trained_model.tables_by_epoch[0]["item"], trained_model.tables_by_epoch[1]["item"])
    assert not trained_model.tables_by_epoch[0][OFFSET_TABLE].any()
    np.testing.assert_array_equal(
        trained_model.is_changed(OFFSET_TABLE, epoch=1), lookup_masks(trained_model.spec, epoch=1)["item"]
    )
    assert not trained_model.state_names_by_table.get("item") and trained_model.state_names_by_table[OFFSET_TABLE]


@pytest.mark.parametrize(
    ("sharding_type", "optimizer_kind"),
    [
        *((sharding_type, "rowwise_adagrad") for sharding_type in SHARDING_TYPES),
        ("row_wise", "adagrad"),
        ("row_wise", "sgd"),
        ("data_parallel", "adam"),
    ],
)
def test_transfer_gradual_trains_the_most_frequent_rows_first(sharding_type, optimizer_kind, tmp_path):
    gradual_table = TableConfig(transfer="gradual", unfreeze=UNFREEZE_STEPS)
    spec = spec_of(sharding_type, item=gradual_table, user=gradual_table)
    trained_model = train(tmp_path, spec, sharding_type=sharding_type, training=training_of(kind=optimizer_kind), num_epochs=3)
    for name, popularity_rank_R in POPULARITY_RANK_BY_TABLE.items():
        for epoch, unfrozen_share in ((1, 0.0), (2, 0.3), (3, 0.7)):
            is_trained_R = popularity_rank_R < round(unfrozen_share * len(popularity_rank_R))
            is_looked_up_R = lookup_masks(spec, epoch=epoch)[name]
            assert (is_trained_R & is_looked_up_R).any() == (unfrozen_share > 0) and (~is_trained_R & is_looked_up_R).any()
            initial_table, table = trained_model.tables_by_epoch[0][name], trained_model.tables_by_epoch[epoch][name]
            np.testing.assert_array_equal(table[~is_trained_R], initial_table[~is_trained_R])
            is_changed_R = trained_model.is_changed(name, epoch=epoch)
            assert is_changed_R[is_trained_R & is_looked_up_R].all()
            if optimizer_kind != "adam":  # the momentum of Adam also changes rows that only earlier steps have looked up
                np.testing.assert_array_equal(is_changed_R, is_trained_R & is_looked_up_R)


def test_transfer_full_trains_exactly_the_rows_that_are_looked_up(tmp_path):
    trained_model = train(tmp_path, spec_of("table_wise"), sharding_type="table_wise")
    for name, is_looked_up_R in lookup_masks(trained_model.spec, epoch=1).items():
        np.testing.assert_array_equal(trained_model.is_changed(name, epoch=1), is_looked_up_R)


@pytest.mark.parametrize("sharding_type", ["row_wise", "data_parallel"])
def test_a_table_with_its_own_smaller_learning_rate_changes_less(sharding_type, tmp_path):
    optimizer = TableOptimizer(learning_rate=0.001, warmup_steps=0)
    # The first step of Adagrad changes a row by the learning rate: by 0.001 in the item table, and by 0.1 in the other tables.
    trained_model = train(tmp_path, spec_of(sharding_type, item=TableConfig(optimizer=optimizer)), sharding_type=sharding_type)
    tables_before, tables_after = trained_model.tables_by_epoch
    largest_change_by_table = {
        name: np.abs(tables_after[name] - tables_before[name]).max() for name in ("item", "user", "item.genres")
    }
    assert largest_change_by_table["item"] < 0.02 * min(largest_change_by_table["user"], largest_change_by_table["item.genres"])


@pytest.mark.parametrize("sharding_type", ["row_wise", "data_parallel"])
def test_weight_decay_pulls_only_the_rows_of_a_step_towards_zero(sharding_type, tmp_path):
    strong_decay = 30.0
    norm_by_table_and_decay = {}
    for weight_decay in (0.0, strong_decay):
        optimizer = TableOptimizer(kind="sgd", learning_rate=0.01, warmup_steps=0, weight_decay=weight_decay)
        folder = tmp_path / str(weight_decay)
        folder.mkdir()
        trained_model = train(
            folder,
            spec_of(sharding_type, user=TableConfig(optimizer=optimizer), item=TableConfig(optimizer=optimizer)),
            sharding_type=sharding_type,
        )
        for name, is_looked_up_R in lookup_masks(trained_model.spec, epoch=1).items():
            np.testing.assert_array_equal(trained_model.is_changed(name, epoch=1), is_looked_up_R)
            norm_by_table_and_decay[name, weight_decay] = np.linalg.norm(trained_model.tables_by_epoch[1][name][is_looked_up_R])
    assert norm_by_table_and_decay["user", strong_decay] < 0.95 * norm_by_table_and_decay["user", 0.0]
    assert norm_by_table_and_decay["item", strong_decay] < 0.95 * norm_by_table_and_decay["item", 0.0]


@pytest.mark.parametrize("sharding_type", ["row_wise", "data_parallel"])
def test_gradient_clipping_bounds_the_change_of_a_step(sharding_type, tmp_path):
    clip_value, learning_rate = 0.001, 0.5
    clipping_optimizer = TableOptimizer(kind="sgd", learning_rate=learning_rate, warmup_steps=0, gradient_clip_value=clip_value)
    optimizer_without_clipping = clipping_optimizer.model_copy(update={"gradient_clip_value": None})
    trained_model = train(
        tmp_path,
        spec_of(
            sharding_type,
            item=TableConfig(optimizer=clipping_optimizer),
            user=TableConfig(optimizer=optimizer_without_clipping),
        ),
        sharding_type=sharding_type,
    )
    tables_before, tables_after = trained_model.tables_by_epoch
    largest_change_by_table = {name: np.abs(tables_after[name] - tables_before[name]).max() for name in ("item", "user")}
    # A fused kernel clips the gradient of each lookup. In a step, each of the two ranks looks up an item at most once.
    num_clipped_gradients = NUM_STEPS * (1 if sharding_type == "data_parallel" else 2)
    largest_allowed_change = num_clipped_gradients * learning_rate * clip_value
    assert 0 < largest_change_by_table["item"] <= largest_allowed_change * (1 + 1e-5)
    assert largest_change_by_table["user"] > largest_allowed_change


def test_missing_vector_init_sets_the_initial_values_of_rows_without_a_vector(tmp_path):
    tables = {"item": TableConfig(missing_vector_init="zero"), "user": TableConfig(missing_vector_init="mean", rescale=False)}
    spec = spec_of("row_wise", **tables)
    initial_tables = train(tmp_path, spec, sharding_type="row_wise", num_epochs=0).tables_by_epoch[0]
    pretrained_by_table = pretrained_vectors(spec)
    item_RD, item_has_vector_R = initial_tables["item"], pretrained_by_table["item"].vector_row >= 0
    assert not item_RD[~item_has_vector_R].any() and item_RD[item_has_vector_R].all()
    user_RD, user_vector_row_R = initial_tables["user"], pretrained_by_table["user"].vector_row
    user_has_vector_R = user_vector_row_R >= 0
    vector_RD = pretrained_by_table["user"].vectors[user_vector_row_R[user_has_vector_R]]
    np.testing.assert_array_equal(user_RD[user_has_vector_R], vector_RD)
    mean_RD = np.broadcast_to(vector_RD.mean(axis=0), user_RD[~user_has_vector_R].shape)
    np.testing.assert_allclose(user_RD[~user_has_vector_R], mean_RD, atol=1e-6)
