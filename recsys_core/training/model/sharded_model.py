"""The sharded model and its initial values: random rows, pretrained vectors, zero rows for unknown users.

Shapes: I items, U users, D width of a row.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from numpy.typing import NDArray
from torch import distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.layout import memory_map, popularity_ranks
from recsys_core.launching.rank import Process
from recsys_core.manifests import Dataset
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import parameter_name, table_shards
from recsys_core.models.tables.initialisation import (
    copy_rows,
    fill_missing,
    fill_random,
    mean_vector,
    no_vectors,
    present_vector_rows,
)
from recsys_core.models.tables.table_config import ITEM_TABLES, TEACHER_TABLE, random_norm
from recsys_core.models.task import TABLES_PATH, RetrievalHead, RetrievalTask
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.sharding.torchrec_planner import OPTIMIZER_CLASS_BY_KIND, sharders
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job import TrainJob
from recsys_core.training.model.dense_parallel import shard_layers

logger = logging.getLogger(__name__)
EPS = 1e-8
"""Epsilon of the optimizers of all tables."""
_FBGEMM_TYPE_BY_OPTIMIZER = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
    "none": EmbOptimType.EXACT_SGD,  # has no state; a frozen table has no gradients
    "adam": EmbOptimType.ADAM,
    "partial_rowwise_adam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
}


@dataclass(frozen=True)
class PretrainedVectors:
    """The pretrained vectors of a table.

    Attributes:
        vectors: float32 [vectors, D], memory-mapped.
        vector_row: int64 [rows of the table], for each row of the table, the row of its vector in `vectors`; -1 for none.
    """

    vectors: NDArray[np.float32]
    vector_row: NDArray[np.int64]


def initial_model(job: TrainJob, *, store: EventStore, dataset: Dataset, process: Process) -> DistributedModelParallel:
    """Collective. Build the sharded model of `job` with its initial values."""
    spec = job.spec
    model = build_model(
        spec,
        loss=job.loss,
        item_count_I=store.train_count_I,
        popularity_rank_by_table=popularity_ranks_by_table(spec, store=store),
        plan=PlanFile.read(job.plan_path),
        process=process,
        config=job.training,
    )
    pretrained_by_table = pretrained_vectors_by_table(spec, dataset=dataset)
    rotated_path_by_table = {} if job.warm_start is None else job.warm_start.vectors_path_by_table()
    for table_name, path in rotated_path_by_table.items():
        pretrained_by_table[table_name] = replace(pretrained_by_table[table_name], vectors=memory_map(path))
    fill_pretrained(model, spec=spec, pretrained_by_table=pretrained_by_table)
    if spec.config.learn_user_embedding:
        is_known_U = store.train_count_U > 0
        if "user" in pretrained_by_table:
            is_known_U = is_known_U | (pretrained_by_table["user"].vector_row >= 0)
        zero_unknown_users(model, is_known_U=is_known_U)
    return model


def build_model(
    spec: ModelSpec,
    *,
    loss: LossConfig,
    item_count_I: NDArray[np.int64],
    popularity_rank_by_table: Mapping[str, NDArray[np.int64]],
    plan: PlanFile,
    process: Process,
    config: TrainingConfig,
) -> DistributedModelParallel:
    """Collective. Shard the task according to `plan`, fuse the table optimizers, and fill the tables with random rows.

    Args:
        item_count_I: training events per item.
        popularity_rank_by_table: for each gradually unfrozen table, the popularity rank of each row; see RetrievalHead.

    Raises InputError if the plan was made for another model or world size.
    """
    plan.check_matches(spec=spec, world_size=process.world_size)
    torch.manual_seed(config.seed)  # the layers start with the same values on every rank
    head = RetrievalHead(
        spec,
        loss=loss,
        item_count_I=item_count_I,
        popularity_rank=popularity_rank_by_table,
        weight_decay=weight_decay_by_table(spec),
        group=dist.group.WORLD,
    )
    task = RetrievalTask(head, device=process.device)
    _assign_fused_optimizers(task.embedding_tables, spec, plan=plan)
    sharded_parameter_names = shard_layers(head, mode=config.dense_parallel, device=process.device)
    model = DistributedModelParallel(
        task,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=process.device,
        plan=plan.to_torchrec(TABLES_PATH, spec=spec),
        sharders=sharders(plan.quantized_comms),
        data_parallel_wrapper=DefaultDataParallelWrapper(params_to_ignore=[f"head.{name}" for name in sharded_parameter_names]),
    )
    tensor_by_name = model.state_dict()
    with torch.no_grad():
        for table_name, table in spec.tables.items():
            for shard in table_shards(tensor_by_name, table=table_name):
                fill_random(shard, table=table_name, dim=table.dim, seed=config.seed, std=table.settings.init_std)
    return model


def fused_kernels(model: nn.Module) -> Iterator[SplitTableBatchedEmbeddingBagsCodegen]:
    """Yield FBGEMM's kernels of the sharded tables on this rank."""
    # TorchRec stores the lookups of a sharded collection in a plain list, which model.modules() does not visit.
    lookups = nn.ModuleList(lookup for module in model.modules() for lookup in getattr(module, "_lookups", ()))
    for module in lookups.modules():
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen):
            yield module


def weight_decay_by_table(spec: ModelSpec) -> dict[str, float]:
    """Return the strength of the L2 penalty by table, for the trained id and offset tables with a weight decay above zero."""
    decay_by_table = {
        table_name: table.optimizer.weight_decay
        for table_name, table in spec.tables.items()
        if table_name in (*ITEM_TABLES, "user") and not table.is_frozen
    }
    return {table_name: decay for table_name, decay in decay_by_table.items() if decay}


