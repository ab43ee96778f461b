"""Warm start: the decision whether to start from the champion, and the champion's rows and layers for the shards of each rank.

*Vectors from the log* are item vectors that are computed from the training events (`embeddings: {source: log}`).

Shapes: I items, V vectors from the log, R rows of the champion's table or of a shard, D width of a vector, C columns of the
accumulators of a shard.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import no_grad
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.optim.keyed import KeyedOptimizer

from recsys_core.dataset.layout import memory_map
from recsys_core.manifests import Dataset, InteractionsManifest
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import LocalShard, table_shards
from recsys_core.models.tables.initialisation import copy_rows
from recsys_core.models.task import RetrievalTask
from recsys_core.training.config import WarmStartConfig
from recsys_core.training.job import LOG_VECTORS_FILE, WarmStart
from recsys_core.training.model.dense_parallel import copy_into
from recsys_core.training.model.optimizers import accumulator_shards, has_accumulators
from recsys_core.training.model.sharded_model import PretrainedVectors, pretrained_vectors_by_table
from recsys_core.training.warm.leaked_events import count_leaked_events
from recsys_core.training.warm.starting_model import (
    Champion,
    carried_table_names,
    champion_parameters,
    champion_rows,
    require_compatible,
)

logger = logging.getLogger(__name__)
DENSE_FILE = "dense.safetensors"


def choose_start(
    config: WarmStartConfig | None, *, champion: Champion | None, interactions: InteractionsManifest
) -> tuple[Champion | None, str | None]:
    """Decide whether a training starts from the champion.

    The champion is not used if a training from scratch is due, or if the champion was trained on events that are now held out.
    In the second case, validation and test would measure memorised events.

    Returns:
        (champion, None) if the training starts from the champion; (None, reason) if the champion must not be used; (None, None)
        without a champion, or if `config` is None.
    """
    if config is None or champion is None:
        return None, None
    num_warm_starts = champion.train.num_warm_starts
    if num_warm_starts + 1 >= config.full_retrain_every:
        return None, (
            f"the champion (run {champion.run_id}) is the result of {num_warm_starts} warm starts in a row "
            f"(training.warm_start.full_retrain_every is {config.full_retrain_every})"
        )
    num_leaked_events = count_leaked_events(interactions, champion=champion.interactions)
    if num_leaked_events:
        num_held_out_events = interactions.num_validation_events + interactions.num_test_events
        return None, (
            f"the champion (run {champion.run_id}) was trained on {num_leaked_events:,} of the {num_held_out_events:,} "
            "validation and test events of this run, because the split has moved back in time or has changed"
        )
    return champion, None


def prepare_warm_start(champion: Champion, *, spec: ModelSpec, dataset: Dataset, folder: Path) -> WarmStart:
    """Write the files that WarmStart describes to the new folder `folder`, and log how many rows are carried over.

    Raises:
        InputError: the champion is not compatible with the settings of this run.
        StageError: a file of the champion has changed.
    """
    require_compatible(spec, champion=champion, dataset=dataset)
    layer_by_name = champion_parameters(spec, champion=champion, champion_tensors=load_file(champion.export.path(DENSE_FILE)))
    folder.mkdir(parents=True)
    save_file(layer_by_name, folder / DENSE_FILE)
    pretrained_by_table = pretrained_vectors_by_table(spec, dataset=dataset)
    if dataset.log_vectors is not None:
        _write_aligned_vectors(pretrained_by_table["item"], champion=champion, dataset=dataset, path=folder / LOG_VECTORS_FILE)
    carried_names = carried_table_names(spec, champion=champion)
    for table_name, table in spec.tables.items():
        if table_name in carried_names:
            champion_row = champion_rows(table_name, dataset=dataset, champion=champion)
            np.save(folder / f"rows_{table_name}.npy", champion_row)
            vector_row = pretrained_by_table[table_name].vector_row if table_name in pretrained_by_table else None
            description = _describe_rows(champion_row, vector_row=vector_row, initialisation=table.settings.missing_vector_init)
        else:
            reason = (
                "frozen" if table.is_frozen else "new" if table_name not in champion.spec.tables else "frozen in the champion"
            )
            description = f"{reason}, initialised as in a training from scratch"
        logger.info("warm start from run %s: table %s: %s", champion.run_id, table_name, description)
    return WarmStart(run_id=champion.run_id, export_folder=champion.export.folder, prepared_folder=folder)


def _write_aligned_vectors(log_vectors: PretrainedVectors, *, champion: Champion, dataset: Dataset, path: Path) -> None:
    """Write the vectors from the log, rotated onto the champion's item table. If the table has another width, write nothing."""
    champion_RD = memory_map(champion.export.path("table_item.npy"))
    dim, num_members = log_vectors.vectors.shape[1], champion.spec.config.num_members
    if num_members * dim == champion_RD.shape[1]:
        champion_row_I = champion_rows("item", dataset=dataset, champion=champion)
        vectors_by_member = [
            aligned_vectors(
                log_vectors.vectors,
                vector_row_I=log_vectors.vector_row,
                champion_row_I=champion_row_I,
                champion_RD=champion_RD[:, member * dim : (member + 1) * dim],
            )
            for member in range(num_members)
        ]
        np.save(path, np.concatenate(vectors_by_member, axis=1))


