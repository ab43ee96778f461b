"""The step that appends the spectral block to exported vectors, with the weight that ranks best for the validation users.

The launching process appends the block after the ranks have written the trained vectors.

Shapes: U users, I items, B queries, T width of a trained vector, M width of the block, C = T + M width of both together, D
width of the result, R rows of a file, L items of all histories.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch.nn.functional import normalize

from recsys_core.closed_form.linear_models import log_matrix
from recsys_core.closed_form.spectral_block import CHUNK_ROWS, block_factors, covariance, row_chunks, second_moments
from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import chunk_slices
from recsys_core.dataset.layout import allocate_npy, memory_map, save_npy
from recsys_core.models.score_config import SpectralBlockSettings
from recsys_core.models.score_terms import BLOCK_HISTORY_FILE, BLOCK_MAPS_FILE, history_totals
from recsys_core.models.spec import ModelSpec
from recsys_core.training.config import ValidationConfig
from recsys_core.training.export.validated_choice import best_weight

RELATIVE_RIDGE = 1e-8
"""Ridge of the moments, relative to the mean of their diagonal. Without a ridge, the moments of fewer than C vectors are
singular."""
Floats32 = NDArray[np.float32]
SPLITS: tuple[EvaluationSplit, ...] = ("validation", "test")


def append_block(
    spec: ModelSpec,
    *,
    store: EventStore,
    validation: ValidationConfig | None,
    folder: Path,
    train_store: EventStore | None = None,
) -> float:
    """Append the block to the item and query vectors of the export in `folder`, write the block's files, and return its weight.

    The weight is a multiple of the standard deviation of the trained scores over the catalogue. Validation and test events
    are used only in the histories of queries. All item vectors are in memory, query vectors only in chunks.

    Args:
        train_store: store with the training events from which the block is computed; None means `store`. It numbers users and
            items in the same way as `store`.

    Raises:
        InputError: there are several weights but no validation events, or there are too few training events for the block.
    """
    block_settings, trained_dim = spec.config.spectral_block, spec.config.trained_dim
    assert block_settings is not None
    matrix_UI = log_matrix(train_store or store, before="validation", max_events=block_settings.max_events)
    history_factor_IM, candidate_factor_IM = block_factors(
        matrix_UI, dim=block_settings.dim, item_exponent=block_settings.item_exponent
    )
    save_npy(folder / BLOCK_HISTORY_FILE, history_factor_IM)
    item_vector_IC = np.concatenate([memory_map(folder / "item_vectors.npy"), candidate_factor_IM], axis=1)
    del matrix_UI, candidate_factor_IM
    query_file_by_split = {split: QueryFile(folder, split, store, block_settings, history_factor_IM) for split in SPLITS}
    query_chunks = (chunk for query_file in query_file_by_split.values() for chunk in query_file.chunks())
    query_moments_CC, item_moments_CC = (
        second_moments(vector_chunks, width=item_vector_IC.shape[1])
        for vector_chunks in (query_chunks, row_chunks(item_vector_IC))
    )
    num_queries = sum(len(query_file.user_row_B) for query_file in query_file_by_split.values())
    trained_columns = slice(trained_dim)
    trained_moments_TT = query_moments_CC[trained_columns, trained_columns]
    mean_score_variance = (trained_moments_TT * covariance(item_vector_IC[:, trained_columns])).sum() / max(1, num_queries)
    # If all item vectors are equal, rounding may make the variance negative.
    score_std = float(np.sqrt(max(mean_score_variance, 0.0))) if num_queries else 1.0
    weight = best_weight(
        block_settings.weights,
        lambda query_BC, weight: query_BC * _column_weights(query_BC.shape[1], block_settings, weight * score_std),
        vectors_of_users=query_file_by_split["validation"].vectors_of,
        item_vector_ID=item_vector_IC,
        setting="model.spectral_block.weights",
        spec=spec,
        store=store,
        validation=validation,
    )
    weight_C = _column_weights(item_vector_IC.shape[1], block_settings, weight * score_std)
    query_map_CD, item_map_CD = np.diag(weight_C), np.eye(len(weight_C), dtype=np.float32)
    item_moments_CC = _with_ridge(item_moments_CC)
    if block_settings.output_dim is not None:
        weighted_moments_CC = _with_ridge(weight_C[:, None] * query_moments_CC * weight_C)
        query_map_CD, item_map_CD = reduction_maps(weighted_moments_CC, item_moments_CC, dim=block_settings.output_dim)
        query_map_CD = weight_C[:, None] * query_map_CD
    for query_file in query_file_by_split.values():
        _write_product(query_file.path, query_file.chunks(), map_CD=query_map_CD, num_rows=len(query_file.user_row_B))
    _write_product(folder / "item_vectors.npy", row_chunks(item_vector_IC), map_CD=item_map_CD, num_rows=len(item_vector_IC))
    map_by_name = {"query_map": query_map_CD, "item_map": np.ascontiguousarray(item_map_CD)}
    map_by_name["similar_map"] = similar_map(query_map_CD, item_map_CD, item_moments_CC, trained_dim=trained_dim)
    save_file(map_by_name, folder / BLOCK_MAPS_FILE)
    return weight


@dataclass(frozen=True)
class QueryFile:
    """The trained query vectors of a split in an export. Reading appends each query's block, scaled to the norm 1."""

    folder: Path
    split: EvaluationSplit
    store: EventStore
    block_settings: SpectralBlockSettings
    history_factor_IM: Floats32

    @property
    def path(self) -> Path:
        """Path of the file with the vectors."""
        return self.folder / f"query_vectors_{self.split}.npy"

    @cached_property
    def user_row_B(self) -> NDArray[np.int64]:
        """Rows of the users, ascending."""
        return memory_map(self.folder / f"query_users_{self.split}.npy")

    def chunks(self) -> Iterator[Floats32]:
        """Yield the vectors of all users, [B, C] for each chunk of users in order."""
        for chunk in chunk_slices(len(self.user_row_B), length=CHUNK_ROWS):
            yield self.vectors_of(self.user_row_B[chunk])

    def vectors_of(self, user_row_B: NDArray[np.int64]) -> Floats32:
        """Return the vectors of these users, [B, C]. The block of an empty history is zero."""
        history = self.store.items_before(user_row_B, self.split, max_items=self.block_settings.history_length)
        total_BM = history_totals(
            torch.from_numpy(self.history_factor_IM),
            torch.from_numpy(history.values_L.astype(np.int64)),
            torch.from_numpy(history.offset),
        )
        query_BT = memory_map(self.path)[np.searchsorted(self.user_row_B, user_row_B)]
        return np.concatenate([query_BT, normalize(total_BM, dim=1).numpy()], axis=1)


