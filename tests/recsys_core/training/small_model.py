"""A model with every kind of feature on both sides, batches for it, and the same model without TorchRec's distributed part."""

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
from recsys_core.models.tables.initialisation import copy_pretrained, fill_missing, fill_random
from recsys_core.models.tables.table_config import TableConfig, TableOptimizer, random_norm
from recsys_core.models.task import RetrievalHead, RetrievalTask
from recsys_core.sharding.config import ClusterConfig, QuantizedCommsConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.sharding.planner import make_plan
from recsys_core.training.config import TrainingConfig
from recsys_core.training.sharded_model import PretrainedVectors, build_model, fill_pretrained

NUM_USERS, NUM_ITEMS, NUM_EVENTS = 50, 41, 300
HISTORY = 4
FORMS: dict[str, FeatureForm] = {
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
ROWS = {"single": 7, "list": 9, "weighted_list": 11, "number": 2}
COUNTS = np.arange(NUM_ITEMS, dtype=np.int64) % 13
"""Training events per item; some have none."""
RANKS = {
    "item": np.argsort(np.argsort(-COUNTS, kind="stable"), kind="stable"),
    "user": np.random.default_rng(3).permutation(NUM_USERS),
}
"""Popularity rank of each row, by table."""


def _facts(form: FeatureForm) -> IngestedFeature:
    kind = {"single": "categorical", "number": "numeric"}.get(form, form)
    numbers = {"mean": 0.0, "std": 1.0} if form == "number" else {}
    return IngestedFeature(
        kind=kind,
        num_rows=ROWS[form],
        num_values=0,
        num_out_of_vocabulary=0,
        num_missing=0,
        definition="d",
        is_continued=False,
        **numbers,
    )


def small_spec(
    *,
    dim: int = 8,
    tables: Mapping[str, TableConfig] | None = None,
    vectors: Sequence[str] = ("item",),
    forms: Mapping[str, FeatureForm] = FORMS,
    optimizer: TableOptimizer | None = None,
) -> ModelSpec:
    """Return a model with user id, history, last item and features of `forms`. vectors: tables with pretrained vectors."""
    config = TwoTowerConfig(
        embedding_dim=dim,
        learn_user_embedding=True,
        history=AttentionHistory(length=HISTORY),
        query=TowerConfig(layers=(12, dim), skip_connection=True),
        candidate=TowerConfig(layers=(dim,), skip_connection=True),
    )
    return ModelSpec.sized(
        config,
        num_users=NUM_USERS,
        num_items=NUM_ITEMS,
        ingested_by_feature={name: _facts(form) for name, form in forms.items()},
        vector_dim_by_table={name: (tables or {}).get(name, TableConfig()).dim or dim for name in vectors},
        tables=tables,
        optimizer=optimizer,
    )


def with_optimizer(spec: ModelSpec, optimizer: TableOptimizer) -> ModelSpec:
    """Return the spec with another optimizer of the tables without an `optimizer` setting."""
    tables = {
        name: table.model_copy(update={"optimizer": table.settings.optimizer or optimizer})
        for name, table in spec.tables.items()
    }
    return spec.model_copy(update={"tables": tables})


def pretrained_of(spec: ModelSpec) -> dict[str, PretrainedVectors]:
    """Return pretrained vectors for the tables that have them; every fifth row has no vector."""
    vectors_by_table = {}
    for name, table in spec.tables.items():
        if table.pretrained:
            vectors = np.random.default_rng(table.num_rows).normal(size=(table.num_rows, table.dim)).astype(np.float32)
            row = np.arange(table.num_rows)
            vectors_by_table[name] = PretrainedVectors(vectors, np.where(row % 5 == 4, -1, row[::-1]))
    return vectors_by_table


def _feature(key: str, form: FeatureForm) -> Feature:
    random = np.random.default_rng(len(key))
    owners = {"user": NUM_USERS, "item": NUM_ITEMS, "context": NUM_EVENTS}[key.partition(".")[0]]
    offset = None
    count = owners
    if form in ("list", "weighted_list"):
        offset = np.concatenate([[0], np.cumsum(random.integers(0, 4, owners))]).astype(np.int64)
        count = int(offset[-1])
    row = np.ones(count, np.int32) if form == "number" else random.integers(0, ROWS[form], count).astype(np.int32)
    weight = random.normal(size=count) if form == "number" else random.uniform(0.1, 2, count)
    return Feature(row, offset, weight.astype(np.float32) if form in ("number", "weighted_list") else None)


def make_batch(
    spec: ModelSpec,
    *,
    ranks: Sequence[int],
    step: int,
    queries: int,
    negatives: int,
    share: NDArray[np.int64] | None = None,
    known_negatives: int = 0,
) -> Batch:
    """Return the batches of `ranks` in `step` as one batch: their queries in order of rank, then their negatives.

    A `share` of the catalogue takes the place of the negatives. The known negatives of the queries come last. Histories have
    0 to HISTORY items, so that the number of distinct items differs by rank and step.
    """
    assembler = Assembler(
        user_batch_key=spec.user_batch_key,
        features=FeatureStore({key: _feature(key, form) for key, form in spec.forms.items()}),
    )
    parts: dict[str, list[Any]] = {name: [] for name in ("user", "position", "positive", "negative", "length", "row", "known")}
    for rank in ranks:
        random = np.random.default_rng([step, rank])
        parts["user"].append(random.integers(0, NUM_USERS, queries))
        parts["position"].append(random.integers(0, NUM_EVENTS, queries))
        parts["positive"].append(random.choice(np.flatnonzero(COUNTS), queries))
        parts["negative"].append(random.choice(np.flatnonzero(COUNTS), negatives))
        parts["length"].append(random.integers(0, HISTORY + 1, queries))
        parts["row"].append(random.integers(0, NUM_ITEMS, int(parts["length"][-1].sum())))
        known_BK = random.integers(0, NUM_ITEMS, (queries, known_negatives))
        known_BK[::2, 1:] = parts["positive"][-1][::2, None]  # every second query has at most one
        parts["known"].append(known_BK.ravel())
    array_by_name = {name: np.concatenate(values) for name, values in parts.items()}
    return assembler.batch(
        user_row_B=array_by_name["user"],
        event_index_B=array_by_name["position"],
        history=JaggedArray.from_lengths(array_by_name["length"], array_by_name["row"]),
        candidate_row_C=np.concatenate(
            [array_by_name["positive"], array_by_name["negative"] if share is None else share, array_by_name["known"]]
        ),
    )


def plain_task(spec: ModelSpec, *, loss: LossConfig, seed: int) -> tuple[RetrievalTask, dict[str, nn.Parameter]]:
    """Return the task with its tables as ordinary parameters. Their initial values equal those of every sharding."""
    torch.manual_seed(seed)
    task = RetrievalTask(
        RetrievalHead(spec, loss=loss, item_count_I=COUNTS, popularity_rank={}, weight_decay={}, group=None),
        device=torch.device("cpu"),
    )
    task.embedding_tables = EmbeddingTables(spec, device=torch.device("cpu"))
    assert {type(collection) for collection in task.embedding_tables.values()} <= {EmbeddingBagCollection, EmbeddingCollection}
    parameters = dict(task.embedding_tables.named_parameters())
    tables = {name: parameters[parameter_name(spec, name)] for name in spec.tables}
    vectors = pretrained_of(spec)
    with torch.no_grad():
        for name, table in spec.tables.items():
            whole_table = LocalShard(0, 0, tables[name])
            fill_random(whole_table, table=name, dim=table.dim, seed=seed, std=table.settings.init_std)
            if table.settings.missing_vector_init == "zero":
                fill_missing(whole_table, vector_row=np.full(table.num_rows, -1), value_D=None)
            if name in vectors:
                norm = random_norm(table.settings.init_std, table.dim)
                copy_pretrained(whole_table, vectors=vectors[name].vectors, vector_row=vectors[name].vector_row, norm=norm)
    return task, tables


def sharded_model(
    spec: ModelSpec,
    *,
    kinds: Mapping[str, str],
    training: TrainingConfig,
    loss: LossConfig,
    process: Process,
    quantized_comms: QuantizedCommsConfig = QuantizedCommsConfig(),  # noqa: B008  it is frozen
) -> tuple[DistributedModelParallel, PlanFile]:
    """Return the same model on the ranks of the default process group. kinds: sharding type of each table."""
    sharding = ShardingConfig(
        cluster=ClusterConfig(device="cpu", processes_per_node=process.world_size),
        tables={name: TableConstraint(sharding_types=(kind,)) for name, kind in kinds.items()},
        quantized_comms=quantized_comms,
    )
    plan = make_plan(sharding, model=spec, batch_size=6)
    gradual = {name: rank for name, rank in RANKS.items() if spec.tables[name].settings.transfer == "gradual"}
    model = build_model(
        spec,
        loss=loss,
        item_count_I=COUNTS,
        popularity_rank_by_table=gradual,
        plan=plan,
        process=process,
        config=training,
    )
    fill_pretrained(model, spec=spec, pretrained_by_table=pretrained_of(spec))
    return model, plan