def _describe_rows(champion_row: NDArray[np.int64], *, vector_row: NDArray[np.int64] | None, initialisation: str) -> str:
    """Describe the origin of the initial values of a table's rows.

    >>> _describe_rows(np.array([3, 0, -1, -1]), vector_row=np.array([0, -1, 1, -1]), initialisation="random")
    '2 of 4 rows from the champion, 2 new (1 from their vector, 1 random)'
    """
    is_new = champion_row < 0
    counts_text = f"{(~is_new).sum():,} of {len(champion_row):,} rows from the champion, {is_new.sum():,} new"
    if not is_new.any():
        return counts_text
    num_new_with_vector = 0 if vector_row is None else int((vector_row[is_new] >= 0).sum())
    return f"{counts_text} ({num_new_with_vector:,} from their vector, {is_new.sum() - num_new_with_vector:,} {initialisation})"


def load_champion_weights(model: DistributedModelParallel, *, warm_start: WarmStart) -> None:
    """Collective. Overwrite the rows and layers that are carried over from the champion, on this rank's part of the model."""
    tensor_by_name = model.state_dict()
    task: RetrievalTask = get_unwrapped_module(model)
    parameter_by_name = dict(task.head.named_parameters())
    with no_grad():
        for table_name, path in warm_start.row_path_by_table().items():
            champion_row, weights = memory_map(path), memory_map(warm_start.export_folder / f"table_{table_name}.npy")
            for shard in table_shards(tensor_by_name, table=table_name):
                copy_rows(shard, vectors=weights, vector_row=champion_row, norm=None)
        for parameter_name, tensor in load_file(warm_start.prepared_folder / DENSE_FILE).items():
            copy_into(parameter_by_name[parameter_name], tensor)


def load_champion_accumulators(optimizer: KeyedOptimizer, *, spec: ModelSpec, warm_start: WarmStart) -> None:
    """Copy the champion's Adagrad accumulators of the rows that are carried over. The accumulators of new rows remain zero.

    Without the accumulators, Adagrad's first step on a trained row would be as large as the learning rate. Adam's moments are
    not carried over, because Adam estimates them again within its warm-up.
    """
    for table_name, path in warm_start.row_path_by_table().items():
        if not has_accumulators(spec.tables[table_name]):
            continue
        champion_row, accumulators = memory_map(path), memory_map(warm_start.export_folder / f"state_{table_name}.npy")
        for shard in accumulator_shards(optimizer, spec=spec, table=table_name):
            is_rowwise = shard.values_RC.shape[1] == 1
            # The champion may have one accumulator per row (ndim 1) and this model one per value, or the reverse.
            if is_rowwise:
                champion_values = (accumulators if accumulators.ndim == 1 else accumulators.mean(axis=1))[:, None]
            elif accumulators.ndim == 1:
                champion_values = np.broadcast_to(accumulators[:, None], (len(accumulators), spec.tables[table_name].dim))
            else:
                champion_values = accumulators
            accumulator_shard = LocalShard(shard.first_row, 0 if is_rowwise else shard.first_column, shard.values_RC)
            copy_rows(accumulator_shard, vectors=champion_values, vector_row=champion_row, norm=None)


def aligned_vectors(
    vector_VD: NDArray[np.float32],
    *,
    vector_row_I: NDArray[np.int64],
    champion_row_I: NDArray[np.int64],
    champion_RD: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Return vectors [V, D] from the log, rotated to be as near as possible to the champion's rows of the same items.

    A decomposition determines the vectors only up to a rotation, which differs between runs. Without the alignment, new items
    and frozen vectors would not fit the rows and layers that are carried over.

    The rotation is fitted to vectors and rows of norm 1, so each item has the same influence on it. The result keeps the norms
    of the vectors.

    Args:
        vector_row_I: row of each item's vector, -1 if it has no vector.
        champion_row_I: row of each item in the champion's table, -1 for a new item.

    >>> rows, turned_RD = np.arange(2), np.array([[0, 1], [-1, 0]], np.float32)
    >>> aligned_vectors(np.eye(2, dtype=np.float32), vector_row_I=rows, champion_row_I=rows, champion_RD=turned_RD).tolist()
    [[0.0, 1.0], [-1.0, 0.0]]
    """
    is_common_I = (vector_row_I >= 0) & (champion_row_I >= 0)
    unit_vector_ID = _unit_rows(vector_VD[vector_row_I[is_common_I]])
    unit_champion_ID = _unit_rows(champion_RD[champion_row_I[is_common_I]])
    left, _, right = np.linalg.svd(unit_vector_ID.T @ unit_champion_ID)
    rotated_VD: NDArray[np.float32] = np.ascontiguousarray(vector_VD @ (left @ right), np.float32)
    return rotated_VD + 0.0  # no negative zeros


def _unit_rows(rows_RD: NDArray[np.float32]) -> NDArray[Any]:
    norm_R1 = np.linalg.norm(rows_RD, axis=1, keepdims=True)
    unit_RD: NDArray[Any] = rows_RD / np.maximum(norm_R1, np.finfo(np.float32).tiny)
    return unit_RD
