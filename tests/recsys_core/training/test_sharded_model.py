"""The sharded model compared with the same model on one process without distributed TorchRec."""

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
from recsys_core.launching.rank import Process
from recsys_core.models.loss.catalogue import catalogue_share
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import EmbeddingTables, table_shards
from recsys_core.models.tables.table_config import DenseOptimizer, TableConfig, TableOptimizer
from recsys_core.sharding.config import QuantizedCommsConfig
from recsys_core.sharding.constraints import UNPOOLED_SHARDING_TYPES
from recsys_core.training.config import TrainingConfig
from recsys_core.training.optimizers import LearningRates, make_optimizer
from recsys_core.training.sharded_model import EPS, zero_unknown_users
from tests.gloo import run_ranks
from tests.recsys_core.training.small_model import COUNTS, NUM_USERS, make_batch, plain_task, sharded_model, small_spec

COLUMN_KINDS = ("column_wise", "table_column_wise", "grid_shard")
KINDS = ("table_wise", "row_wise", "table_row_wise", "data_parallel", *COLUMN_KINDS)
NUM_STEPS, NUM_NEGATIVES = 4, 5
ROUNDING = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 3e-2, "int8": 3e-2}
"""Tolerance of a loss, by the precision in which rows are sent between ranks."""


class Case(NamedTuple):
    """kind: sharding type of the query tables, and of the item tables that support it; otherwise they have `item_kind`."""

    kind: str
    loss: LossConfig = LossConfig(num_negatives=NUM_NEGATIVES)
    item_kind: str = "row_wise"
    quantized_comms: QuantizedCommsConfig = QuantizedCommsConfig()

    @property
    def spec(self) -> ModelSpec:
        # TorchRec splits columns from 128 on.
        dim = 256 if self.kind in COLUMN_KINDS else 32 if self.quantized_comms.forward == "int8" else 8
        user = TableConfig() if self.kind in UNPOOLED_SHARDING_TYPES else TableConfig(lookup="pooled")
        tables = {"item": TableConfig(transfer="residual"), "user": user, "user.groups": TableConfig(pooling="sum")}
        return small_spec(dim=dim, tables=tables, optimizer=self.training.table_optimizer)

    @property
    def training(self) -> TrainingConfig:
        # Row-wise Adagrad takes the mean over the columns of a shard: split by columns it is another optimizer.
        kind = "adagrad" if self.kind in COLUMN_KINDS else "rowwise_adagrad"
        return TrainingConfig(
            epochs=1,
            table_optimizer=TableOptimizer(kind=kind, learning_rate=0.1, warmup_steps=2, lr_decay="linear"),
            dense_optimizer=DenseOptimizer(kind="sgd", learning_rate=0.1, warmup_steps=1, lr_decay="cosine"),
            seed=1,
        )

    def kind_of(self, table: str) -> str:
        by_row = self.spec.tables[table].is_unpooled
        return self.item_kind if by_row and self.kind not in UNPOOLED_SHARDING_TYPES else self.kind


def queries(step: int) -> int:
    """Return the number of queries of a rank in `step`; the last batch of an epoch is smaller."""
    return 6 - 2 * (step == NUM_STEPS - 1)


def share_of(case: Case, *, rank: int, world_size: int) -> NDArray[np.int64] | None:
    """Return the rank's share of the catalogue; None if negatives are sampled."""
    return catalogue_share(COUNTS, rank=rank, world_size=world_size) if case.loss.negatives == "all" else None


def batch_of(case: Case, *, ranks: list[int], step: int, share: NDArray[np.int64] | None) -> Batch:
    return make_batch(case.spec, ranks=ranks, step=step, queries=queries(step), negatives=NUM_NEGATIVES, share=share)


class Expected(NamedTuple):
    """Losses of all steps; tables and layers after the last step."""

    losses: list[float]
    tables: dict[str, np.ndarray]
    layers: dict[str, np.ndarray]


def train_plain(case: Case, *, ranks: int) -> Expected:
    """Train NUM_STEPS on the batches of all ranks in one process, with dense gradients and without a process group."""
    spec, config = case.spec, case.training
    task, tables = plain_task(spec, loss=case.loss, seed=config.seed)
    trained = [weight for name, weight in tables.items() if not spec.tables[name].is_frozen]
    adagrad = (torch.optim.Adagrad if config.table_optimizer.kind == "adagrad" else RowWiseAdagrad)(trained, eps=EPS)
    sgd = torch.optim.SGD(task.head.parameters())
    losses = []
    for step in range(NUM_STEPS):
        for optimizer, schedule in ((adagrad, config.table_optimizer), (sgd, config.dense_optimizer)):
            optimizer.param_groups[0]["lr"] = schedule.learning_rate * schedule.scale(step, total_steps=NUM_STEPS)
            optimizer.zero_grad()
        # Ranks that share candidates equal one rank with all their queries; otherwise their losses are averaged.
        shares_candidates = case.loss.cross_rank_negatives or case.loss.negatives == "all"
        groups = [list(range(ranks))] if shares_candidates else [[rank] for rank in range(ranks)]
        batches = [batch_of(case, ranks=group, step=step, share=share_of(case, rank=0, world_size=1)) for group in groups]
        mean = torch.stack([task(batch)[0] for batch in batches]).mean()
        mean.backward()
        adagrad.step()
        sgd.step()
        losses.append(mean.item())
    layers = {name: value.numpy() for name, value in task.head.state_dict().items()}
    return Expected(losses, {name: weight.detach().numpy() for name, weight in tables.items()}, layers)