def _assign_fused_optimizers(tables: nn.Module, spec: ModelSpec, *, plan: PlanFile) -> None:
    """Set the fused optimizer of each sharded table; replicated tables (data_parallel) have no fused kernel."""
    parameter_by_name = dict(tables.named_parameters())
    for table_name, table in spec.tables.items():
        if plan.tables[table_name].sharding_type == "data_parallel":
            continue
        optimizer_config = table.optimizer
        fbgemm_arguments: dict[str, Any] = {
            "optimizer": _FBGEMM_TYPE_BY_OPTIMIZER[table.optimizer_kind],
            "learning_rate": optimizer_config.learning_rate,
            "eps": EPS,
        }
        if optimizer_config.gradient_clip_value is not None:
            fbgemm_arguments |= {"gradient_clipping": True, "max_gradient": optimizer_config.gradient_clip_value}
        # These are the attributes that TorchRec's apply_optimizer_in_backward sets. The function itself cannot be used, because
        # it also builds a torch optimizer, which does not accept FBGEMM's arguments.
        parameter = parameter_by_name[parameter_name(spec, table_name)]
        parameter._optimizer_classes = [OPTIMIZER_CLASS_BY_KIND[table.optimizer_kind]]  # type: ignore[attr-defined]
        parameter._optimizer_kwargs = [fbgemm_arguments]  # type: ignore[attr-defined]


def fill_pretrained(
    model: DistributedModelParallel, *, spec: ModelSpec, pretrained_by_table: Mapping[str, PretrainedVectors]
) -> None:
    """Copy the pretrained vectors of this rank's rows; fill rows without a vector according to `missing_vector_init`.

    The ranks of a host read the same memory-mapped file, so the host's page cache holds the vectors once.
    """
    tensor_by_name = model.state_dict()
    for table_name, table in spec.tables.items():
        table_settings, pretrained_vectors = table.settings, pretrained_by_table.get(table_name)
        norm, mean_D, num_copies = None, None, 1
        if pretrained_vectors is None:
            vector_row = no_vectors(table.num_rows)
        else:
            vector_dim = pretrained_vectors.vectors.shape[1]
            norm = random_norm(table_settings.init_std, vector_dim) if table_settings.rescale else None
            num_copies = table.dim // vector_dim
            vector_row = pretrained_vectors.vector_row
            num_rows_without_vector = table.num_rows - sum(len(chunk) for chunk in present_vector_rows(vector_row))
            logger.info(
                "table %s: %d of %d rows have no vector; their initial values: %s",
                table_name,
                num_rows_without_vector,
                table.num_rows,
                table_settings.missing_vector_init,
            )
            if table_settings.missing_vector_init == "mean":
                mean_D = mean_vector(pretrained_vectors.vectors, vector_row=vector_row, norm=norm).tile(num_copies)
        with torch.no_grad():
            for shard in table_shards(tensor_by_name, table=table_name):
                if table_settings.missing_vector_init != "random":
                    fill_missing(shard, vector_row=vector_row, value_D=mean_D)
                if pretrained_vectors is not None:
                    copy_rows(
                        shard, vectors=pretrained_vectors.vectors, vector_row=vector_row, norm=norm, num_copies=num_copies
                    )


def zero_unknown_users(model: DistributedModelParallel, *, is_known_U: NDArray[np.bool_]) -> None:
    """Set the rows of unknown users (no training event, no vector) to zero. Their history alone represents these users."""
    with torch.no_grad():
        for shard in table_shards(model.state_dict(), table="user"):
            fill_missing(shard, vector_row=is_known_U.astype(np.int8) - 1, value_D=None)  # -1 for an unknown user


def popularity_ranks_by_table(spec: ModelSpec, *, store: EventStore) -> dict[str, NDArray[np.int64]]:
    """Return the popularity rank of each row of each gradually unfrozen table. Rank 0 has the most training events."""
    return {
        table_name: store.popularity_rank_I if table_name == "item" else popularity_ranks(store.train_count_U)
        for table_name, table in spec.tables.items()
        if table.settings.transfer == "gradual"
    }


def pretrained_vectors_by_table(spec: ModelSpec, *, dataset: Dataset) -> dict[str, PretrainedVectors]:
    """Return the vectors of each table with `pretrained` set, from the log or from files."""
    store, pretrained_by_table = EventStore.open(dataset.interactions), {}
    for table_name, table in spec.tables.items():
        if not table.pretrained:
            continue
        vectors_table = "item" if table_name == TEACHER_TABLE else table_name
        if vectors_table == "item" and dataset.log_vectors is not None:
            pretrained_by_table[table_name] = PretrainedVectors(
                memory_map(dataset.log_vectors.vectors_path), memory_map(dataset.log_vectors.vector_row_path)
            )
            continue
        assert dataset.embeddings is not None
        if vectors_table in ("item", "user"):
            vector_row = store.vector_rows(vectors_table)
        else:
            assert dataset.features is not None
            vector_row = memory_map(dataset.features.path(f"{vectors_table}.vector_row.npy"))
        if vector_row is None:
            vector_row = no_vectors(table.num_rows)
        pretrained_by_table[table_name] = PretrainedVectors(
            memory_map(dataset.embeddings.vectors_path(vectors_table)), vector_row
        )
    return pretrained_by_table
