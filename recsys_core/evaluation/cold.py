"""Ranking of the cold items only. An item without events is cold.

This ranking shows how well the model uses pretrained vectors and features. In a ranking of the full catalogue, most cold items
are below the items with events.

Shapes: B queries, I items, C candidates, D width, L entries of all lists.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation.ranking import Ranking, rank_served


def cold_rows(store: EventStore, split: EvaluationSplit) -> NDArray[np.int64]:
    """Return the rows of the items without an event before `split`, ascending."""
    return np.flatnonzero(store.item_counts_before(split) == 0)


def rank_among(
    query_BD: Tensor,
    *,
    is_known_B: NDArray[np.bool_],
    item_vector_ID: Tensor,
    order_I: NDArray[Any],
    candidate_rows: NDArray[np.int64],
    seen: JaggedArray,
    targets: JaggedArray,
    k: int,
) -> Ranking:
    """Rank only the items of `candidate_rows`, for the queries with a target among them.

    Queries without a target among the candidates are removed, and the remaining queries are numbered from 0. An item of the
    returned ranking is an index into `candidate_rows`.

    Args:
        query_BD, is_known_B, item_vector_ID, order_I: as in `rank_served`.
        candidate_rows: int64 [C], distinct rows of item_vector_ID, ascending.
        seen, targets: item rows of each query; rows that are not candidates are ignored.
        k: length of the top list.

    Raises:
        StageError: a vector is not finite.

    Below, the last two of five items are candidates. Only the second query has a target among them (the item with score 6),
    and the item with score 7 is ranked above it.

    >>> item_vector_ID = torch.tensor([[9.0], [8.0], [5.0], [7.0], [6.0]])
    >>> targets = JaggedArray(np.array([0, 1, 3]), np.array([0, 1, 4]))
    >>> ranking = rank_among(
    ...     torch.ones(2, 1), is_known_B=np.ones(2, bool), item_vector_ID=item_vector_ID, order_I=np.arange(5),
    ...     candidate_rows=np.array([3, 4]), seen=JaggedArray.empty(2), targets=targets, k=2,
    ... )
    >>> ranking.query_T.tolist(), ranking.item_T.tolist(), ranking.position_T.tolist(), ranking.top_BK.tolist()
    ([0], [1], [1], [[0, 1]])
    """
    candidate_index_I = np.full(len(item_vector_ID), -1, np.int64)
    candidate_index_I[candidate_rows] = np.arange(len(candidate_rows))
    candidate_targets = _to_candidates(targets, candidate_index_I)
    query_indices = np.flatnonzero(candidate_targets.lengths)
    candidate_order_I = candidate_index_I[order_I]
    return rank_served(
        query_BD[torch.from_numpy(query_indices)],
        is_known_B=is_known_B[query_indices],
        item_vector_ID=item_vector_ID[torch.from_numpy(candidate_rows)],
        order_I=candidate_order_I[candidate_order_I >= 0],
        seen=_to_candidates(seen.take(query_indices), candidate_index_I),
        targets=candidate_targets.take(query_indices),
        k=k,
    )


def _to_candidates(items: JaggedArray, candidate_index_I: NDArray[np.int64]) -> JaggedArray:
    """Replace item rows by candidate indexes, and drop the items that are not candidates."""
    candidate_index_L = candidate_index_I[items.values_L]
    is_candidate_L = candidate_index_L >= 0
    return JaggedArray(items.filter(is_candidate_L).offset, candidate_index_L[is_candidate_L])
