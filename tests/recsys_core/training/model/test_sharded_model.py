"""The sharded model, compared with the same model in one process without sharding."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import distributed as dist
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys_core.dataset.batch import Batch
from recsys_core.models.loss.catalogue import catalogue_share
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import EmbeddingTables, table_shards
from recsys_core.models.tables.table_config import DenseOptimizer, TableConfig, TableOptimizer
from recsys_core.sharding.config import QuantizedCommsConfig
from recsys_core.sharding.constraints import UNPOOLED_SHARDING_TYPES
from recsys_core.training.config import TrainingConfig
from recsys_core.training.model.optimizers import LearningRates, make_optimizer
from recsys_core.training.model.sharded_model import EPS, zero_unknown_users
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.training.small_model import (
    FORM_BY_FEATURE,
    ITEM_COUNT_I,
    NUM_USERS,
    make_batch,
    sharded_model,
    small_spec,
    unsharded_task,
)

COLUMN_SHARDING_TYPES = ("column_wise", "table_column_wise", "grid_shard")
SHARDING_TYPES = ("table_wise", "row_wise", "table_row_wise", "data_parallel", *COLUMN_SHARDING_TYPES)
NUM_STEPS, NUM_NEGATIVES = 4, 5
LOSS_TOLERANCE_BY_PRECISION = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 3e-2, "int8": 3e-2}
"""Relative tolerance of a loss, by the precision in which rows are sent between ranks."""


class Case(NamedTuple):
    """A training that is run sharded and unsharded.

    Attributes:
        sharding_type: sharding type of all tables that support it.
        item_sharding_type: sharding type of the item tables if they do not support `sharding_type`.
        feature_names: features of the model.
    """

    sharding_type: str
    loss: LossConfig = LossConfig(num_negatives=NUM_NEGATIVES)
    item_sharding_type: str = "row_wise"
    quantized_comms: QuantizedCommsConfig = QuantizedCommsConfig()
    feature_names: tuple[str, ...] = tuple(FORM_BY_FEATURE)

    @property
    def spec(self) -> ModelSpec:
        # A column shard has at least 128 columns, and int8 needs widths that are multiples of 32.
        dim = 256 if self.sharding_type in COLUMN_SHARDING_TYPES else 32 if self.quantized_comms.forward == "int8" else 8
        user_table = TableConfig() if self.sharding_type in UNPOOLED_SHARDING_TYPES else TableConfig(lookup="pooled")
        tables = {"item": TableConfig(transfer="residual"), "user": user_table, "user.groups": TableConfig(pooling="sum")}
        forms = {name: FORM_BY_FEATURE[name] for name in self.feature_names}
        return small_spec(dim=dim, tables=tables, forms=forms, optimizer=self.training.table_optimizer)

    @property
    def training(self) -> TrainingConfig:
        # Row-wise Adagrad averages over the columns of a shard, so it is a different optimizer if columns are sharded.
        kind = "adagrad" if self.sharding_type in COLUMN_SHARDING_TYPES else "rowwise_adagrad"
        return TrainingConfig(
            epochs=1,
            table_optimizer=TableOptimizer(kind=kind, learning_rate=0.1, warmup_steps=2, lr_decay="linear"),
            dense_optimizer=DenseOptimizer(kind="sgd", learning_rate=0.1, warmup_steps=1, lr_decay="cosine"),
            seed=1,
        )

    def sharding_type_of(self, table: str) -> str:
        is_supported = self.sharding_type in UNPOOLED_SHARDING_TYPES or not self.spec.tables[table].is_unpooled
        return self.sharding_type if is_supported else self.item_sharding_type


def num_queries(step: int) -> int:
    """Return the number of queries of each rank in `step`. The last batch of an epoch is smaller."""
    return 6 - 2 * (step == NUM_STEPS - 1)


def catalogue_share_of(case: Case, *, rank: int, world_size: int) -> NDArray[np.int64] | None:
    """Return the items in the rank's share of the catalogue, or None if negatives are sampled."""
    return catalogue_share(ITEM_COUNT_I, rank=rank, world_size=world_size) if case.loss.negatives == "all" else None


def batch_of(case: Case, *, ranks: list[int], step: int, catalogue_share_C: NDArray[np.int64] | None) -> Batch:
    return make_batch(
        case.spec,
        ranks=ranks,
        step=step,
        num_queries=num_queries(step),
        num_negatives=NUM_NEGATIVES,
        catalogue_share_C=catalogue_share_C,
    )


