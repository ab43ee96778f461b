"""Baselines in closed form, computed from the log alone: EASE, a truncated SVD, and item-to-item co-occurrence.

Their memory and time grow with the number of item pairs, so the log is sampled and the catalogue limited
(`evaluation.closed_form`).

Shapes: U users, I items, C items in the order of the scores, B queries, D singular vectors, R rows of a block, L entries of a
sparse matrix.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array, vstack

from recsys_core.closed_form.linear_models import (
    Floats32,
    ease_weights,
    inverse_power,
    log_matrix,
    singular_vectors,
    user_item_matrix,
)
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation.config import ClosedFormConfig
from recsys_core.evaluation.held_out import sampled_users
from recsys_core.evaluation.metrics import TargetPositions, ndcg
from recsys_core.evaluation.ranking.catalogue import rank_catalogue
from recsys_core.evaluation.ranking.chunks import TILE_COLUMNS, ScoreTile
from recsys_core.evaluation.ranking.queries import Queries

MAX_EVENTS = 5_000_000
"""A model is computed from at most this many events. If the log has more, users are sampled."""
MAX_EXPONENT_SEARCH_EVENTS, MAX_EXPONENT_SEARCH_USERS = 1_000_000, 3_000
"""Largest numbers of training events and validation users for the choice of the item exponent. Each tested exponent needs a
decomposition, so the number of events is smaller than MAX_EVENTS."""
MAX_HISTORY = 200
"""Number of newest items of a user that form pairs. The number of pairs grows with the square of this number."""
MAX_NEIGHBOURS = 100
"""Number of an item's most similar items that contribute to the co-occurrence scores."""
BLOCK_PAIRS = 1 << 22
"""Number of item pairs that are counted at once. Sorting takes about 100 bytes per pair."""


def spectral_vectors(
    matrix_UI: csr_array, *, rank: int, history_BI: csr_array, user_exponent: float, item_exponent: float
) -> tuple[Floats32, Floats32]:
    """Return query vectors [B, D] and item vectors [I, D] of a low-pass filter of the log.

    Args:
        matrix_UI: the matrix X below: 1 for each item of a user.
        history_BI: the matrix H below: 1 for each item of a query's history.

    The diagonal matrix Du has the number of items of each user, and Di has the number of users of each item. V are the first
    right singular vectors of the normalised matrix Du^-a X Di^-b, where a is `user_exponent` and b is `item_exponent`. The
    scores are H Di^-b V V' Di^b. If a and b are 0.5, this is the ideal low-pass filter of GF-CF (Shen et al., CIKM 2021).
    """
    weight_ID, vector_ID = spectral_weights(matrix_UI, rank=rank, user_exponent=user_exponent, item_exponent=item_exponent)
    return _spectral_query_vectors(history_BI, weight_ID), vector_ID


def spectral_weights(
    matrix_UI: csr_array, *, rank: int, user_exponent: float, item_exponent: float
) -> tuple[NDArray[Any], Floats32]:
    """Return the item weights and the item vectors, both [I, D]. A query vector is the sum of the weights of a history's items.

    See `spectral_vectors` for the formula.
    """
    num_vectors, num_items = min(rank, min(matrix_UI.shape) - 1), matrix_UI.shape[1]
    if num_vectors < 1:
        return np.zeros((num_items, 1), np.float32), np.zeros((num_items, 1), np.float32)
    _, vector_ID = singular_vectors(
        matrix_UI, num_vectors=num_vectors, user_exponent=user_exponent, item_exponent=item_exponent
    )
    num_users_I = matrix_UI.sum(axis=0)
    weight_ID = vector_ID * inverse_power(num_users_I, item_exponent)[:, None]
    return weight_ID, np.ascontiguousarray(vector_ID * num_users_I[:, None] ** item_exponent, np.float32)


def _spectral_query_vectors(history_BI: csr_array, weight_ID: NDArray[Any]) -> Floats32:
    """Return the query vectors, [B, D]."""
    return np.ascontiguousarray(history_BI @ weight_ID, np.float32)


