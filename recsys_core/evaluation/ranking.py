"""Exact ranking of the full catalogue with bounded memory.

Shapes: B queries, I items, D width, K length of the top list, T (query, target) pairs, C items as columns of a score matrix,
L entries of the seen items of all queries.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import StageError
from recsys_core.evaluation.metrics import TargetPositions
from recsys_core.seeds import TIE_ORDER_SEED

CHUNK_SCORES = 1 << 22
"""Scores that one thread computes at once: 16 MiB in float32."""
MIN_CHUNK_QUERIES = 16
"""Smallest number of queries per chunk, so that one pass over the item vectors serves several queries."""
MAX_SCORES = 1 << 28
"""Scores of all threads together: 1 GiB in float32. A large catalogue is ranked by fewer threads."""
MAX_BLOCK_SIZE = 64


@dataclass(frozen=True)
class Queries:
    """Queries for which the items are ranked.

    Attributes:
        query_BD: query vectors.
        is_known_B: users who are served by their query vector. The other users are served by popularity.
        seen: item rows that are not ranked.
        targets: item rows of the targets. A target that the user has seen is not ranked either.
    """

    query_BD: Tensor
    is_known_B: NDArray[np.bool_]
    seen: JaggedArray
    targets: JaggedArray

    def take(self, query_indices: NDArray[np.int64]) -> "Queries":
        """Return the queries at these indices, in this order."""
        return Queries(
            query_BD=self.query_BD[torch.from_numpy(query_indices)],
            is_known_B=self.is_known_B[query_indices],
            seen=self.seen.take(query_indices),
            targets=self.targets.take(query_indices),
        )


@dataclass(frozen=True)
class Ranking:
    """Top items of each query, and the position of each ranked target.

    Attributes:
        query_T: int64, query of each target, ascending.
        item_T: int64, item row of each target.
        position_T: int64, position of each target; 0 is the best item.
        num_candidates_B: int64, number of ranked items.
        top_BK: int32, rows of the best items; -1 after the last candidate.
        num_seen_targets: number of targets that were excluded because the user had seen them.
        num_items: size of the catalogue.
    """

    query_T: NDArray[np.int64]
    item_T: NDArray[np.int64]
    position_T: NDArray[np.int64]
    num_candidates_B: NDArray[np.int64]
    top_BK: NDArray[np.int32]
    num_seen_targets: int
    num_items: int

    def target_positions(self, mask_T: NDArray[np.bool_] | None = None) -> TargetPositions:
        """Return the positions of the targets, or of those where mask_T is true."""
        selected_targets = slice(None) if mask_T is None else mask_T
        return TargetPositions.from_pairs(
            user_T=self.query_T[selected_targets],
            position_T=self.position_T[selected_targets],
            num_candidates_B=self.num_candidates_B,
        )


def rank_catalogue(
    queries: Queries, *, item_vector_ID: Tensor, k: int, on_progress: Callable[[int], None] = lambda num_queries: None
) -> Ranking:
    """Rank all unseen items by inner product for every query, known or not. Equal scores are ordered by `tie_order`.

    The targets of a user are candidates like any item. The queries are ranked in chunks by as many threads as torch uses.

    Args:
        item_vector_ID: vectors of the same floating-point type as the query vectors.
        k: length of the top list; 0 for no top list.
        on_progress: called with the number of queries ranked since the previous call.

    Raises:
        StageError: a vector is not finite.
    """
    query_BD = queries.query_BD
    for vector_kind, vectors in (("query", query_BD), ("item", item_vector_ID)):
        if not torch.isfinite(vectors).all():
            vector_index = int(torch.nonzero(~torch.isfinite(vectors).all(dim=1))[0])
            raise StageError(f"{vector_kind} vector {vector_index} is not finite: training diverged; lower the learning rates")
    num_queries, num_items = len(query_BD), len(item_vector_ID)
    targets, seen, num_seen_targets = _exclude_seen(queries, num_items=num_items)
    k = min(k, num_items)
    top_BK = np.full((num_queries, k), -1, np.int32)
    position_T = np.zeros(len(targets.values_L), np.int64)

    # The columns of the score matrix are the items in `tie_order`. Of two items with equal scores, the item in the lower column
    # is ranked first.
    row_C = tie_order(num_items)
    column_I = np.argsort(row_C)
    item_DC = item_vector_ID[torch.from_numpy(row_C)].T
    num_threads = torch.get_num_threads()
    num_workers = max(1, min(num_threads, MAX_SCORES // (MIN_CHUNK_QUERIES * max(1, num_items))))
    chunk_queries = max(MIN_CHUNK_QUERIES, CHUNK_SCORES // max(1, num_items))

    def rank_chunk(chunk_start: int) -> int:
        chunk_end = min(chunk_start + chunk_queries, num_queries)
        score_BC = (query_BD[chunk_start:chunk_end] @ item_DC).numpy()
        chunk_seen, chunk_targets = seen.slice(chunk_start, chunk_end), targets.slice(chunk_start, chunk_end)
        score_BC[chunk_seen.list_index_L, column_I[chunk_seen.values_L]] = -np.inf
        column_T = column_I[chunk_targets.values_L]
        for query, score_C in enumerate(score_BC):
            target_slice = slice(*chunk_targets.offset[query : query + 2])
            positions = [_position(score_C, column) for column in column_T[target_slice]]
            position_T[targets.offset[chunk_start] :][target_slice] = positions
            if k:
                top_columns = _top_columns(score_C, k=k)
                top_BK[chunk_start + query, : len(top_columns)] = row_C[top_columns]
        return chunk_end - chunk_start

    try:
        with ThreadPoolExecutor(num_workers, initializer=partial(torch.set_num_threads, num_threads // num_workers)) as pool:
            for num_ranked in pool.map(rank_chunk, range(0, num_queries, chunk_queries)):
                on_progress(num_ranked)
    finally:
        torch.set_num_threads(num_threads)  # later threads would otherwise use the number that the pool's threads have set
    return Ranking(
        query_T=targets.list_index_L,
        item_T=targets.values_L,
        position_T=position_T,
        num_candidates_B=num_items - seen.lengths,
        top_BK=top_BK,
        num_seen_targets=num_seen_targets,
        num_items=num_items,
    )


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
    targets, seen, num_seen_targets = _exclude_seen(queries, num_items=num_items)
    k = min(k, num_items)
    order_index_I = np.empty(num_items, np.int64)
    order_index_I[order_I] = np.arange(num_items)

    # A key is an integer that sorts by query first, then by index in the order.
    seen_key_L = np.sort(seen.list_index_L * num_items + order_index_I[seen.values_L])
    order_index_T = order_index_I[targets.values_L]
    target_key_T = targets.list_index_L * num_items + order_index_T
    num_seen_above_T = np.searchsorted(seen_key_L, target_key_T) - seen.offset[targets.list_index_L]

    # The unseen item at position p of the ranking has the index p + (number of seen items above it) in the order. The next
    # lines count these seen items. Let s be the index in the order of the n-th seen item of a query, with n from 0. Then s - n
    # unseen items are above it. It is therefore above the unseen item at position p if s - n <= p.
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
    return Ranking(
        query_T=targets.list_index_L,
        item_T=targets.values_L,
        position_T=order_index_T - num_seen_above_T,
        num_candidates_B=num_candidates_B,
        top_BK=top_BK.astype(np.int32),
        num_seen_targets=num_seen_targets,
        num_items=num_items,
    )


def rank_served(
    queries: Queries,
    *,
    item_vector_ID: Tensor,
    order_I: NDArray[Any],
    k: int,
    on_progress: Callable[[int], None] = lambda num_queries: None,
) -> Ranking:
    """Rank as the Retriever does: by inner product for known users, by popularity for the other users.

    order_I: all item rows by falling popularity. The other arguments are those of `rank_catalogue`.
    """
    query_groups = [np.flatnonzero(queries.is_known_B), np.flatnonzero(~queries.is_known_B)]
    known_queries, unknown_queries = (queries.take(query_indices) for query_indices in query_groups)
    ranking_by_score = rank_catalogue(known_queries, item_vector_ID=item_vector_ID, k=k, on_progress=on_progress)
    ranking_by_popularity = rank_by_order(unknown_queries, order_I=order_I, k=k)
    on_progress(len(query_groups[1]))
    rankings = (ranking_by_score, ranking_by_popularity)
    query_T = np.concatenate([query_B[ranking.query_T] for query_B, ranking in zip(query_groups, rankings, strict=True)])
    order_T, order_B = np.argsort(query_T, kind="stable"), np.argsort(np.concatenate(query_groups))
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
    """Rank only the items of `candidate_rows`, for the queries with a target among them. See `rank_served`.

    A ranking of the cold items shows how well the model uses pretrained vectors and features. In a ranking of the full
    catalogue, most cold items are below the items with events.

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
    candidate_index_I = np.full(len(item_vector_ID), -1, np.int64)
    candidate_index_I[candidate_rows] = np.arange(len(candidate_rows))

    def to_candidates(items: JaggedArray) -> JaggedArray:
        candidate_index_L = candidate_index_I[items.values_L]
        is_candidate_L = candidate_index_L >= 0
        return JaggedArray(items.filter(is_candidate_L).offset, candidate_index_L[is_candidate_L])

    queries = queries.take(np.flatnonzero(to_candidates(queries.targets).lengths))
    candidate_order_I = candidate_index_I[order_I]
    return rank_served(
        replace(queries, seen=to_candidates(queries.seen), targets=to_candidates(queries.targets)),
        item_vector_ID=item_vector_ID[torch.from_numpy(candidate_rows)],
        order_I=candidate_order_I[candidate_order_I >= 0],
        k=k,
    )