class ExpectedTraining(NamedTuple):
    """The loss of each step, and the tables and layers after the last step."""

    losses: list[float]
    tables: dict[str, np.ndarray]
    layers: dict[str, np.ndarray]


def train_unsharded(case: Case, *, num_ranks: int) -> ExpectedTraining:
    """Train on the batches of all ranks in one process, with dense gradients and without a process group."""
    spec, config = case.spec, case.training
    task, weight_by_table = unsharded_task(spec, loss=case.loss, seed=config.seed)
    trained_weights = [weight for name, weight in weight_by_table.items() if not spec.tables[name].is_frozen]
    adagrad_class = torch.optim.Adagrad if config.table_optimizer.kind == "adagrad" else RowWiseAdagrad
    adagrad = adagrad_class(trained_weights, eps=EPS)
    sgd = torch.optim.SGD(task.head.parameters())
    losses = []
    for step in range(NUM_STEPS):
        for optimizer, schedule in ((adagrad, config.table_optimizer), (sgd, config.dense_optimizer)):
            optimizer.param_groups[0]["lr"] = schedule.learning_rate * schedule.scale(step, total_steps=NUM_STEPS)
            optimizer.zero_grad()
        # Ranks that share candidates train like one rank with all queries. Other ranks average their losses.
        shares_candidates = case.loss.cross_rank_negatives or case.loss.negatives == "all"
        rank_groups = [list(range(num_ranks))] if shares_candidates else [[rank] for rank in range(num_ranks)]
        whole_catalogue = catalogue_share_of(case, rank=0, world_size=1)
        batches = [batch_of(case, ranks=group, step=step, catalogue_share_C=whole_catalogue) for group in rank_groups]
        mean_loss = torch.stack([task(batch)[0] for batch in batches]).mean()
        mean_loss.backward()
        adagrad.step()
        sgd.step()
        losses.append(mean_loss.item())
    layers = {name: value.numpy() for name, value in task.head.state_dict().items()}
    return ExpectedTraining(losses, {name: weight.detach().numpy() for name, weight in weight_by_table.items()}, layers)


def train_sharded(rank: int, case: Case, expected: ExpectedTraining) -> None:
    """Assert that sharded training steps on this rank give the losses and weights of the unsharded model."""
    world_size, spec, config = dist.get_world_size(), case.spec, case.training
    sharding_type_by_table = {name: case.sharding_type_of(name) for name in spec.tables}
    process = cpu_process(rank)
    model, plan = sharded_model(
        spec,
        sharding_type_by_table=sharding_type_by_table,
        training=config,
        loss=case.loss,
        process=process,
        quantized_comms=case.quantized_comms,
    )
    executed_sharding_by_table = {name: sharding for module in model.plan.plan.values() for name, sharding in module.items()}
    assert {
        name.replace("__", "."): sharding.sharding_type for name, sharding in executed_sharding_by_table.items()
    } == sharding_type_by_table
    if case.sharding_type in COLUMN_SHARDING_TYPES:
        # Each table of the query tower has two column shards.
        assert {len({shard.offset[1] for shard in plan.tables[name].shards}) for name in spec.on_side("query")} == {2}
    optimizer = make_optimizer(model, spec=spec, config=config)
    learning_rates = LearningRates(optimizer, spec=spec, config=config, total_steps=NUM_STEPS)
    pipeline = TrainPipelineSparseDist(model, optimizer, process.device)
    catalogue_share_C = catalogue_share_of(case, rank=rank, world_size=world_size)
    batches = iter([batch_of(case, ranks=[rank], step=step, catalogue_share_C=catalogue_share_C) for step in range(NUM_STEPS)])
    for step in range(NUM_STEPS):
        learning_rates.set_step(step)
        mean_loss = pipeline.progress(batches) / world_size
        dist.all_reduce(mean_loss)
        tolerance = LOSS_TOLERANCE_BY_PRECISION[case.quantized_comms.forward]
        assert mean_loss.item() == pytest.approx(expected.losses[step], rel=tolerance), f"loss of step {step}"
    pipeline.detach()
    if case.quantized_comms != QuantizedCommsConfig():
        assert mean_loss.item() != pytest.approx(expected.losses[-1], rel=1e-6), "nothing was rounded"
        return
    for name, whole_table in expected.tables.items():
        shards = table_shards(model.state_dict(), table=name)
        num_values = torch.tensor(float(sum(shard.weight_RD.numel() for shard in shards)))
        dist.all_reduce(num_values)
        assert num_values == whole_table.size * (world_size if sharding_type_by_table[name] == "data_parallel" else 1)
        for shard in shards:
            num_rows, num_columns = shard.weight_RD.shape
            expected_RC = whole_table[
                shard.first_row : shard.first_row + num_rows, shard.first_column : shard.first_column + num_columns
            ]
            # Adagrad divides a gradient by its magnitude, which enlarges the rounding errors of gradients near zero.
            tolerances = (
                {"rtol": 1e-4, "atol": 1e-6}
                if config.table_optimizer.kind == "rowwise_adagrad"
                else {"rtol": 1e-3, "atol": 1e-4}
            )
            np.testing.assert_allclose(shard.weight_RD.numpy(), expected_RC, **tolerances, err_msg=name)
    for name, value in get_unwrapped_module(model).head.state_dict().items():
        np.testing.assert_allclose(value.numpy(), expected.layers[name], rtol=1e-4, atol=1e-6, err_msg=name)


