"""Warm start: the decision whether to start from the champion, and the champion's rows and layers for the shards of each rank.

*Vectors from the log* are item vectors that are computed from the training events (`embeddings: {source: log}`). *Projected
vectors* are read from a file and projected onto their principal components (`embeddings.pca_dim`).

Shapes: T rows of a table, V pretrained vectors, N vectors of a chunk or sample, R rows of the champion's table or of a shard, D
width of a vector, C columns of the accumulators of a shard.
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

from recsys_core.dataset.jagged import chunk_slices
from recsys_core.dataset.layout import allocate_npy, memory_map
from recsys_core.errors import InputError
from recsys_core.manifests import Dataset, InteractionsManifest
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.embedding_tables import LocalShard, table_shards
from recsys_core.models.tables.initialisation import copy_rows
from recsys_core.models.tables.table_config import TEACHER_TABLE
from recsys_core.models.task import RetrievalTask
from recsys_core.training.config import WarmStartConfig
from recsys_core.training.job import WarmStart
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
ROTATION_CHUNK_ROWS = 1 << 18
"""Number of vectors that are rotated at once."""
MAX_COMPARED_VECTORS = 10_000
"""Largest number of frozen vectors that are compared with the champion's vectors."""
COMPARED_QUANTILE, MIN_COSINE = 0.9, 0.5
"""Quantile of the cosines between old and new vectors of the same ids, and smallest quantile for a warm start."""


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
    pretrained_by_table = pretrained_vectors_by_table(spec, dataset=dataset)
    row_ranges_by_table = _row_ranges_to_rotate(dataset)
    for table_name, pretrained_vectors in pretrained_by_table.items():
        champion_table = champion.spec.tables.get(table_name)
        is_frozen_in_both = spec.tables[table_name].is_frozen and champion_table is not None and champion_table.is_frozen
        if is_frozen_in_both and table_name not in (*row_ranges_by_table, TEACHER_TABLE):
            champion_row_T = champion_rows(table_name, dataset=dataset, champion=champion)
            _require_similar_vectors(table_name, pretrained_vectors, champion=champion, champion_row_T=champion_row_T)
    folder.mkdir(parents=True)
    save_file(layer_by_name, folder / DENSE_FILE)
    for table_name, row_ranges in row_ranges_by_table.items():
        if table_name in pretrained_by_table and table_name in champion.spec.tables:
            champion_row_T = champion_rows(table_name, dataset=dataset, champion=champion)
            _write_rotated_vectors(
                pretrained_by_table[table_name],
                row_ranges=row_ranges,
                champion=champion,
                champion_row_T=champion_row_T,
                champion_RD=memory_map(champion.export.path(f"table_{table_name}.npy")),
                path=folder / f"vectors_{table_name}.npy",
            )
    carried_tables = carried_table_names(spec, champion=champion)
    for table_name, table in spec.tables.items():
        if table_name in carried_tables:
            champion_row_T = champion_rows(table_name, dataset=dataset, champion=champion)
            np.save(folder / f"rows_{table_name}.npy", champion_row_T)
            vector_row_T = pretrained_by_table[table_name].vector_row if table_name in pretrained_by_table else None
            description = _describe_rows(
                champion_row_T, vector_row_T=vector_row_T, initialisation=table.settings.missing_vector_init
            )
        else:
            reason = (
                "frozen" if table.is_frozen else "new" if table_name not in champion.spec.tables else "frozen in the champion"
            )
            description = f"{reason}, initialised as in a training from scratch"
        logger.info("warm start from run %s: table %s: %s", champion.run_id, table_name, description)
    return WarmStart(run_id=champion.run_id, export_folder=champion.export.folder, prepared_folder=folder)


