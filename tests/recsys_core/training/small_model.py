"""A small model with every kind of feature in both towers, sharded and unsharded, and its batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recsys_core.dataset.batch import Assembler, Batch
from recsys_core.dataset.feature_store import Feature, FeatureForm, FeatureStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.launching.rank import Process
from recsys_core.manifests import IngestedFeature
from recsys_core.models.config import TowerConfig, TwoTowerConfig
from recsys_core.models.history_config import AttentionHistory
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import EmbeddingTables, LocalShard, parameter_name
from recsys_core.models.tables.initialisation import copy_rows, fill_missing, fill_random
from recsys_core.models.tables.table_config import TableConfig, TableOptimizer, random_norm
from recsys_core.models.task import RetrievalHead, RetrievalTask
from recsys_core.sharding.config import ClusterConfig, QuantizedCommsConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.sharding.planner import make_plan
from recsys_core.training.config import TrainingConfig
from recsys_core.training.model.sharded_model import PretrainedVectors, build_model, fill_pretrained

NUM_USERS, NUM_ITEMS, NUM_EVENTS = 50, 41, 300
HISTORY_LENGTH = 4
FORM_BY_FEATURE: dict[str, FeatureForm] = {
    "user.country": "single",
    "user.groups": "list",
    "user.age": "number",
    "context.words": "weighted_list",
    "context.hour": "single",
    "item.brand": "single",
    "item.genres": "list",
    "item.tags": "weighted_list",
    "item.price": "number",
}
NUM_ROWS_BY_FORM = {"single": 7, "list": 9, "weighted_list": 11, "number": 2}
ITEM_COUNT_I = np.arange(NUM_ITEMS, dtype=np.int64) % 13
"""Number of training events of each item: 0 to 12."""
POPULARITY_RANK_BY_TABLE = {
    "item": np.argsort(np.argsort(-ITEM_COUNT_I, kind="stable"), kind="stable"),
    "user": np.random.default_rng(3).permutation(NUM_USERS),
}
"""Popularity rank of each row, by table."""


def _ingested_feature(form: FeatureForm) -> IngestedFeature:
    feature_kind = {"single": "categorical", "number": "numeric"}.get(form, form)
    mean_and_std = {"mean": 0.0, "std": 1.0} if form == "number" else {}
    return IngestedFeature(
        kind=feature_kind,
        num_rows=NUM_ROWS_BY_FORM[form],
        num_values=0,
        num_out_of_vocabulary=0,
        num_missing=0,
        definition="d",
        is_continued=False,
        **mean_and_std,
    )


def small_spec(
    *,
    dim: int = 8,
    tables: Mapping[str, TableConfig] | None = None,
    pretrained_tables: Sequence[str] = ("item",),
    forms: Mapping[str, FeatureForm] = FORM_BY_FEATURE,
    optimizer: TableOptimizer | None = None,
) -> ModelSpec:
    """Return the spec of a model with a user table, a history, the last item and the features in `forms`."""
    config = TwoTowerConfig(
        embedding_dim=dim,
        learn_user_embedding=True,
        history=AttentionHistory(length=HISTORY_LENGTH, learn_offsets=True),
        query=TowerConfig(layers=(12, dim), skip_connection=True),
        candidate=TowerConfig(layers=(dim,), skip_connection=True),
    )
    return ModelSpec.sized(
        config,
        num_users=NUM_USERS,
        num_items=NUM_ITEMS,
        ingested_by_feature={name: _ingested_feature(form) for name, form in forms.items()},
        vector_dim_by_table={name: (tables or {}).get(name, TableConfig()).dim or dim for name in pretrained_tables},
        tables=tables,
        optimizer=optimizer,
    )


def with_optimizer(spec: ModelSpec, optimizer: TableOptimizer) -> ModelSpec:
    """Return the spec with `optimizer` for all tables that have no `optimizer` setting."""
    tables = {
        name: table.model_copy(update={"optimizer": table.settings.optimizer or optimizer})
        for name, table in spec.tables.items()
    }
    return spec.model_copy(update={"tables": tables})


def pretrained_vectors(spec: ModelSpec) -> dict[str, PretrainedVectors]:
    """Return random vectors for each table with pretrained vectors; every fifth row has none."""
    vectors_by_table = {}
    for name, table in spec.tables.items():
        if table.pretrained:
            vector_RD = np.random.default_rng(table.num_rows).normal(size=(table.num_rows, table.dim)).astype(np.float32)
            row_R = np.arange(table.num_rows)
            vectors_by_table[name] = PretrainedVectors(vector_RD, np.where(row_R % 5 == 4, -1, row_R[::-1]))
    return vectors_by_table


def _random_feature(key: str, form: FeatureForm) -> Feature:
    random = np.random.default_rng(len(key))
    num_owners = {"user": NUM_USERS, "item": NUM_ITEMS, "context": NUM_EVENTS}[key.partition(".")[0]]
    offset, num_values = None, num_owners
    if form in ("list", "weighted_list"):
        offset = np.concatenate([[0], np.cumsum(random.integers(0, 4, num_owners))]).astype(np.int64)
        num_values = int(offset[-1])
    num_rows = NUM_ROWS_BY_FORM[form]
    table_rows = (
        np.ones(num_values, np.int32) if form == "number" else random.integers(0, num_rows, num_values).astype(np.int32)
    )
    weights = random.normal(size=num_values) if form == "number" else random.uniform(0.1, 2, num_values)
    return Feature(table_rows, offset, weights.astype(np.float32) if form in ("number", "weighted_list") else None)


def make_batch(
    spec: ModelSpec,
    *,
    ranks: Sequence[int],
    step: int,
    num_queries: int,
    num_negatives: int,
    catalogue_share_C: NDArray[np.int64] | None = None,
    num_known_negatives: int = 0,
) -> Batch:
    """Return the batches of `ranks` in `step` as one batch.

    The candidates are first the positives of all ranks, then the sampled negatives, and last the known negatives. Histories
    have 0 to HISTORY_LENGTH items, so the number of items differs by rank and step.

    Args:
        num_queries: queries of each rank.
        num_negatives: sampled negatives of each rank.
        catalogue_share_C: item rows of a rank's catalogue share. They replace the sampled negatives.
        num_known_negatives: known negatives of each query.
    """
    assembler = Assembler(
        user_batch_key=spec.user_batch_key,
        features=FeatureStore({key: _random_feature(key, form) for key, form in spec.forms.items()}),
    )
    array_names = ("user", "event", "positive", "negative", "history_length", "history_item", "known_negative")
    rank_arrays_by_name: dict[str, list[Any]] = {name: [] for name in array_names}
    for rank in ranks:
        random = np.random.default_rng([step, rank])
        rank_arrays_by_name["user"].append(random.integers(0, NUM_USERS, num_queries))
        rank_arrays_by_name["event"].append(random.integers(0, NUM_EVENTS, num_queries))
        rank_arrays_by_name["positive"].append(random.choice(np.flatnonzero(ITEM_COUNT_I), num_queries))
        rank_arrays_by_name["negative"].append(random.choice(np.flatnonzero(ITEM_COUNT_I), num_negatives))
        rank_arrays_by_name["history_length"].append(random.integers(0, HISTORY_LENGTH + 1, num_queries))
        rank_arrays_by_name["history_item"].append(
            random.integers(0, NUM_ITEMS, int(rank_arrays_by_name["history_length"][-1].sum()))
        )
        known_negative_BN = random.integers(0, NUM_ITEMS, (num_queries, num_known_negatives))
        # Every second query has one known negative. Its other places are padded with the positive.
        known_negative_BN[::2, 1:] = rank_arrays_by_name["positive"][-1][::2, None]
        rank_arrays_by_name["known_negative"].append(known_negative_BN.ravel())
    array_by_name = {name: np.concatenate(arrays) for name, arrays in rank_arrays_by_name.items()}
    return assembler.batch(
        user_row_B=array_by_name["user"],
        event_index_B=array_by_name["event"],
        history=JaggedArray.from_lengths(array_by_name["history_length"], array_by_name["history_item"]),
        candidate_row_C=np.concatenate(
            [
                array_by_name["positive"],
                array_by_name["negative"] if catalogue_share_C is None else catalogue_share_C,
                array_by_name["known_negative"],
            ]
        ),
    )


def unsharded_task(spec: ModelSpec, *, loss: LossConfig, seed: int) -> tuple[RetrievalTask, dict[str, nn.Parameter]]:
    """Return the unsharded model, with the same initial weights as `sharded_model`, and the weight of each table."""
    torch.manual_seed(seed)
    task = RetrievalTask(
        RetrievalHead(spec, loss=loss, item_count_I=ITEM_COUNT_I, popularity_rank={}, weight_decay={}, group=None),
        device=torch.device("cpu"),
    )
    task.embedding_tables = EmbeddingTables(spec, device=torch.device("cpu"))
    assert {type(collection) for collection in task.embedding_tables.values()} <= {EmbeddingBagCollection, EmbeddingCollection}
    parameters = dict(task.embedding_tables.named_parameters())
    weight_by_table = {name: parameters[parameter_name(spec, name)] for name in spec.tables}
    pretrained_by_table = pretrained_vectors(spec)
    with torch.no_grad():
        for name, table in spec.tables.items():
            whole_table = LocalShard(0, 0, weight_by_table[name])
            fill_random(whole_table, table=name, dim=table.dim, seed=seed, std=table.settings.init_std)
            if table.settings.missing_vector_init == "zero":
                fill_missing(whole_table, vector_row=np.full(table.num_rows, -1), value_D=None)
            if name in pretrained_by_table:
                row_norm = random_norm(table.settings.init_std, table.dim)
                vectors, vector_row = pretrained_by_table[name].vectors, pretrained_by_table[name].vector_row
                copy_rows(whole_table, vectors=vectors, vector_row=vector_row, norm=row_norm)
    return task, weight_by_table


def sharded_model(
    spec: ModelSpec,
    *,
    sharding_type_by_table: Mapping[str, str],
    training: TrainingConfig,
    loss: LossConfig,
    process: Process,
    quantized_comms: QuantizedCommsConfig = QuantizedCommsConfig(),  # noqa: B008  it is frozen
) -> tuple[DistributedModelParallel, PlanFile]:
    """Return the part of the model on this rank, and the sharding plan. All ranks must call this function."""
    sharding = ShardingConfig(
        cluster=ClusterConfig(device="cpu", processes_per_node=process.world_size),
        tables={
            name: TableConstraint(sharding_types=(sharding_type,)) for name, sharding_type in sharding_type_by_table.items()
        },
        quantized_comms=quantized_comms,
    )
    plan = make_plan(sharding, model=spec, batch_size=6)
    model = build_model(
        spec,
        loss=loss,
        item_count_I=ITEM_COUNT_I,
        popularity_rank_by_table={
            name: popularity_rank
            for name, popularity_rank in POPULARITY_RANK_BY_TABLE.items()
            if spec.tables[name].settings.transfer == "gradual"
        },
        plan=plan,
        process=process,
        config=training,
    )
    fill_pretrained(model, spec=spec, pretrained_by_table=pretrained_vectors(spec))
    return model, plan
