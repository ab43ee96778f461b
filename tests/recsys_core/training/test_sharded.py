"""The sharded model against the same model on one process without TorchRec's distributed part."""

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_core.data.batch import Batch
from recsys_core.models.config import LossConfig, ModelSpec, TwoTowerConfig
from recsys_core.models.pretrained import fill_random
from recsys_core.models.shards import LocalShard, table_shards
from recsys_core.models.task import RetrievalTask
from recsys_core.models.two_tower import embedding_configs
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.planner import make_plan
from recsys_core.training.config import TrainingConfig
from recsys_core.training.distributed import ADAGRAD_EPS, build_model
from recsys_core.training.optimizers import Warmup, make_optimizer
from recsys_core.training.process import Process
from tests.gloo import run_ranks

KINDS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard", "data_parallel")
SPEC = ModelSpec(config=TwoTowerConfig(user_id=True, embedding_dim=8, query_layers=(8,)), users=50, items=41)
CONFIG = TrainingConfig(table_learning_rate=0.1, dense_learning_rate=0.01, warmup_steps=2, seed=1)
COUNTS = np.arange(1, SPEC.items + 1)
STEPS, QUERIES, NEGATIVES = 4, 6, 3


def make_batch(rank: int, step: int) -> Batch:
    """B queries with histories of 0 to 4 items, N extra candidates; the last step has a smaller batch."""
    rng = np.random.default_rng(step * 10 + rank)
    count = QUERIES - (step == STEPS - 1)
    histories, extra = rng.integers(0, 5, count), np.zeros(NEGATIVES, np.int64)
    lengths = [
        np.r_[np.ones(count, int), extra],
        np.r_[histories, extra],
        np.r_[histories > 0, extra],
        np.ones(count + NEGATIVES),
    ]
    values = [rng.integers(0, SPEC.users, count)] + [rng.integers(0, SPEC.items, int(n.sum())) for n in lengths[1:]]
    return Batch(
        sparse=KeyedJaggedTensor(
            keys=["user", "history", "last_item", "item"],
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
        ),
        batch_size=count,
        item_rows=torch.from_numpy(values[3]),
    )


def train_unsharded(loss: LossConfig, *, ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and tables after STEPS on the batches of all ranks, in one process with dense gradients."""
    torch.manual_seed(CONFIG.seed)
    task = RetrievalTask(
        SPEC, loss=loss, item_probability_I=torch.from_numpy(COUNTS / COUNTS.sum()).float(), device=torch.device("cpu")
    )
    task.embeddings = EmbeddingBagCollection(tables=embedding_configs(SPEC))
    tables = {name: task.embeddings.embedding_bags[name].weight for name in SPEC.tables}
    with torch.no_grad():
        for name, weight in tables.items():
            fill_random(LocalShard(0, 0, weight), table=name, dim=weight.shape[1], seed=CONFIG.seed)
    adagrad = RowWiseAdagrad(tables.values(), lr=CONFIG.table_learning_rate, eps=ADAGRAD_EPS)
    adam = torch.optim.Adam(task.head.parameters(), lr=CONFIG.dense_learning_rate)
    losses = []
    for step in range(STEPS):
        scale = min(1.0, (step + 1) / (CONFIG.warmup_steps + 1))
        adagrad.param_groups[0]["lr"] = CONFIG.table_learning_rate * scale
        adam.param_groups[0]["lr"] = CONFIG.dense_learning_rate * scale
        adagrad.zero_grad()
        adam.zero_grad()
        mean = torch.stack([task(make_batch(rank, step))[0] for rank in range(ranks)]).mean()
        mean.backward()
        adagrad.step()
        adam.step()
        losses.append(mean.item())
    return losses, {name: weight.detach() for name, weight in tables.items()}


def train_sharded(rank: int, kind: str, loss: LossConfig) -> None:
    ranks = dist.get_world_size()
    constraint = TableConstraint(sharding_types=(kind,))
    sharding = ShardingConfig(
        cluster=ClusterConfig(device="cpu", processes_per_node=ranks), tables=dict.fromkeys(SPEC.tables, constraint)
    )
    plan = make_plan(sharding, model=SPEC, batch_size=QUERIES)
    process = Process(rank=rank, world_size=ranks, device=torch.device("cpu"))
    model = build_model(
        SPEC,
        loss=loss,
        item_count_I=COUNTS,
        plan=plan,
        process=process,
        table_learning_rate=CONFIG.table_learning_rate,
        seed=CONFIG.seed,
    )
    executed = {name: table.sharding_type for name, table in model.plan.plan["embeddings"].items()}
    assert executed == dict.fromkeys(SPEC.tables, kind)
    optimizer = make_optimizer(model, config=CONFIG)
    warmup = Warmup(optimizer, steps=CONFIG.warmup_steps)
    pipeline = TrainPipelineSparseDist(model, optimizer, process.device)
    batches = iter([make_batch(rank, step) for step in range(STEPS)])
    expected_losses, expected_tables = train_unsharded(loss, ranks=ranks)
    for step in range(STEPS):
        warmup.set_step(step)
        mean = pipeline.progress(batches) / ranks
        dist.all_reduce(mean)
        assert mean.item() == pytest.approx(expected_losses[step], rel=1e-5)
    for name, expected in expected_tables.items():
        for shard in table_shards(model.state_dict(), table=name):
            rows, columns = shard.weight_RC.shape
            part = expected[shard.row : shard.row + rows, shard.column : shard.column + columns]
            torch.testing.assert_close(shard.weight_RC, part, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_the_same_tables_as_one_unsharded_process(kind):
    run_ranks(train_sharded, world_size=2, arguments=(kind, LossConfig()))


@pytest.mark.parametrize("kind", ["row_wise", "grid_shard"])
def test_four_ranks_train_the_same_tables_as_one_unsharded_process(kind):
    run_ranks(train_sharded, world_size=4, arguments=(kind, LossConfig()))


def test_bce_is_the_same_sharded_and_unsharded():
    run_ranks(train_sharded, world_size=2, arguments=("row_wise", LossConfig(kind="bce")))