def neighbour_weights(matrix_UI: csr_array) -> csr_array:
    """Return the cosine similarities of items, [I, I]. Only each item's nearest neighbours have a similarity above 0.

    The cosine of two items is the number of users with both items, divided by sqrt(users of one item x users of the other
    item) (Sarwar et al., WWW 2001).

    >>> neighbour_weights(csr_array(np.array([[1, 1, 0], [1, 1, 0], [0, 1, 1]], np.float32))).toarray().round(2)
    array([[0.  , 0.82, 0.  ],
           [0.82, 0.  , 0.58],
           [0.  , 0.58, 0.  ]], dtype=float32)
    """
    num_items = matrix_UI.shape[1]
    unit_UI = matrix_UI @ diags_array(inverse_power(matrix_UI.sum(axis=0), 0.5))
    unit_IU = unit_UI.T.tocsr()
    cumulative_num_pairs_I = np.cumsum(matrix_UI.T @ np.diff(matrix_UI.indptr).astype(np.float64))
    block_I = (cumulative_num_pairs_I // BLOCK_PAIRS).astype(np.int64)  # the co-occurrences of a block fit into memory
    block_bounds = [0, *(np.flatnonzero(np.diff(block_I)) + 1).tolist(), num_items]
    weight_blocks = [
        _nearest_neighbours((unit_IU[start:end] @ unit_UI).tocsr(), first_row=start) for start, end in pairwise(block_bounds)
    ]
    return vstack(weight_blocks, format="csr")


class LinearScores(NamedTuple):
    """The scores of a linear model, for `rank_by_scores`. columns_per_tile: number of columns that are computed at once."""

    score_tile: ScoreTile
    columns_per_tile: int


LinearModel = Callable[[JaggedArray], LinearScores]
"""A function that returns the scores of queries, given the item rows of their histories."""


def linear_model(config: ClosedFormConfig, *, store: EventStore, order_I: NDArray[Any]) -> LinearModel:
    """Compute EASE, or the truncated SVD if there are more than `ease_max_items` items, from the events before the test split.

    order_I: item row of each column of the scores.
    """
    matrix_UI = log_matrix(store, before="test", max_events=MAX_EVENTS)
    if store.num_items <= config.ease_max_items:
        weight_IC = np.ascontiguousarray(ease_weights(matrix_UI, l2=config.l2)[:, order_I])
        return lambda histories: _scores_by_row(histories, lambda history_BI: history_BI @ weight_IC, order_I=order_I)
    weight_ID, vector_ID = spectral_weights(
        matrix_UI,
        rank=config.rank,
        user_exponent=config.user_exponent,
        item_exponent=_best_item_exponent(config, store=store),
    )
    vector_CD = vector_ID[order_I]

    def spectral_scores(histories: JaggedArray) -> LinearScores:
        query_BD = _spectral_query_vectors(user_item_matrix(histories, num_items=len(order_I)), weight_ID)

        def score_tile(queries: slice, columns: slice, score_BC: NDArray[Any]) -> None:
            np.matmul(query_BD[queries], vector_CD[columns].T, out=score_BC)

        return LinearScores(score_tile, TILE_COLUMNS)

    return spectral_scores


def _best_item_exponent(config: ClosedFormConfig, *, store: EventStore) -> float:
    """Return the exponent with the best validation NDCG@20, or the first exponent if no user has an unseen target."""
    if len(config.item_exponents) == 1:
        return config.item_exponents[0]
    ndcg_by_exponent = {
        item_exponent: float(ndcg(target_positions, k=20).mean())
        for item_exponent, target_positions in validation_positions(config, store=store)
    }
    return max(ndcg_by_exponent, key=lambda exponent: ndcg_by_exponent[exponent], default=config.item_exponents[0])


def validation_positions(config: ClosedFormConfig, *, store: EventStore) -> Iterator[tuple[float, TargetPositions]]:
    """Yield each item exponent with the positions of the validation targets. Yield nothing if no user has an unseen target.

    The truncated SVD reads only the training events. At most MAX_EXPONENT_SEARCH_USERS users are ranked.
    """
    user_rows = np.flatnonzero(store.targets(np.arange(store.num_users), "validation").lengths)
    if not len(user_rows):
        return
    user_rows = user_rows[sampled_users(len(user_rows), max_users=MAX_EXPONENT_SEARCH_USERS)]
    matrix_UI = log_matrix(store, before="validation", max_events=MAX_EXPONENT_SEARCH_EVENTS)
    histories, targets = store.items_before(user_rows, "validation"), store.targets(user_rows, "validation")
    for item_exponent in config.item_exponents:
        query_BD, vector_ID = spectral_vectors(
            matrix_UI,
            rank=config.rank,
            history_BI=user_item_matrix(histories, num_items=store.num_items),
            user_exponent=config.user_exponent,
            item_exponent=item_exponent,
        )
        queries = Queries(torch.from_numpy(query_BD), is_known_B=np.ones(len(user_rows), bool), seen=histories, targets=targets)
        ranking = rank_catalogue(queries, item_vector_ID=torch.from_numpy(vector_ID), k=0)
        target_positions = ranking.target_positions()
        if not target_positions.num_users:  # the users had already seen all validation targets
            return
        yield item_exponent, target_positions


def cooccurrence_model(*, store: EventStore, order_I: NDArray[Any]) -> LinearModel:
    """Return the model whose score is the sum of an item's cosines with the items of a history. order_I: see `linear_model`."""
    matrix_UI = log_matrix(store, before="test", max_events=MAX_EVENTS, max_history=MAX_HISTORY)
    weight_IC = neighbour_weights(matrix_UI)[:, order_I]
    return lambda histories: _scores_by_row(histories, lambda history_BI: (history_BI @ weight_IC).toarray(), order_I=order_I)


def _scores_by_row(
    histories: JaggedArray, score_rows: Callable[[csr_array], Floats32], *, order_I: NDArray[Any]
) -> LinearScores:
    """Return LinearScores that compute whole rows. score_rows: function that scores all items for some queries."""
    history_BI = user_item_matrix(histories, num_items=len(order_I))

    def score_tile(queries: slice, columns: slice, score_BC: NDArray[Any]) -> None:
        score_BC[:] = score_rows(history_BI[queries])[:, columns]

    return LinearScores(score_tile, len(order_I))


def _nearest_neighbours(weight_RI: csr_array, *, first_row: int) -> csr_array:
    """Return the MAX_NEIGHBOURS largest weights of each row. Row r is item `first_row` + r, which is not its own neighbour.

    weight_RI: positive weights in single precision, whose columns are sorted in place.
    """
    weight_RI.sort_indices()
    row_L = np.repeat(np.arange(weight_RI.shape[0]), np.diff(weight_RI.indptr))
    is_other_L = weight_RI.indices != row_L + first_row
    row_L, column_L, weight_L = row_L[is_other_L], weight_RI.indices[is_other_L], weight_RI.data[is_other_L]
    # Positive floats are in the same order as their bits, so one integer sorts by row and falling weight. Equal weights keep
    # their order.
    sorted_entries = np.argsort((row_L << 32) - weight_L.view(np.int32), kind="stable")
    num_neighbours_R = np.bincount(row_L, minlength=weight_RI.shape[0])
    index_in_row_L = np.arange(len(sorted_entries)) - np.repeat(
        np.cumsum(num_neighbours_R) - num_neighbours_R, num_neighbours_R
    )
    nearest_entries = sorted_entries[index_in_row_L < MAX_NEIGHBOURS]
    return csr_array((weight_L[nearest_entries], (row_L[nearest_entries], column_L[nearest_entries])), shape=weight_RI.shape)
