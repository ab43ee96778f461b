"""Items without an event ranked among themselves: how well vectors and features alone place an item.

In a ranking of the full catalogue such an item stands behind most that have events, whatever the model knows of it.
Shapes: E queries, I items, C candidates, D width, T rows of all lists.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.data.events import EvaluationSplit, EventStore
from recsys_core.data.jagged import JaggedArray
from recsys_core.evaluation.ranking import Ranking, rank_served


def cold_rows(store: EventStore, split: EvaluationSplit) -> NDArray[np.int64]:
    """Rows of the items without any event before `split`, ascending."""
    return np.flatnonzero(store.counts_before(split) == 0)


def rank_among(
    query_ED: Tensor,
    *,
    known_E: NDArray[np.bool_],
    item_ID: Tensor,
    order_I: NDArray[Any],
    candidate_rows: NDArray[np.int64],
    seen: JaggedArray,
    targets: JaggedArray,
    k: int,
) -> Ranking:
    """Rank the items of `candidate_rows` alone, for the queries that have a target among them.

    Args:
        query_ED, known_E, item_ID, order_I: as in `rank_served`. candidate_rows: int64 [C], distinct rows of item_ID,
            ascending. seen, targets: item rows per query; those that are no candidates are passed over. k: length of the top
            list.

    In the ranking an item is its place in `candidate_rows`, and queries are counted without those that have no target.
    Raises StageError if a vector is not finite.

    Below, of five items the last two are candidates; the second query alone has a target among them, and 7 is above 6.

    >>> item_ID = torch.tensor([[9.0], [8.0], [5.0], [7.0], [6.0]])
    >>> targets = JaggedArray(np.array([0, 1, 3]), np.array([0, 1, 4]))
    >>> known, order, none = np.ones(2, bool), np.arange(5), JaggedArray.empty(2)
    >>> ranking = rank_among(
    ...     torch.ones(2, 1), known_E=known, item_ID=item_ID, order_I=order, candidate_rows=np.array([3, 4]), seen=none,
    ...     targets=targets, k=2,
    ... )
    >>> ranking.query_P.tolist(), ranking.target_row_P.tolist(), ranking.rank_P.tolist(), ranking.top_EK.tolist()
    ([0], [1], [1], [[0, 1]])
    """
    place_I = np.full(len(item_ID), -1, np.int64)
    place_I[candidate_rows] = np.arange(len(candidate_rows))
    placed = _placed(targets, place_I)
    asked = np.flatnonzero(placed.lengths)
    place_order_I = place_I[order_I]
    return rank_served(
        query_ED[torch.from_numpy(asked)],
        known_E=known_E[asked],
        item_ID=item_ID[torch.from_numpy(candidate_rows)],
        order_I=place_order_I[place_order_I >= 0],
        seen=_placed(seen.take(asked), place_I),
        targets=placed.take(asked),
        k=k,
    )


def _placed(lists: JaggedArray, place_I: NDArray[np.int64]) -> JaggedArray:
    """The rows that have a place, as their places."""
    place_T = place_I[lists.values_L]
    kept = lists.filter(place_T >= 0)
    return JaggedArray(kept.offset, place_T[place_T >= 0])