def _require_similar_vectors(
    table_name: str, pretrained_vectors: PretrainedVectors, *, champion: Champion, champion_row_T: NDArray[np.int64]
) -> None:
    """Raise InputError if almost no frozen vector is similar to the champion's vector of the same id.

    The vectors then come from another encoder, and the champion's layers do not fit them. Many vectors may differ in any case,
    because the champion has random rows for ids without a vector.
    """
    common_rows = np.flatnonzero((pretrained_vectors.vector_row >= 0) & (champion_row_T >= 0))
    common_rows = common_rows[:: -(-len(common_rows) // MAX_COMPARED_VECTORS) or 1]
    if not len(common_rows):
        return
    vector_ND = pretrained_vectors.vectors[pretrained_vectors.vector_row[common_rows]]
    champion_RD = memory_map(champion.export.path(f"table_{table_name}.npy"))
    champion_ND = champion_RD[champion_row_T[common_rows], : vector_ND.shape[1]]
    cosine_quantile = float(np.quantile((_unit_rows(vector_ND) * _unit_rows(champion_ND)).sum(axis=1), COMPARED_QUANTILE))
    if cosine_quantile < MIN_COSINE:
        raise InputError(
            f"embeddings: {COMPARED_QUANTILE:.0%} of the frozen vectors of table {table_name!r} have at most a cosine of "
            f"{cosine_quantile:.2f} with the vectors of the same ids in the champion (run {champion.run_id}), but at least "
            f"{MIN_COSINE:g} is needed, because the champion's layers do not fit other vectors; set training.warm_start to "
            "null for this run, or go back to the old vectors"
        )


def _row_ranges_to_rotate(dataset: Dataset) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return the row ranges (first row, end) of pretrained vectors whose decomposition has an arbitrary rotation, by table."""
    vector_tables = {} if dataset.embeddings is None else dataset.embeddings.tables
    row_ranges_by_table = {name: vector_table.projected_rows for name, vector_table in vector_tables.items()}
    if dataset.log_vectors is not None:
        row_ranges_by_table["item"] = ((0, dataset.log_vectors.num_vectors),)
    return {name: row_ranges for name, row_ranges in row_ranges_by_table.items() if row_ranges}


def _write_rotated_vectors(
    pretrained_vectors: PretrainedVectors,
    *,
    row_ranges: tuple[tuple[int, int], ...],
    champion: Champion,
    champion_row_T: NDArray[np.int64],
    champion_RD: NDArray[np.float32],
    path: Path,
) -> None:
    """Write the vectors, each row range rotated onto the champion's table. If the table has another width, write nothing."""
    vector_VD, vector_row_T = pretrained_vectors.vectors, pretrained_vectors.vector_row
    dim, num_members = vector_VD.shape[1], champion.spec.config.num_members
    if num_members * dim != champion_RD.shape[1]:
        return
    rotated_VD = allocate_npy(path, dtype=np.float32, shape=(len(vector_VD), num_members * dim))
    for member in range(num_members):
        columns = slice(member * dim, (member + 1) * dim)
        for chunk in chunk_slices(len(vector_VD), length=ROTATION_CHUNK_ROWS):
            rotated_VD[chunk, columns] = vector_VD[chunk]
        for first_row, end_row in row_ranges:
            is_in_range_T = (vector_row_T >= first_row) & (vector_row_T < end_row)
            rotation_DD = rotation_onto_champion(
                vector_VD,
                vector_row_T=np.where(is_in_range_T, vector_row_T, -1),
                champion_row_T=champion_row_T,
                champion_RD=champion_RD[:, columns],
            )
            for chunk in chunk_slices(end_row - first_row, length=ROTATION_CHUNK_ROWS):
                rows = slice(first_row + chunk.start, first_row + chunk.stop)
                rotated_VD[rows, columns] = vector_VD[rows] @ rotation_DD + 0.0  # no negative zeros


def _describe_rows(champion_row_T: NDArray[np.int64], *, vector_row_T: NDArray[np.int64] | None, initialisation: str) -> str:
    """Describe the origin of the initial values of a table's rows.

    >>> _describe_rows(np.array([3, 0, -1, -1]), vector_row_T=np.array([0, -1, 1, -1]), initialisation="random")
    '2 of 4 rows from the champion, 2 new (1 from their vector, 1 random)'
    """
    is_new = champion_row_T < 0
    counts_text = f"{(~is_new).sum():,} of {len(champion_row_T):,} rows from the champion, {is_new.sum():,} new"
    if not is_new.any():
        return counts_text
    num_new_with_vector = 0 if vector_row_T is None else int((vector_row_T[is_new] >= 0).sum())
    return f"{counts_text} ({num_new_with_vector:,} from their vector, {is_new.sum() - num_new_with_vector:,} {initialisation})"


def load_champion_weights(model: DistributedModelParallel, *, warm_start: WarmStart) -> None:
    """Collective. Overwrite the rows and layers that are carried over from the champion, on this rank's part of the model."""
    tensor_by_name = model.state_dict()
    task: RetrievalTask = get_unwrapped_module(model)
    parameter_by_name = dict(task.head.named_parameters())
    with no_grad():
        for table_name, path in warm_start.row_path_by_table().items():
            champion_row_T, champion_RD = memory_map(path), memory_map(warm_start.export_folder / f"table_{table_name}.npy")
            for shard in table_shards(tensor_by_name, table=table_name):
                copy_rows(shard, vectors=champion_RD, vector_row=champion_row_T, norm=None)
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
        champion_row_T, accumulators = memory_map(path), memory_map(warm_start.export_folder / f"state_{table_name}.npy")
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
            copy_rows(accumulator_shard, vectors=champion_values, vector_row=champion_row_T, norm=None)


def rotation_onto_champion(
    vector_VD: NDArray[np.float32],
    *,
    vector_row_T: NDArray[np.int64],
    champion_row_T: NDArray[np.int64],
    champion_RD: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Return the rotation [D, D] of the vectors that brings them as near as possible to the champion's rows of the same ids.

    A decomposition determines the vectors only up to a rotation, which differs between runs. Without the rotation, new ids and
    frozen vectors would not fit the rows and layers that are carried over.

    The rotation is fitted to vectors and rows of norm 1, so each id has the same influence on it.

    Args:
        vector_row_T: row of each id's vector, -1 if it has no vector.
        champion_row_T: row of each id in the champion's table, -1 for a new id.

    >>> rows, turned_RD = np.arange(2), np.array([[0, 1], [-1, 0]], np.float32)
    >>> vectors = np.eye(2, dtype=np.float32)
    >>> rotation_DD = rotation_onto_champion(vectors, vector_row_T=rows, champion_row_T=rows, champion_RD=turned_RD)
    >>> (vectors @ rotation_DD + 0.0).tolist()
    [[0.0, 1.0], [-1.0, 0.0]]
    """
    common_rows = np.flatnonzero((vector_row_T >= 0) & (champion_row_T >= 0))
    product_DD = np.zeros((vector_VD.shape[1], vector_VD.shape[1]), np.float32)
    for chunk in chunk_slices(len(common_rows), length=ROTATION_CHUNK_ROWS):
        unit_vector_ND = _unit_rows(vector_VD[vector_row_T[common_rows[chunk]]])
        unit_champion_ND = _unit_rows(champion_RD[champion_row_T[common_rows[chunk]]])
        product_DD += unit_vector_ND.T @ unit_champion_ND
    left_DD, _, right_DD = np.linalg.svd(product_DD)
    rotation_DD: NDArray[np.float32] = left_DD @ right_DD
    return rotation_DD


def _unit_rows(rows_RD: NDArray[np.float32]) -> NDArray[Any]:
    norm_R1 = np.linalg.norm(rows_RD, axis=1, keepdims=True)
    unit_RD: NDArray[Any] = rows_RD / np.maximum(norm_R1, np.finfo(np.float32).tiny)
    return unit_RD