def tie_order(num_items: int) -> NDArray[np.int64]:
    """Return the order of item rows with equal scores: a fixed random permutation.

    Ordering by ascending row would favour popular items, because rows are numbered by falling popularity. A model with equal
    scores for all items would then rank them by popularity.
    """
    return np.random.default_rng(TIE_ORDER_SEED).permutation(num_items)


def _exclude_seen(queries: Queries, *, num_items: int) -> tuple[JaggedArray, JaggedArray, int]:
    """Return the distinct unseen targets, the distinct seen items, and the number of distinct targets that were seen."""
    seen, distinct_targets = queries.seen.distinct(bound=num_items), queries.targets.distinct(bound=num_items)
    unseen_targets = distinct_targets.difference(seen, bound=num_items)
    return unseen_targets, seen, len(distinct_targets.values_L) - len(unseen_targets.values_L)


def _position(score_C: NDArray[Any], column: int) -> int:
    """Return the number of columns ranked above `column`: columns with higher scores, and lower columns with the same score."""
    score = score_C[column]
    return int(np.count_nonzero(score_C[:column] >= score) + np.count_nonzero(score_C[column + 1 :] > score))


def _top_columns(score_C: NDArray[Any], *, k: int) -> NDArray[np.int64]:
    """Return the columns of the k best scores, equal scores by ascending column. Columns with score -inf are left out."""
    # Split the scores into at least k blocks. The k-th highest block maximum is a lower bound of the k-th best score. It is
    # computed in one pass, and only few scores are above it.
    block_size = max(1, min(MAX_BLOCK_SIZE, len(score_C) // (4 * k)))
    num_blocks = len(score_C) // block_size
    block_max_scores = score_C[: block_size * num_blocks].reshape(block_size, num_blocks).max(axis=0)
    score_lower_bound = np.partition(block_max_scores, num_blocks - k)[num_blocks - k]
    candidate_columns = np.flatnonzero(score_C >= score_lower_bound)
    best_columns = candidate_columns[np.argsort(-score_C[candidate_columns], kind="stable")[:k]]
    return best_columns[score_C[best_columns] > -np.inf]
