"""Losses, tables and layers after training on the same batches, split over one, two or four ranks."""

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
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import table_shards
from recsys_core.models.tables.table_config import DenseOptimizer, TableConfig, TableOptimizer
from recsys_core.training.config import TrainingConfig
from recsys_core.training.model.optimizers import make_optimizer
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.training.small_model import make_batch, sharded_model, small_spec

NUM_STEPS, NUM_PARTS, NUM_QUERIES, NUM_NEGATIVES, NUM_KNOWN_NEGATIVES = 3, 4, 3, 2, 2
"""A step has NUM_PARTS parts, which the ranks share equally. Each part has NUM_QUERIES queries and NUM_NEGATIVES negatives."""
FORM_BY_FEATURE = {"user.country": "single", "item.genres": "list"}
TRAINING = TrainingConfig(
    epochs=1,
    table_optimizer=TableOptimizer(kind="sgd", learning_rate=0.2, warmup_steps=0, weight_decay=0.3),
    dense_optimizer=DenseOptimizer(kind="sgd", learning_rate=0.05, warmup_steps=0),
    seed=1,
)
LOSS = LossConfig(num_negatives=NUM_NEGATIVES, cross_rank_negatives=True, explicit_negatives=NUM_KNOWN_NEGATIVES)


def batch_of(spec: ModelSpec, *, parts: range, step: int) -> Batch:
    """Return the batch of a rank that has `parts` of the step. The positive events have very different weights."""
    batch = make_batch(
        spec,
        ranks=parts,
        step=step,
        num_queries=NUM_QUERIES,
        num_negatives=NUM_NEGATIVES,
        num_known_negatives=NUM_KNOWN_NEGATIVES,
    )
    weights_of_parts = [np.random.default_rng([9, step, part]).choice([0.0, 0.5, 6.0], NUM_QUERIES) for part in parts]
    return replace(batch, loss_weight=torch.from_numpy(np.concatenate(weights_of_parts).astype(np.float32)))


def train_rank(rank: int, lookup: str, folder: Path) -> None:
    """Train one rank, and write its losses, table shards and layers."""
    world_size = dist.get_world_size()
    tables = {"item": TableConfig(transfer="residual"), "user": TableConfig.model_validate({"lookup": lookup})}
    spec = small_spec(tables=tables, forms=FORM_BY_FEATURE, optimizer=TRAINING.table_optimizer)
    process, sharding_type_by_table = cpu_process(rank), dict.fromkeys(spec.tables, "row_wise")
    model, _ = sharded_model(spec, sharding_type_by_table=sharding_type_by_table, training=TRAINING, loss=LOSS, process=process)
    pipeline = TrainPipelineSparseDist(model, make_optimizer(model, spec=spec, config=TRAINING), process.device)
    parts_per_rank = NUM_PARTS // world_size
    parts = range(rank * parts_per_rank, (rank + 1) * parts_per_rank)
    batches = iter([batch_of(spec, parts=parts, step=step) for step in range(NUM_STEPS)])
    losses = []
    for _ in range(NUM_STEPS):
        mean_loss = pipeline.progress(batches) / world_size
        dist.all_reduce(mean_loss)
        losses.append(mean_loss.item())
    pipeline.detach()
    array_by_name = {"losses": np.array(losses)} if rank == 0 else {}
    for name in spec.tables:
        for shard in table_shards(model.state_dict(), table=name):
            array_by_name[f"table {name}/{shard.first_row}"] = shard.weight_RD.numpy()
    if rank == 0:
        layers = get_unwrapped_module(model).head.named_parameters()
        array_by_name |= {f"layer {name}": value.detach().numpy() for name, value in layers}
    np.savez(folder / f"{world_size}-{rank}.npz", **array_by_name)


def train(world_size: int, *, lookup: str, folder: Path) -> dict[str, NDArray[np.float32]]:
    """Train on `world_size` ranks, and return the losses, the whole tables and the layers by name."""
    run_ranks(train_rank, world_size=world_size, arguments=(lookup, folder))
    array_by_name = {}
    for rank in range(world_size):
        with np.load(folder / f"{world_size}-{rank}.npz") as arrays:
            array_by_name |= dict(arrays)
    table_names = sorted({name.partition("/")[0] for name in array_by_name if "/" in name})
    table_by_name = {}
    for table in table_names:
        shard_names = sorted(
            (name for name in array_by_name if name.startswith(f"{table}/")), key=lambda name: int(name.split("/")[1])
        )
        table_by_name[table] = np.concatenate([array_by_name.pop(name) for name in shard_names])
    return array_by_name | table_by_name


@pytest.mark.parametrize("lookup", ["unpooled", "pooled"])
def test_event_weights_and_weight_decay_have_the_same_effect_on_any_number_of_ranks(lookup: str, tmp_path: Path) -> None:
    arrays_of_one_rank = train(1, lookup=lookup, folder=tmp_path)
    assert {"losses", "table item_offset", "table user", "layer query.pooling.start"} <= set(arrays_of_one_rank)
    for world_size in (2, 4):
        arrays_of_several_ranks = train(world_size, lookup=lookup, folder=tmp_path)
        assert set(arrays_of_several_ranks) == set(arrays_of_one_rank)
        for name, expected_array in arrays_of_one_rank.items():
            np.testing.assert_allclose(
                arrays_of_several_ranks[name], expected_array, rtol=1e-4, atol=1e-6, err_msg=f"{name} on {world_size} ranks"
            )
