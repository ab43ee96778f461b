"""From a model spec and a plan to a sharded model with its first values."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from numpy.typing import NDArray
from torch import distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.optimizers import SGD, Adagrad, Adam, PartialRowWiseAdam
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys_core.data.events import EventStore, mapped
from recsys_core.manifests import Dataset, InteractionsManifest
from recsys_core.models.embedding_tables import parameter_name, table_shards
from recsys_core.models.initialisation import (
    copy_pretrained,
    fill_missing,
    fill_random,
    mean_vector,
    no_vectors,
    rows_with_vector,
    zero_rows,
)
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.optimizer_config import TableOptimizer
from recsys_core.models.spec import ModelSpec
from recsys_core.models.table_checks import ID_TABLES
from recsys_core.models.table_config import OFFSET, TEACHER, random_norm
from recsys_core.models.task import TABLES_PATH, RetrievalHead, RetrievalTask
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.sharding.sharders import sharders
from recsys_core.training.config import DenseParallel
from recsys_core.training.dense_parallel import shard_layers
from recsys_core.training.job_spec import TrainJob
from recsys_core.training.process_group import Process

logger = logging.getLogger(__name__)
ADAGRAD_EPS = 1e-8
_FUSED: dict[str, tuple[type[torch.optim.Optimizer], EmbOptimType, float]] = {
    "rowwise_adagrad": (RowWiseAdagrad, EmbOptimType.EXACT_ROWWISE_ADAGRAD, ADAGRAD_EPS),
    "adagrad": (Adagrad, EmbOptimType.EXACT_ADAGRAD, ADAGRAD_EPS),
    "sgd": (SGD, EmbOptimType.EXACT_SGD, ADAGRAD_EPS),
    "adam": (Adam, EmbOptimType.ADAM, 1e-8),
    "partial_rowwise_adam": (PartialRowWiseAdam, EmbOptimType.PARTIAL_ROWWISE_ADAM, 1e-8),
}


@dataclass(frozen=True)
class PretrainedRows:
    """Vectors [n, D] of a table, memory-mapped, and for each of its rows the one that belongs to it, -1 for none."""

    vectors: NDArray[np.float32]
    vector_row: NDArray[np.int64]


def build_model(
    spec: ModelSpec,
    *,
    loss: LossConfig,
    item_count_I: NDArray[np.int64],
    ranks: Mapping[str, NDArray[np.int64]],
    plan: PlanFile,
    process: Process,
    optimizer: TableOptimizer,
    dense_parallel: DenseParallel,
    seed: int,
) -> DistributedModelParallel:
    """The task sharded exactly as `plan` says, tables filled at random and updated in the backward pass.

    item_count_I: [items], training events per item. ranks: see RetrievalHead. optimizer: of tables that have none of their own.
    Raises InputError when the plan is for another model or world size.
    """
    plan.check_matches(spec=spec, world_size=process.world_size, optimizer=optimizer)
    torch.manual_seed(seed)  # the towers' layers start equal on every rank
    decay = weight_decay(spec, default=optimizer)
    head = RetrievalHead(
        spec,
        loss=loss,
        item_count_I=item_count_I,
        popularity_rank=ranks,
        weight_decay=decay,
        group=dist.group.WORLD,
    )
    task = RetrievalTask(head, device=process.device)
    _choose_optimizers(task.embedding_tables, spec, plan=plan, default=optimizer)
    sharded = shard_layers(head, wish=dense_parallel, device=process.device)
    model = DistributedModelParallel(
        task,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=process.device,
        plan=plan.to_torchrec(TABLES_PATH, spec=spec),
        sharders=sharders(plan.quantized_comms),
        data_parallel_wrapper=DefaultDataParallelWrapper(params_to_ignore=[f"head.{name}" for name in sharded]),
    )
    state = model.state_dict()
    with torch.no_grad():
        for name, table in spec.tables.items():
            for shard in table_shards(state, table=name):
                fill_random(shard, table=name, dim=table.dim, seed=seed, std=table.settings.init_std)
    return model


def weight_decay(spec: ModelSpec, *, default: TableOptimizer) -> dict[str, float]:
    """Strength of the L2 penalty by table, where there is one: of tables looked up row by row that are trained."""
    wishes = {
        name: (table.settings.optimizer or default).weight_decay
        for name, table in spec.tables.items()
        if name in (*ID_TABLES, OFFSET) and not table.frozen
    }
    return {name: strength for name, strength in wishes.items() if strength}


def _choose_optimizers(lookups: nn.Module, spec: ModelSpec, *, plan: PlanFile, default: TableOptimizer) -> None:
    """Marks each table with what its fused kernel shall do; replicated tables have no such kernel."""
    parameters = dict(lookups.named_parameters())
    for name, table in spec.tables.items():
        parameter = parameters[parameter_name(spec, name)]
        if plan.tables[name].sharding_type == "data_parallel":
            continue
        wish = table.settings.optimizer or default
        # A frozen table is never stepped; of the optimizers that every device has, SGD alone keeps no state.
        kind, fused, eps = _FUSED["sgd" if table.frozen else wish.kind]
        arguments: dict[str, Any] = {"optimizer": fused, "learning_rate": wish.learning_rate, "eps": eps}
        if wish.gradient_clip_value is not None:
            arguments |= {"gradient_clipping": True, "max_gradient": wish.gradient_clip_value}
        # What TorchRec's apply_optimizer_in_backward leaves for the sharder; called itself, it would first make an optimizer
        # that knows torch's arguments alone, and not FBGEMM's.
        parameter._optimizer_classes = [kind]  # type: ignore[attr-defined]
        parameter._optimizer_kwargs = [arguments]  # type: ignore[attr-defined]


def fill_pretrained(model: DistributedModelParallel, *, spec: ModelSpec, pretrained: Mapping[str, PretrainedRows]) -> None:
    """Copies the vectors of this rank's rows from the one mapping that all ranks of a host share (the page cache).

    Rows without a vector become what the table's `missing` says; so do all rows of a table without any vectors.
    """
    state = model.state_dict()
    for name, table in spec.tables.items():
        settings, found = table.settings, pretrained.get(name)
        norm = random_norm(settings.init_std, table.dim) if settings.rescale else None
        vector_row = found.vector_row if found is not None else no_vectors(table.num_rows)
        if found is not None:
            missing = table.num_rows - sum(len(rows) for rows in rows_with_vector(vector_row))
            logger.info(
                "table %s: %d of %d rows have no vector; they start %s", name, missing, table.num_rows, settings.missing
            )
        mean_D = None
        if settings.missing == "mean" and found is not None:
            mean_D = mean_vector(found.vectors, vector_row=vector_row, norm=norm)
        with torch.no_grad():
            for shard in table_shards(state, table=name):
                if settings.missing != "random":
                    fill_missing(shard, vector_row=vector_row, value_D=mean_D)
                if found is not None:
                    copy_pretrained(shard, vectors=found.vectors, vector_row=vector_row, norm=norm)


def blank_users(model: DistributedModelParallel, *, known: NDArray[np.bool_]) -> None:
    """Zero rows for users of whom nothing is known (known: [users]); they are then served by their history alone."""
    with torch.no_grad():
        for shard in table_shards(model.state_dict(), table="user"):
            zero_rows(shard, is_zero_R=~known)


def first_model(
    job: TrainJob,
    *,
    store: EventStore,
    dataset: Dataset,
    process: Process,
) -> DistributedModelParallel:
    """The sharded model of `job` before any step."""
    model = build_model(
        job.spec,
        loss=job.loss,
        item_count_I=store.item_count,
        ranks=frequency_ranks(job.spec, store=store, interactions=dataset.interactions),
        plan=PlanFile.read(job.plan),
        process=process,
        optimizer=job.training.table_optimizer,
        dense_parallel=job.training.dense_parallel,
        seed=job.training.seed,
    )
    model_rows: Mapping[str, PretrainedRows] = {}
    if dataset.embeddings is not None:
        model_rows = pretrained_rows(job.spec, dataset=dataset)
    fill_pretrained(model, spec=job.spec, pretrained=model_rows)
    if job.spec.config.user_id:
        known = store.train_end > store.user_offset[:-1]
        if "user" in model_rows:
            known = known | (model_rows["user"].vector_row >= 0)
        blank_users(model, known=known)
    return model


def frequency_ranks(spec: ModelSpec, *, store: EventStore, interactions: InteractionsManifest) -> dict[str, NDArray[np.int64]]:
    """For each gradually unfrozen table the place of each row by training events, 0 for the most; ties by row."""
    ranks = {}
    for name, table in spec.tables.items():
        if table.settings.transfer == "gradual":
            if name == "item":
                ranks[name] = mapped(interactions.path("item_rank.npy"))
            else:
                events_U = store.train_end - store.user_offset[:-1]
                rank = np.empty(len(events_U), np.int64)
                rank[np.argsort(-events_U, kind="stable")] = np.arange(len(events_U))
                ranks[name] = rank
    return ranks


def pretrained_rows(
    spec: ModelSpec,
    *,
    dataset: Dataset,
) -> dict[str, PretrainedRows]:
    """The vectors of each table that has some, and where in them each of its rows finds its own."""
    interactions, embeddings, features = dataset.interactions, dataset.embeddings, dataset.features
    assert embeddings is not None
    places = {"item": "vector_row.npy", "user": "user_vector_row.npy"}
    found = {}
    for name, table in spec.tables.items():
        source = "item" if name == TEACHER else name
        if not table.pretrained:
            continue
        if source in places:
            path = interactions.path(places[source]) if places[source] in interactions.files else None
        else:
            assert features is not None
            path = features.path(f"{source}.vector_row.npy")
        vector_row = no_vectors(table.num_rows) if path is None else mapped(path)
        found[name] = PretrainedRows(mapped(embeddings.vectors(source)), vector_row)
    return found