def train_sharded(rank: int, case: Case, expected: Expected) -> None:
    ranks, spec, config = dist.get_world_size(), case.spec, case.training
    kinds = {name: case.kind_of(name) for name in spec.tables}
    process = Process(rank=rank, world_size=ranks, device=torch.device("cpu"))
    model, plan = sharded_model(
        spec, kinds=kinds, training=config, loss=case.loss, process=process, quantized_comms=case.quantized_comms
    )
    executed = {name: table for module in model.plan.plan.values() for name, table in module.items()}
    assert {name.replace("__", "."): table.sharding_type for name, table in executed.items()} == kinds
    if case.kind in COLUMN_KINDS:
        assert {len({shard.offset[1] for shard in plan.tables[name].shards}) for name in spec.on_side("query")} == {2}
    optimizer = make_optimizer(model, spec=spec, config=config)
    rates = LearningRates(optimizer, spec=spec, config=config, total_steps=NUM_STEPS)
    pipeline = TrainPipelineSparseDist(model, optimizer, process.device)
    share = share_of(case, rank=rank, world_size=ranks)
    batches = iter([batch_of(case, ranks=[rank], step=step, share=share) for step in range(NUM_STEPS)])
    for step in range(NUM_STEPS):
        rates.set_step(step)
        mean = pipeline.progress(batches) / ranks
        dist.all_reduce(mean)
        error = "loss of step " + str(step)
        assert mean.item() == pytest.approx(expected.losses[step], rel=ROUNDING[case.quantized_comms.forward]), error
    pipeline.detach()
    if case.quantized_comms != QuantizedCommsConfig():
        assert mean.item() != pytest.approx(expected.losses[step], rel=1e-6), "nothing was rounded"
        return
    for name, whole_table in expected.tables.items():
        shards = table_shards(model.state_dict(), table=name)
        num_values = torch.tensor(float(sum(shard.weight_RD.numel() for shard in shards)))
        dist.all_reduce(num_values)
        assert num_values == whole_table.size * (ranks if kinds[name] == "data_parallel" else 1)
        for shard in shards:
            rows, columns = shard.weight_RD.shape
            part = whole_table[shard.row : shard.row + rows, shard.column : shard.column + columns]
            # Adagrad turns the rounding of a gradient near zero into a part of a whole step.
            far = (
                {"rtol": 1e-4, "atol": 1e-6}
                if config.table_optimizer.kind == "rowwise_adagrad"
                else {"rtol": 1e-3, "atol": 1e-4}
            )
            np.testing.assert_allclose(shard.weight_RD.numpy(), part, **far, err_msg=name)
    for name, value in get_unwrapped_module(model).head.state_dict().items():
        np.testing.assert_allclose(value.numpy(), expected.layers[name], rtol=1e-4, atol=1e-6, err_msg=name)


def check(case: Case, *, world_size: int = 2) -> None:
    run_ranks(train_sharded, world_size=world_size, arguments=(case, train_plain(case, ranks=world_size)))


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_the_same_tables_and_layers_as_one_unsharded_process(kind):
    check(Case(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_train_the_same_tables_and_layers_as_one_unsharded_process(kind):
    check(Case(kind, item_kind="column_wise" if kind in COLUMN_KINDS else "row_wise"), world_size=4)


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [("row_wise", "fp16", "bf16"), ("table_wise", "bf16", "fp32"), ("table_wise", "int8", "bf16")],
)
def test_rows_sent_in_lower_precision_train_nearly_the_same_model(kind, forward, backward):
    check(Case(kind, item_kind=kind, quantized_comms=QuantizedCommsConfig(forward=forward, backward=backward)))


@pytest.mark.parametrize("kind", ["bce", "bpr", "cosine_contrastive"])
def test_every_loss_is_the_same_sharded_and_unsharded(kind):
    check(Case("row_wise", LossConfig(kind=kind, num_negatives=NUM_NEGATIVES, margin=-0.5)))


def test_ranks_that_share_candidates_are_one_rank_with_all_their_queries():
    check(Case("table_wise", LossConfig(num_negatives=NUM_NEGATIVES, cross_rank_negatives=True, mask_negatives="seen")))


@pytest.mark.parametrize("mask", ["positive", "seen"])
def test_ranks_with_a_share_of_the_catalogue_each_are_one_rank_with_all_queries_and_items(mask):
    check(Case("row_wise", LossConfig(negatives="all", mask_negatives=mask)))


def test_the_rows_of_unknown_users_are_zero_and_the_others_are_kept():
    torch.manual_seed(0)
    tables = EmbeddingTables(small_spec(), device=torch.device("cpu"))
    before_RD = tables.get_parameter("unpooled_8.embeddings.user.weight").detach().clone()
    is_known_U = np.arange(NUM_USERS) % 3 > 0
    zero_unknown_users(tables, is_known_U=is_known_U)
    after_RD = tables.get_parameter("unpooled_8.embeddings.user.weight")
    assert (after_RD[~is_known_U] == 0).all() and before_RD[~is_known_U].any()
    assert torch.equal(after_RD[is_known_U], before_RD[is_known_U])