def assert_equals_unsharded(case: Case, *, world_size: int = 2) -> None:
    """Assert that `world_size` ranks train the same model as one unsharded process."""
    run_ranks(train_sharded, world_size=world_size, arguments=(case, train_unsharded(case, num_ranks=world_size)))


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
def test_two_ranks_train_the_same_tables_and_layers_as_one_unsharded_process(sharding_type):
    assert_equals_unsharded(Case(sharding_type))


@pytest.mark.parametrize("sharding_type", ["row_wise", "column_wise", "grid_shard"])
def test_four_ranks_train_the_same_tables_and_layers_as_one_unsharded_process(sharding_type):
    item_sharding_type = "column_wise" if sharding_type in COLUMN_SHARDING_TYPES else "row_wise"
    assert_equals_unsharded(Case(sharding_type, item_sharding_type=item_sharding_type), world_size=4)


def test_a_rank_that_holds_no_row_of_a_table_collection_trains_with_the_other_ranks():
    # The table of the number has two rows, and no other table is in its collection.
    assert_equals_unsharded(Case("row_wise", feature_names=("user.groups", "user.age")), world_size=3)


@pytest.mark.parametrize(
    ("sharding_type", "forward", "backward"),
    [("row_wise", "fp16", "bf16"), ("table_wise", "bf16", "fp32"), ("table_wise", "int8", "bf16")],
)
def test_rows_sent_in_lower_precision_train_nearly_the_same_model(sharding_type, forward, backward):
    quantized_comms = QuantizedCommsConfig(forward=forward, backward=backward)
    assert_equals_unsharded(Case(sharding_type, item_sharding_type=sharding_type, quantized_comms=quantized_comms))


@pytest.mark.parametrize("kind", ["bce", "bpr", "cosine_contrastive"])
def test_every_loss_is_the_same_sharded_and_unsharded(kind):
    assert_equals_unsharded(Case("row_wise", LossConfig(kind=kind, num_negatives=NUM_NEGATIVES, margin=-0.5)))


def test_ranks_that_share_candidates_train_like_one_rank_with_all_their_queries():
    assert_equals_unsharded(
        Case("table_wise", LossConfig(num_negatives=NUM_NEGATIVES, cross_rank_negatives=True, mask_negatives="seen"))
    )


@pytest.mark.parametrize("mask", ["positive", "seen"])
def test_ranks_with_shares_of_the_catalogue_train_like_one_rank_with_all_items(mask):
    assert_equals_unsharded(Case("row_wise", LossConfig(negatives="all", mask_negatives=mask)))


def test_the_rows_of_unknown_users_become_zero_and_the_rows_of_known_users_are_kept():
    torch.manual_seed(0)
    tables = EmbeddingTables(small_spec(), device=torch.device("cpu"))
    old_weight_RD = tables.get_parameter("unpooled_8.embeddings.user.weight").detach().clone()
    is_known_U = np.arange(NUM_USERS) % 3 > 0
    zero_unknown_users(tables, is_known_U=is_known_U)
    weight_RD = tables.get_parameter("unpooled_8.embeddings.user.weight")
    assert (weight_RD[~is_known_U] == 0).all() and old_weight_RD[~is_known_U].any()
    assert torch.equal(weight_RD[is_known_U], old_weight_RD[is_known_U])
