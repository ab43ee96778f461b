"""Sharded lookups, compared with lookups in whole tables: lists, empty lists, and a rank without ids."""

import numpy as np
import pytest
import torch
from torch import Tensor

from recsys_core.dataset.batch import Assembler
from recsys_core.dataset.feature_store import UNPOOLED, FeatureStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import LocalShard, table_outputs
from recsys_core.models.tables.initialisation import fill_random
from recsys_core.models.tables.table_config import TableConfig
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.constraints import UNPOOLED_SHARDING_TYPES
from recsys_core.sharding.planner import make_plan
from recsys_core.training.config import TrainingConfig
from recsys_core.training.model.sharded_model import build_model
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.ingest.random_features import feature_store, ingested_features, values_of

NUM_USERS, NUM_ITEMS, NUM_EVENTS, SEED = 5, 9, 20, 3
HISTORIES_BY_CASE = {
    "both ranks": ([[1, 2], [3]], [[4, 4], []]),
    "one rank": ([[], []], [[7, 1], [0]]),
    "none": ([[], []], [[], []]),
}
"""Histories of two ranks with two queries each. A key names the ranks whose histories have items."""


def make_spec() -> ModelSpec:
    """Return a spec with tables of every kind of lookup, one of which is frozen."""
    return ModelSpec.sized(
        TwoTowerConfig(embedding_dim=4, learn_user_embedding=True),
        num_users=NUM_USERS,
        num_items=NUM_ITEMS,
        ingested_by_feature=ingested_features(),
        vector_dim_by_table={"item.single": 4},
        tables={"item": TableConfig(dim=8), "item.single": TableConfig(transfer="frozen")},
    )


def loop_output(spec: ModelSpec, table_name: str, store: FeatureStore, owner_rows: list[int]) -> Tensor:
    """Return the output of a table for some users, items or events, computed with a loop over the rows of the whole table."""
    dim = spec.tables[table_name].dim
    weight_RD, output_BD = torch.empty(spec.tables[table_name].num_rows, dim), torch.zeros(len(owner_rows), dim)
    fill_random(LocalShard(0, 0, weight_RD), table=table_name, dim=dim, seed=SEED, std=0.02)
    for output_index, owner_row in enumerate(owner_rows):
        rows, weights = values_of(store, table_name, owner_row) if table_name in spec.forms else ([owner_row], None)
        weights = weights or [1.0] * len(rows)
        divisor = sum(weights) if "list" in table_name and rows else 1.0  # lists are averaged
        for row, weight in zip(rows, weights, strict=True):
            output_BD[output_index] += weight * weight_RD[row] / divisor
    return output_BD


def compare_lookups(rank: int, sharding_type: str) -> None:
    """Assert on each rank that the lookups of sharded tables equal the lookups of whole tables."""
    spec, process = make_spec(), cpu_process(rank)
    sharding_config = ShardingConfig(
        cluster=ClusterConfig(device="cpu", processes_per_node=process.world_size),
        tables=dict.fromkeys(spec.tables, TableConstraint(sharding_types=(sharding_type,))),
    )
    model = build_model(
        spec,
        loss=LossConfig(num_negatives=0),
        item_count_I=np.ones(NUM_ITEMS, np.int64),
        popularity_rank_by_table={},
        plan=make_plan(sharding_config, model=spec, batch_size=4),
        process=process,
        config=TrainingConfig(seed=SEED),
    )
    task, store = model.module, feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_EVENTS)
    for case, histories_by_rank in HISTORIES_BY_CASE.items():
        user_row_B, histories = np.array([2 * rank, 1]), histories_by_rank[rank]
        batch = Assembler(user_batch_key=UNPOOLED, features=store).batch(
            user_row_B=user_row_B,
            event_index_B=3 * user_row_B,
            history=JaggedArray.from_lengths(
                np.array([len(items) for items in histories]), np.array([item for items in histories for item in items])
            ),
            candidate_row_C=np.zeros(0, np.int64),
        )
        embeddings = task._look_up(batch, list(task.embedding_tables))
        output_by_table = {}
        for side in ("query", "item"):
            output_by_table |= table_outputs(spec, embeddings, batch, side=side)
        owner_rows_by_kind = {
            "user": user_row_B.tolist(),
            "context": (3 * user_row_B).tolist(),
            "item": batch.item_row_V.tolist(),
        }
        for table_name, output_BD in output_by_table.items():
            expected_output_BD = loop_output(spec, table_name, store, owner_rows_by_kind[table_name.split(".")[0]])
            torch.testing.assert_close(
                output_BD, expected_output_BD, msg=lambda text, place=f"{case}, {table_name}": f"{place}: {text}"
            )
        assert task.eval().encode_queries(batch).isfinite().all()


@pytest.mark.parametrize("sharding_type", UNPOOLED_SHARDING_TYPES)
def test_sharded_lookups_equal_lookups_in_whole_tables_even_for_a_rank_without_ids(sharding_type: str) -> None:
    run_ranks(compare_lookups, world_size=2, arguments=(sharding_type,))
