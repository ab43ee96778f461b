"""Exact ranking of the full catalogue, in bounded memory.

Shapes: E queries, I items, D width, C queries of a chunk, P (query, target) pairs, K length of the list.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.data.jagged import JaggedArray
from recsys_core.errors import StageError

CHUNK_SCORES = 1 << 22
"""Scores that a thread computes at a time: 16 MiB in float32."""
LEAST_QUERIES = 16
"""Queries of a chunk, however many items: one reading of the item vectors should serve several."""
ALL_SCORES = 1 << 28
"""Scores held by all threads together: 1 GiB in float32. Large catalogues are ranked by fewer threads."""
MOST_IN_BLOCK = 64
TIE_SEED = 0


def ignore(queries: int) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class Ranking:
    """What ranking the whole catalogue gave.

    query_P int64 [P], ascending, target_row_P int64 [P], rank_P int64 [P] (0-based): the targets that could be ranked.
    candidates_E int64 [E]: items ranked per query. top_EK int32 [E, K]: best item rows, -1 after the last candidate.
    seen_targets: targets left out because the query's user had seen them. items: I, the catalogue.
    """

    query_P: NDArray[np.int64]
    target_row_P: NDArray[np.int64]
    rank_P: NDArray[np.int64]
    candidates_E: NDArray[np.int64]
    top_EK: NDArray[np.int32]
    seen_targets: int
    items: int

    @classmethod
    def joined(cls, first: Self, second: Self, *, is_second_E: NDArray[np.bool_]) -> Self:
        """One ranking of all queries from those of two groups of them, each in the order of the queries."""
        place_E = np.concatenate([np.flatnonzero(~is_second_E), np.flatnonzero(is_second_E)])
        order_E = np.argsort(place_E)
        query_P = place_E[np.concatenate([first.query_P, second.query_P + len(first.candidates_E)])]
        order_P = np.argsort(query_P, kind="stable")
        return cls(
            query_P=query_P[order_P],
            target_row_P=np.concatenate([first.target_row_P, second.target_row_P])[order_P],
            rank_P=np.concatenate([first.rank_P, second.rank_P])[order_P],
            candidates_E=np.concatenate([first.candidates_E, second.candidates_E])[order_E],
            top_EK=np.concatenate([first.top_EK, second.top_EK])[order_E],
            seen_targets=first.seen_targets + second.seen_targets,
            items=first.items,
        )


def rank_catalogue(
    query_ED: Tensor,
    *,
    item_ID: Tensor,
    seen: JaggedArray,
    targets: JaggedArray,
    k: int,
    on_progress: Callable[[int], None] = ignore,
) -> Ranking:
    """Rank all items but the seen ones by inner product, for every query; equal scores go by `tie_order`.

    Args:
        query_ED, item_ID: of one floating type. seen, targets: item rows per query. k: length of the top list; 0 for none.
        on_progress: called with the number of queries ranked since the last call.

    A target that is seen is no target; the other targets of a user are candidates like any item. Threads, as many as torch
    uses, each rank chunks of queries on their own: none waits for another before the end. Raises StageError if a vector is
    not finite.
    """
    for name, vectors in (("query", query_ED), ("item", item_ID)):
        if not torch.isfinite(vectors).all():
            row = int(torch.nonzero(~torch.isfinite(vectors).all(dim=1))[0])
            raise StageError(
                f"{name} vector {row} has a number that is not finite; training diverged: lower its learning rates"
            )
    rankable, seen, seen_targets = _rankable(targets, seen=seen, items=len(item_ID))
    k = min(k, len(item_ID))
    top_EK = np.full((len(query_ED), k), -1, np.int32)
    rank_P = np.zeros(len(rankable.values_L), np.int64)

    # From here on an item is a column, which is its place in `tie_order`: of equal scores the lower column comes first.
    row_of = tie_order(len(item_ID))
    column_of = np.argsort(row_of)
    column_DI = item_ID[torch.from_numpy(row_of)].T
    threads = torch.get_num_threads()
    workers = max(1, min(threads, ALL_SCORES // (LEAST_QUERIES * max(1, len(item_ID)))))
    step = max(LEAST_QUERIES, CHUNK_SCORES // max(1, len(item_ID)))

    def rank(start: int) -> int:
        end = min(start + step, len(query_ED))
        score_CI = (query_ED[start:end] @ column_DI).numpy()
        seen_part, target_part = seen.slice(start, end), rankable.slice(start, end)
        score_CI[seen_part.list_index_L, column_of[seen_part.values_L]] = -np.inf
        target_column_T = column_of[target_part.values_L]
        for query, score_I in enumerate(score_CI):
            pairs = slice(*target_part.offset[query : query + 2])
            rank_P[rankable.offset[start] :][pairs] = [_rank(score_I, column) for column in target_column_T[pairs]]
            if k:
                top = _top(score_I, k=k)
                top_EK[start + query, : len(top)] = row_of[top]
        return end - start

    try:
        with ThreadPoolExecutor(workers, initializer=partial(torch.set_num_threads, threads // workers)) as pool:
            for queries in pool.map(rank, range(0, len(query_ED), step)):
                on_progress(queries)
    finally:
        torch.set_num_threads(threads)  # threads that start later take over the number that was set last
    return Ranking(
        query_P=rankable.list_index_L,
        target_row_P=rankable.values_L,
        rank_P=rank_P,
        candidates_E=len(item_ID) - seen.lengths,
        top_EK=top_EK,
        seen_targets=seen_targets,
        items=len(item_ID),
    )


def rank_by_order(order_I: NDArray[Any], *, seen: JaggedArray, targets: JaggedArray, k: int) -> Ranking:
    """Rank all items but the seen ones in one order for every query, without a score per query and item.

    order_I: all item rows, best first. Others as in `rank_catalogue`.

    >>> lists = JaggedArray(np.array([0, 1]), np.array([2])), JaggedArray(np.array([0, 1]), np.array([1]))
    >>> ranking = rank_by_order(np.array([2, 0, 1]), seen=lists[0], targets=lists[1], k=3)
    >>> ranking.rank_P.tolist(), ranking.top_EK.tolist()
    ([1], [[0, 1, -1]])
    """
    items = len(order_I)
    rankable, seen, seen_targets = _rankable(targets, seen=seen, items=items)
    k = min(k, items)
    place_of = np.empty(items, np.int64)
    place_of[order_I] = np.arange(items)
    # Keys of one number per (query, place), which grow with both.
    seen_T = np.sort(seen.list_index_L * items + place_of[seen.values_L])
    target_place_P = place_of[rankable.values_L]
    above_P = np.searchsorted(seen_T, rankable.list_index_L * items + target_place_P) - seen.offset[rankable.list_index_L]
    # Of place s, the n-th seen one of its query, n are seen above: it moves the j-th unseen item down where s - n <= j.
    unseen_above_T = seen_T % max(1, items) - (np.arange(len(seen_T)) - seen.offset[seen.list_index_L])
    query_E1, j_K = np.arange(len(seen))[:, None], np.arange(k)
    moved_EK = np.searchsorted(seen.list_index_L * items + unseen_above_T, query_E1 * items + j_K, side="right")
    place_EK = j_K + moved_EK - seen.offset[:-1, None]
    candidates_E = items - seen.lengths
    top_EK = np.where(j_K < candidates_E[:, None], order_I[np.minimum(place_EK, items - 1)], -1)
    return Ranking(
        query_P=rankable.list_index_L,
        target_row_P=rankable.values_L,
        rank_P=target_place_P - above_P,
        candidates_E=candidates_E,
        top_EK=top_EK.astype(np.int32),
        seen_targets=seen_targets,
        items=items,
    )


def rank_served(
    query_ED: Tensor,
    *,
    known_E: NDArray[np.bool_],
    item_ID: Tensor,
    order_I: NDArray[Any],
    seen: JaggedArray,
    targets: JaggedArray,
    k: int,
    on_progress: Callable[[int], None] = ignore,
) -> Ranking:
    """Rank as `Retriever` answers: by inner product where known_E, in `order_I` (popularity) for the other queries."""
    known, unknown = np.flatnonzero(known_E), np.flatnonzero(~known_E)
    scored = rank_catalogue(
        query_ED[torch.from_numpy(known)],
        item_ID=item_ID,
        seen=seen.take(known),
        targets=targets.take(known),
        k=k,
        on_progress=on_progress,
    )
    popular = rank_by_order(order_I, seen=seen.take(unknown), targets=targets.take(unknown), k=k)
    on_progress(len(unknown))
    return Ranking.joined(scored, popular, is_second_E=~known_E)


def tie_order(items: int) -> NDArray[np.int64]:
    """Item rows in the order in which equal scores are ranked: a fixed permutation.

    Rows are numbered by falling popularity, so in their own order a model that scores all items the same would rank like it.
    """
    return np.random.default_rng(TIE_SEED).permutation(items)


def _rankable(targets: JaggedArray, *, seen: JaggedArray, items: int) -> tuple[JaggedArray, JaggedArray, int]:
    """Targets that are not seen, the seen items, and the number of targets among them; each item once."""
    seen, distinct = seen.distinct(bound=items), targets.distinct(bound=items)
    rankable = distinct.difference(seen, bound=items)
    return rankable, seen, len(distinct.values_L) - len(rankable.values_L)


def _rank(score_I: NDArray[Any], column: int) -> int:
    """Number of columns above `column`: those with a higher score, and those before it with the same score."""
    score = score_I[column]
    return int(np.count_nonzero(score_I[:column] >= score) + np.count_nonzero(score_I[column + 1 :] > score))


def _top(score_I: NDArray[Any], *, k: int) -> NDArray[np.int64]:
    """Columns of the k best scores, equal scores by ascending column; fewer where the others are -inf."""
    # The k-th highest of the maxima of at least k blocks is a lower bound that few scores exceed, found in one pass.
    size = max(1, min(MOST_IN_BLOCK, len(score_I) // (4 * k)))
    blocks = len(score_I) // size
    highest = score_I[: size * blocks].reshape(size, blocks).max(axis=0)
    bound = np.partition(highest, blocks - k)[blocks - k]
    candidate = np.flatnonzero(score_I >= bound)
    best = candidate[np.argsort(-score_I[candidate], kind="stable")[:k]]
    return best[score_I[best] > -np.inf]
