"""From a model spec and a plan to a sharded model with its first values."""

import logging
from collections.abc import Mapping

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from numpy.typing import NDArray
from torch import distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from recsys_core.manifests import EmbeddingsManifest
from recsys_core.models.config import LossConfig, ModelSpec, PretrainedConfig
from recsys_core.models.pretrained import blank_rows, copy_pretrained, fill_missing, fill_random, mean_vector
from recsys_core.models.shards import table_shards
from recsys_core.models.task import EMBEDDINGS_PATH, RetrievalTask
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.sharding.sharders import bag_sharder
from recsys_core.training.process import Process

logger = logging.getLogger(__name__)
ADAGRAD_EPS = 1e-8


def build_model(
    spec: ModelSpec,
    *,
    loss: LossConfig,
    item_count_I: NDArray[np.int64],
    plan: PlanFile,
    process: Process,
    table_learning_rate: float,
    seed: int,
) -> DistributedModelParallel:
    """The task sharded exactly as `plan` says, tables updated in the backward pass by row-wise Adagrad.

    item_count_I: [items], training events per item. Raises InputError when the plan is for another model or world size.
    """
    plan.require(spec=spec, world_size=process.world_size)
    torch.manual_seed(seed)  # the towers' layers start equal on every rank
    probability_I = torch.from_numpy(item_count_I / max(item_count_I.sum(), 1)).float()
    task = RetrievalTask(spec, loss=loss, item_probability_I=probability_I, device=process.device)
    model = DistributedModelParallel(
        task,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=process.device,
        plan=plan.to_torchrec(EMBEDDINGS_PATH),
        sharders=[
            bag_sharder(optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=table_learning_rate, eps=ADAGRAD_EPS)
        ],
    )
    state = model.state_dict()
    with torch.no_grad():
        for table, (_, dim) in spec.tables.items():
            for shard in table_shards(state, table=table):
                fill_random(shard, table=table, dim=dim, seed=seed)
    return model


def blank_users(model: DistributedModelParallel, *, known: NDArray[np.bool_]) -> None:
    """Zero rows for users of whom nothing is known (known: [users]); they are then served by their history alone."""
    with torch.no_grad():
        for shard in table_shards(model.state_dict(), table="user"):
            blank_rows(shard, blank=~known)


def load_pretrained(
    model: DistributedModelParallel,
    *,
    embeddings: EmbeddingsManifest,
    vector_rows: Mapping[str, NDArray[np.int64]],
    config: PretrainedConfig,
) -> None:
    """Copies the vectors of this rank's rows from the one mapping that all ranks of a host share (the page cache).

    Args:
        vector_rows: for each table, the row of each of its rows in the table's vectors, -1 for none; what those start from is
            config.missing.
    """
    state = model.state_dict()
    for table, vector_row in vector_rows.items():
        vectors = np.load(embeddings.vectors(table), mmap_mode="r")
        missing = int((np.asarray(vector_row) < 0).sum())
        logger.info("table %s: %d of %d rows have no vector; they start %s", table, missing, len(vector_row), config.missing)
        mean_D = mean_vector(vectors, vector_row=vector_row, rescale=config.rescale) if config.missing == "mean" else None
        with torch.no_grad():
            for shard in table_shards(state, table=table):
                if config.missing != "random":
                    fill_missing(shard, vector_row=vector_row, value_D=mean_D)
                copy_pretrained(shard, vectors=vectors, vector_row=vector_row, rescale=config.rescale)