def reduction_maps(query_moments_CC: NDArray[Any], item_moments_CC: NDArray[Any], *, dim: int) -> tuple[Floats32, Floats32]:
    """Return matrices [C, D] that reduce queries and items to `dim` columns with the least squared error of the scores.

    With the Cholesky factors Q'Q = Lq Lq' and P'P = Lp Lp' of the moments of the queries Q and the items P, the score matrix
    Q P' has the singular values of Lq' Lp = A S B'. The result is the first `dim` columns of Lq'^-1 A S and of Lp'^-1 B.

    >>> rng = np.random.default_rng(0)
    >>> query, item = rng.normal(size=(9, 4)), rng.normal(size=(7, 4)) * [3, 2, 1, 0.01]
    >>> query_map_CD, item_map_CD = reduction_maps(query.T @ query, item.T @ item, dim=3)
    >>> bool(np.abs(query @ query_map_CD @ (item @ item_map_CD).T - query @ item.T).max() < 0.1)
    True
    """
    query_root_CC, item_root_CC = (np.linalg.cholesky(moments) for moments in (query_moments_CC, item_moments_CC))
    left_CC, singular_value_C, right_CC = np.linalg.svd(query_root_CC.T @ item_root_CC)
    query_map_CD = np.linalg.solve(query_root_CC.T, left_CC[:, :dim] * singular_value_C[:dim])
    item_map_CD = np.linalg.solve(item_root_CC.T, right_CC[:dim].T)
    return query_map_CD.astype(np.float32), item_map_CD.astype(np.float32)


def similar_map(query_map_CD: Floats32, item_map_CD: Floats32, item_moments_CC: NDArray[Any], *, trained_dim: int) -> Floats32:
    """Return the matrix [D, D] that turns an item vector into a query for items with similar trained vectors.

    The candidate blocks of two items have no meaningful inner product, because their norms grow with the popularity. The
    trained vector is estimated from the exported vector by least squares. Without a reduction, the estimate is exact.
    """
    exported_moments_DD = item_map_CD.T @ item_moments_CC @ item_map_CD
    estimate_DC = np.linalg.solve(exported_moments_DD, item_map_CD.T @ item_moments_CC)
    return (estimate_DC[:, :trained_dim] @ query_map_CD[:trained_dim]).astype(np.float32)


def _column_weights(width: int, block_settings: SpectralBlockSettings, weight: float) -> Floats32:
    """Return the weight of each column: 1 for the trained columns, and `weight` for the columns of the block."""
    weight_C = np.ones(width, np.float32)
    weight_C[-block_settings.dim :] = weight
    return weight_C


def _with_ridge(moments_CC: NDArray[Any]) -> NDArray[Any]:
    """Add a ridge to the moments. If there are no vectors and all moments are 0, return the identity."""
    trace = moments_CC.trace()
    return moments_CC + np.eye(len(moments_CC)) * (RELATIVE_RIDGE * trace / len(moments_CC) if trace else 1.0)


def _write_product(path: Path, chunks: Iterable[Floats32], *, map_CD: Floats32, num_rows: int) -> None:
    """Write the product of the vectors and the matrix to `path`. The chunks may come from the old file at `path`."""
    new_path, first_row = path.with_name(f"{path.name}.new"), 0
    product_RD = allocate_npy(new_path, dtype=np.float32, shape=(num_rows, map_CD.shape[1]))
    for chunk_RC in chunks:
        product_RD[first_row : first_row + len(chunk_RC)] = chunk_RC @ map_CD
        first_row += len(chunk_RC)
    new_path.replace(path)
