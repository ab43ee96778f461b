"""One batch split over one, two or four ranks gives the same losses, tables and layers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import distributed as dist
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from recsys_core.dataset.batch import Batch
from recsys_core.launching.rank import Process
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import table_shards
from recsys_core.models.tables.table_config import DenseOptimizer, TableConfig, TableOptimizer
from recsys_core.training.config import TrainingConfig
from recsys_core.training.optimizers import make_optimizer
from tests.gloo import run_ranks
from tests.recsys_core.training.small_model import make_batch, sharded_model, small_spec

PARTS, NUM_QUERIES, NUM_NEGATIVES, KNOWN_NEGATIVES, NUM_STEPS = 4, 3, 2, 2, 3
"""A step has PARTS parts of NUM_QUERIES queries; a rank has one part or several."""
FORMS = {"user.country": "single", "item.genres": "list"}
TRAINING = TrainingConfig(
    epochs=1,
    table_optimizer=TableOptimizer(kind="sgd", learning_rate=0.2, warmup_steps=0, weight_decay=0.3),
    dense_optimizer=DenseOptimizer(kind="sgd", learning_rate=0.05, warmup_steps=0),
    seed=1,
)
LOSS = LossConfig(num_negatives=NUM_NEGATIVES, cross_rank_negatives=True, explicit_negatives=KNOWN_NEGATIVES)


def part_of(spec: ModelSpec, *, parts: range, step: int) -> Batch:
    """Return a batch of the queries and candidates of `parts`; a few events have much higher weights."""
    batch = make_batch(
        spec, ranks=parts, step=step, queries=NUM_QUERIES, negatives=NUM_NEGATIVES, known_negatives=KNOWN_NEGATIVES
    )
    weight = [np.random.default_rng([9, step, part]).choice([0.0, 0.5, 6.0], NUM_QUERIES) for part in parts]
    return replace(batch, loss_weight=torch.from_numpy(np.concatenate(weight).astype(np.float32)))


def train(rank: int, lookup: str, folder: Path) -> None:
    ranks = dist.get_world_size()
    tables = {"item": TableConfig(transfer="residual"), "user": TableConfig.model_validate({"lookup": lookup})}
    spec = small_spec(tables=tables, forms=FORMS, optimizer=TRAINING.table_optimizer)
    process = Process(rank=rank, world_size=ranks, device=torch.device("cpu"))
    model, _ = sharded_model(spec, kinds=dict.fromkeys(spec.tables, "row_wise"), training=TRAINING, loss=LOSS, process=process)
    pipeline = TrainPipelineSparseDist(model, make_optimizer(model, spec=spec, config=TRAINING), process.device)
    share = PARTS // ranks
    parts = range(rank * share, (rank + 1) * share)
    batches = iter([part_of(spec, parts=parts, step=step) for step in range(NUM_STEPS)])
    losses = []
    for _ in range(NUM_STEPS):
        mean = pipeline.progress(batches) / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
    pipeline.detach()
    array_by_name = {"losses": np.array(losses)} if rank == 0 else {}
    for name in spec.tables:
        for shard in table_shards(model.state_dict(), table=name):
            array_by_name[f"table {name}/{shard.row}"] = shard.weight_RD.numpy()
    if rank == 0:
        layers = get_unwrapped_module(model).head.named_parameters()
        array_by_name |= {f"layer {name}": value.detach().numpy() for name, value in layers}
    np.savez(folder / f"{ranks}-{rank}.npz", **array_by_name)


def trained(ranks: int, *, lookup: str, folder: Path) -> dict[str, NDArray[np.float32]]:
    """Train on `ranks` ranks; return losses, whole tables and layers."""
    run_ranks(train, world_size=ranks, arguments=(lookup, folder))
    array_by_name = {}
    for rank in range(ranks):
        with np.load(folder / f"{ranks}-{rank}.npz") as file:
            array_by_name |= dict(file)
    tables = sorted({name.partition("/")[0] for name in array_by_name if "/" in name})
    table_by_name = {}
    for table in tables:
        shards = sorted(
            (name for name in array_by_name if name.startswith(f"{table}/")), key=lambda name: int(name.split("/")[1])
        )
        table_by_name[table] = np.concatenate([array_by_name.pop(name) for name in shards])
    return array_by_name | table_by_name


@pytest.mark.parametrize("lookup", ["unpooled", "pooled"])
def test_weights_of_events_and_decay_of_tables_mean_the_same_for_any_number_of_ranks(lookup: str, tmp_path: Path) -> None:
    one_rank = trained(1, lookup=lookup, folder=tmp_path)
    assert {"losses", "table item_offset", "table user", "layer query.pooling.start"} <= set(one_rank)
    for ranks in (2, 4):
        several_ranks = trained(ranks, lookup=lookup, folder=tmp_path)
        assert set(several_ranks) == set(one_rank)
        for name, value in one_rank.items():
            np.testing.assert_allclose(several_ranks[name], value, rtol=1e-4, atol=1e-6, err_msg=f"{name} on {ranks} ranks")
