"""Rankings with the rules of the Retriever: by inner product for known users, by popularity for the other users.

Shapes: B queries, I items, D width, K length of the top list, C candidates, T (query, target) pairs, L entries of the seen
items of all queries.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation.ranking.catalogue import rank_catalogue
from recsys_core.evaluation.ranking.queries import Queries, Ranking


def rank_by_order(queries: Queries, *, order_I: NDArray[Any], k: int) -> Ranking:
    """Rank the unseen items of every query in the same order, without a score matrix.

    Args:
        order_I: all item rows, best first.
        k: length of the top list; 0 for no top list.

    >>> seen, targets = JaggedArray(np.array([0, 1]), np.array([2])), JaggedArray(np.array([0, 1]), np.array([1]))
    >>> queries = Queries(torch.ones(1, 1), is_known_B=np.array([False]), seen=seen, targets=targets)
    >>> ranking = rank_by_order(queries, order_I=np.array([2, 0, 1]), k=3)
    >>> ranking.position_T.tolist(), ranking.top_BK.tolist()
    ([1], [[0, 1, -1]])
    """
    num_items = len(order_I)
    pairs = queries.ranked_pairs(num_items=num_items)
    targets, seen = pairs.targets, pairs.seen
    k = min(k, num_items)
    order_index_I = np.empty(num_items, np.int64)
    order_index_I[order_I] = np.arange(num_items)

    # A key is an integer that sorts first by query, then by the item's index in the order.
    seen_key_L = np.sort(seen.list_index_L * num_items + order_index_I[seen.values_L])
    order_index_T = order_index_I[targets.values_L]
    target_key_T = targets.list_index_L * num_items + order_index_T
    num_seen_above_T = np.searchsorted(seen_key_L, target_key_T) - seen.offset[targets.list_index_L]

    # The unseen item at position p of the ranking has the index p + (number of seen items above it) in the order. The next
    # lines count these seen items. A seen item is above position p if at most p unseen items are above the seen item. Example:
    # the seen items have the indices 0 and 3. Above them are 0 and 2 unseen items, so both are above position 2, and only the
    # first is above position 1. The unseen items at the positions 1 and 2 have the indices 1 + 1 and 2 + 2.
    num_seen_above_L = np.arange(len(seen_key_L)) - seen.offset[seen.list_index_L]
    num_unseen_above_L = seen_key_L % max(1, num_items) - num_seen_above_L
    query_B1, position_K = np.arange(len(seen))[:, None], np.arange(k)
    num_seen_above_BK = np.searchsorted(
        seen.list_index_L * num_items + num_unseen_above_L, query_B1 * num_items + position_K, side="right"
    )
    num_seen_above_BK -= seen.offset[:-1, None]  # searchsorted also counts the seen items of earlier queries
    order_index_BK = position_K + num_seen_above_BK
    num_candidates_B = num_items - seen.lengths
    is_candidate_BK = position_K < num_candidates_B[:, None]
    top_BK = np.where(is_candidate_BK, order_I[np.minimum(order_index_BK, num_items - 1)], -1)
    return pairs.ranking(position_T=order_index_T - num_seen_above_T, top_BK=top_BK.astype(np.int32), num_items=num_items)


def rank_as_served(
    queries: Queries,
    *,
    item_vector_ID: Tensor,
    order_I: NDArray[Any],
    k: int,
    top_only: bool = False,
    device: str = "cpu",
    on_progress: Callable[[int], None] = lambda num_queries: None,
) -> Ranking:
    """Rank as the Retriever does: by inner product for known users, by popularity for the other users.

    order_I: all item rows by falling popularity. See `rank_catalogue` for the other arguments.
    """
    known_ranking = rank_catalogue(
        queries.known(), item_vector_ID=item_vector_ID, k=k, top_only=top_only, device=device, on_progress=on_progress
    )
    on_progress(int(np.count_nonzero(~queries.is_known_B)))
    return add_unknown_queries(known_ranking, queries, order_I=order_I, k=k)


def add_unknown_queries(known_ranking: Ranking, queries: Queries, *, order_I: NDArray[Any], k: int) -> Ranking:
    """Return the ranking of all queries: `known_ranking` for known queries, and by popularity for unknown queries."""
    known_indices, unknown_indices = np.flatnonzero(queries.is_known_B), np.flatnonzero(~queries.is_known_B)
    unknown_ranking = rank_by_order(queries.take(unknown_indices), order_I=order_I, k=k)
    rankings = (known_ranking, unknown_ranking)
    query_T = np.concatenate([known_indices[known_ranking.query_T], unknown_indices[unknown_ranking.query_T]])
    order_T = np.argsort(query_T, kind="stable")
    order_B = np.argsort(np.concatenate([known_indices, unknown_indices]))
    return Ranking(
        query_T=query_T[order_T],
        item_T=np.concatenate([ranking.item_T for ranking in rankings])[order_T],
        position_T=np.concatenate([ranking.position_T for ranking in rankings])[order_T],
        num_candidates_B=np.concatenate([ranking.num_candidates_B for ranking in rankings])[order_B],
        top_BK=np.concatenate([ranking.top_BK for ranking in rankings])[order_B],
        num_seen_targets=sum(ranking.num_seen_targets for ranking in rankings),
        num_items=len(order_I),
    )


def rank_among(
    queries: Queries, *, item_vector_ID: Tensor, order_I: NDArray[Any], candidate_rows: NDArray[np.int64], k: int
) -> Ranking:
    """Rank only the items of `candidate_rows`, for the queries with a target among them. See `rank_as_served`.

    For example, a ranking among the cold items shows how well the model uses pretrained vectors and features. In a ranking of
    the full catalogue, most cold items are below the items with events.

    Queries without a target among the candidates are removed, and the remaining queries are numbered from 0. An item of the
    returned ranking is an index into `candidate_rows`.

    candidate_rows: int64 [C], distinct rows of item_vector_ID, ascending.

    Below, the last two of five items are candidates. Only the second query has a target among them (the item with score 6),
    and the item with score 7 is ranked above it.

    >>> targets = JaggedArray(np.array([0, 1, 3]), np.array([0, 1, 4]))
    >>> queries = Queries(torch.ones(2, 1), is_known_B=np.ones(2, bool), seen=JaggedArray.empty(2), targets=targets)
    >>> item_vector_ID = torch.tensor([[9.0], [8.0], [5.0], [7.0], [6.0]])
    >>> candidates = {"order_I": np.arange(5), "candidate_rows": np.array([3, 4])}
    >>> ranking = rank_among(queries, item_vector_ID=item_vector_ID, **candidates, k=2)
    >>> ranking.query_T.tolist(), ranking.item_T.tolist(), ranking.position_T.tolist(), ranking.top_BK.tolist()
    ([0], [1], [1], [[0, 1]])
    """
    queries = restrict_to_candidates(queries, candidate_rows, num_items=len(item_vector_ID))
    return rank_as_served(
        queries,
        item_vector_ID=item_vector_ID[torch.from_numpy(candidate_rows)],
        order_I=candidate_order(order_I, candidate_rows),
        k=k,
    )


def restrict_to_candidates(queries: Queries, candidate_rows: NDArray[np.int64], *, num_items: int) -> Queries:
    """Return the queries that have a target among the candidates. Their items become indices into `candidate_rows`."""
    candidate_index_I = _candidate_index(candidate_rows, num_items=num_items)

    def to_candidate_indices(items: JaggedArray) -> JaggedArray:
        candidate_index_L = candidate_index_I[items.values_L]
        is_candidate_L = candidate_index_L >= 0
        return JaggedArray(items.filter(is_candidate_L).offset, candidate_index_L[is_candidate_L])

    queries = queries.take(np.flatnonzero(to_candidate_indices(queries.targets).lengths))
    return replace(queries, seen=to_candidate_indices(queries.seen), targets=to_candidate_indices(queries.targets))


def candidate_order(order_I: NDArray[Any], candidate_rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of the candidates in the order of `order_I`, [C]; see `rank_among`."""
    candidate_order_I: NDArray[np.int64] = _candidate_index(candidate_rows, num_items=len(order_I))[order_I]
    return candidate_order_I[candidate_order_I >= 0]


def _candidate_index(candidate_rows: NDArray[np.int64], *, num_items: int) -> NDArray[np.int64]:
    """Return the index of each item in `candidate_rows`, -1 for other items, [I]."""
    candidate_index_I = np.full(num_items, -1, np.int64)
    candidate_index_I[candidate_rows] = np.arange(len(candidate_rows))
    return candidate_index_I
