"""The spectral block of an export: its weight is chosen on the validation users, and all vectors get it.

The launching process appends the block after the ranks have written the trained vectors.

Shapes: I items, B queries, T width of a trained vector, M width of the block, D width of the result.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch.nn.functional import normalize

from recsys_core.closed_form.linear_models import log_matrix
from recsys_core.closed_form.spectral_block import block_factors
from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import chunk_slices
from recsys_core.dataset.layout import save_npy
from recsys_core.models.config import SpectralBlockSettings
from recsys_core.models.spec import ModelSpec
from recsys_core.models.spectral_block import BLOCK_HISTORY_FILE, BLOCK_MAPS_FILE, history_totals
from recsys_core.training.config import ValidationConfig
from recsys_core.training.export.validated_choice import Vectors, best_weight

CHUNK_ROWS = 1 << 16
RELATIVE_RIDGE = 1e-8
"""Ridge of the moments, relative to their mean diagonal, because fewer vectors than their width have a singular matrix."""
Floats32 = NDArray[np.float32]
SPLITS: tuple[EvaluationSplit, ...] = ("validation", "test")


def append_block(spec: ModelSpec, *, store: EventStore, validation: ValidationConfig | None, folder: Path) -> float:
    """Append the block to the item and query vectors of the export in `folder`, write its files, and return its weight.

    The weight is a multiple of the standard deviation of the trained scores over the catalogue. Validation and test events
    contribute to the histories of queries alone.

    Raises:
        InputError: there are several weights and no validation events, or too few training events for the block.
    """
    block = spec.config.spectral_block
    assert block is not None
    matrix_UI = log_matrix(store, "validation", max_events=block.max_events)
    history_IM, candidate_IM = block_factors(matrix_UI, dim=block.dim, item_exponent=block.item_exponent)
    item_IT = np.load(folder / "item_vectors.npy")
    item_IC = np.concatenate([item_IT, candidate_IM], axis=1)
    users_by_split = {split: np.load(folder / f"query_users_{split}.npy") for split in SPLITS}
    trained_by_split = {split: np.load(folder / f"query_vectors_{split}.npy") for split in SPLITS}
    unit = _score_deviation(np.concatenate(list(trained_by_split.values())), item_IT)
    query_by_split = {
        split: np.concatenate([query_BT, unit * _blocks(block, store, users_by_split[split], split, history_IM)], axis=1)
        for split, query_BT in trained_by_split.items()
    }
    weight = best_weight(
        block.weights,
        lambda query_BC, weight: query_BC * _column_weights(query_BC.shape[1], block, weight),
        setting="model.spectral_block.weights",
        vectors=Vectors(users_by_split["validation"], query_by_split["validation"], item_IC),
        spec=spec,
        store=store,
        validation=validation,
    )
    weight_C = _column_weights(item_IC.shape[1], block, weight)
    query_by_split = {split: query_BC * weight_C for split, query_BC in query_by_split.items()}
    query_map, item_map = (np.eye(len(weight_C), dtype=np.float32) for _ in range(2))
    item_moments_CC = _moments(item_IC)
    if block.output_dim is not None:
        query_moments_CC = _moments(np.concatenate(list(query_by_split.values())))
        query_map, item_map = reduction(query_moments_CC, item_moments_CC, dim=block.output_dim)
    save_npy(folder / "item_vectors.npy", item_IC @ item_map)
    for split, query_BC in query_by_split.items():
        save_npy(folder / f"query_vectors_{split}.npy", query_BC @ query_map)
    save_npy(folder / BLOCK_HISTORY_FILE, history_IM)
    # The blocks of served queries have the length 1.
    weight_C[-block.dim :] *= unit
    maps = {"query_map": weight_C[:, None] * query_map, "item_map": np.ascontiguousarray(item_map)}
    maps["similar_map"] = similar_map(query_map, item_map, item_moments_CC, trained_dim=spec.config.trained_dim)
    save_file(maps, folder / BLOCK_MAPS_FILE)
    return weight


def reduction(query_moments_CC: NDArray[Any], item_moments_CC: NDArray[Any], *, dim: int) -> tuple[Floats32, Floats32]:
    """Return maps [C, D] of queries and of items to `dim` numbers, so that the sum of squared changes of all scores is least.

    With the Cholesky factors Q'Q = Lq Lq' and P'P = Lp Lp' of the moments of the queries Q and the items P, the score matrix
    Q P' has the singular values of Lq' Lp = A S B'. The maps are Lq'^-1 A S and Lp'^-1 B with the first `dim` columns.

    >>> rng = np.random.default_rng(0)
    >>> query, item = rng.normal(size=(9, 4)), rng.normal(size=(7, 4)) * [3, 2, 1, 0.01]
    >>> query_map, item_map = reduction(query.T @ query, item.T @ item, dim=3)
    >>> bool(np.abs(query @ query_map @ (item @ item_map).T - query @ item.T).max() < 0.1)
    True
    """
    query_root_CC, item_root_CC = (np.linalg.cholesky(moments) for moments in (query_moments_CC, item_moments_CC))
    left, value_D, right = np.linalg.svd(query_root_CC.T @ item_root_CC)
    query_map = np.linalg.solve(query_root_CC.T, left[:, :dim] * value_D[:dim])
    item_map = np.linalg.solve(item_root_CC.T, right[:dim].T)
    return query_map.astype(np.float32), item_map.astype(np.float32)


def similar_map(query_map: Floats32, item_map: Floats32, item_moments_CC: NDArray[Any], *, trained_dim: int) -> Floats32:
    """Return the map [D, D] of an item's vector to the query for items whose trained vectors are similar.

    The candidate blocks of two items have no meaningful inner product: they are as long as the item is popular. The trained
    vector is estimated from the exported one by least squares; without a reduction, the estimate is exact.
    """
    exported_moments_DD = item_map.T @ item_moments_CC @ item_map
    estimate_DC = np.linalg.solve(exported_moments_DD, item_map.T @ item_moments_CC)
    return (estimate_DC[:, :trained_dim] @ query_map[:trained_dim]).astype(np.float32)


def _blocks(
    block: SpectralBlockSettings, store: EventStore, user_B: NDArray[np.int64], split: EvaluationSplit, history_IM: Floats32
) -> Floats32:
    """Return the block of each user's query, of length 1, [B, M]; zeros for an empty history."""
    block_BM = np.zeros((len(user_B), block.dim), np.float32)
    for chunk in chunk_slices(len(user_B), length=CHUNK_ROWS):
        history = store.items_before(user_B[chunk], split, max_items=block.history_length)
        totals_BM = history_totals(torch.from_numpy(history_IM[history.values_L]), torch.from_numpy(history.offset))
        block_BM[chunk] = normalize(totals_BM, dim=1).numpy()
    return block_BM


def _score_deviation(query_BT: Floats32, item_IT: Floats32) -> float:
    """Return the root of the mean variance of the scores of a query over the items; 1 without queries."""
    if not len(query_BT):
        return 1.0
    covariance_TT = np.atleast_2d(np.cov(item_IT, rowvar=False))
    return float(np.sqrt(np.einsum("bt,tu,bu->b", query_BT, covariance_TT, query_BT, optimize=True).mean()))


def _column_weights(width: int, block: SpectralBlockSettings, weight: float) -> Floats32:
    """Return 1 for each trained column, and the weight for each column of the block."""
    weight_C = np.ones(width, np.float32)
    weight_C[-block.dim :] = weight
    return weight_C


def _moments(vector_RC: Floats32) -> NDArray[Any]:
    """Return the second moments of the vectors, [C, C], in double precision; the identity without vectors."""
    width = vector_RC.shape[1]
    if not len(vector_RC):
        return np.eye(width)
    moments_CC = np.zeros((width, width))
    for chunk in _chunks(vector_RC):
        moments_CC += chunk.T @ chunk
    moments_CC[np.diag_indices(width)] += RELATIVE_RIDGE * moments_CC.trace() / width
    return moments_CC


def _chunks(vector_RC: Floats32) -> Iterator[NDArray[np.float64]]:
    return (vector_RC[chunk].astype(np.float64) for chunk in chunk_slices(len(vector_RC), length=CHUNK_ROWS))
