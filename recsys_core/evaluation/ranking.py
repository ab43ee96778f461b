"""Exact ranking of the full catalogue with bounded memory.

Shapes: B queries, I items, D width, K length of the top list, T (query, target) pairs, C items as columns of a score matrix,
L entries of the seen items of all queries.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

from recsys_core.dataset.jagged import JaggedArray, chunk_slices
from recsys_core.errors import StageError
from recsys_core.evaluation.metrics import TargetPositions
from recsys_core.evaluation.top_k import positions_on_gpu, top_columns, top_columns_on_gpu
from recsys_core.seeds import TIE_ORDER_SEED

CHUNK_SCORES = 1 << 22
"""Scores that one thread holds at once: 16 MiB in float32."""
MIN_CHUNK_QUERIES, MAX_CHUNK_QUERIES = 16, 4_096
"""Bounds of the queries per chunk. One pass over the item vectors serves a chunk, and `top_columns` allows 65,536 queries."""
MAX_SCORES = 1 << 28
"""Scores of all threads together: 1 GiB in float32. A large catalogue is ranked by fewer threads."""
GPU_CHUNK_SCORES = 1 << 26
"""Scores that are in the memory of a GPU at once: 256 MiB, and about 1 GiB of intermediate results."""
TILE_COLUMNS = 2_048
"""Columns of a score matrix that are computed at once, so that the scores of a chunk stay in the cache of a core."""
BOUND_COLUMNS = 1 << 14
"""Columns from which the top list is bounded, if the positions of the targets are not needed."""

ScoreTile = Callable[[slice, slice, NDArray[Any]], None]
"""Function that writes the scores of a slice of the queries and a slice of the columns into an array [B, C]."""


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
        position_T: int64, position of each target; 0 is the best item. `num_items` if only the top lists were determined, and
            the target is not in the top list.
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
    queries: Queries,
    *,
    item_vector_ID: Tensor,
    k: int,
    top_only: bool = False,
    device: str = "cpu",
    on_progress: Callable[[int], None] = lambda num_queries: None,
) -> Ranking:
    """Rank all unseen items by inner product for every query, known or not. Equal scores are ordered by `tie_order`.

    The targets of a user are candidates like any item. The queries are ranked in chunks by as many threads as torch uses.

    Args:
        item_vector_ID: vectors of the same floating-point type as the query vectors.
        k: length of the top list; 0 for no top list.
        top_only: determine only the top lists, which is faster on a large catalogue. See `Ranking.position_T`.
        device: torch device; the vectors are on the CPU. On a GPU, top_only has no effect.
        on_progress: called with the number of queries ranked since the previous call.

    Raises:
        StageError: a vector is not finite.
    """
    for vector_kind, vectors in (("query", queries.query_BD), ("item", item_vector_ID)):
        if not torch.isfinite(vectors).all():
            vector_index = int(torch.nonzero(~torch.isfinite(vectors).all(dim=1))[0])
            raise StageError(f"{vector_kind} vector {vector_index} is not finite: training diverged; lower the learning rates")
    row_C = tie_order(len(item_vector_ID))
    if device != "cpu":
        item_vector_CD = item_vector_ID[torch.from_numpy(row_C)]
        return _rank_on_gpu(queries, item_vector_CD=item_vector_CD, row_C=row_C, k=k, on_progress=on_progress, device=device)
    query_BD, item_CD = queries.query_BD.numpy(), item_vector_ID.numpy()[row_C]

    def score_tile(query_slice: slice, columns: slice, score_BC: NDArray[Any]) -> None:
        np.matmul(query_BD[query_slice], item_CD[columns].T, out=score_BC)

    return rank_by_scores(
        queries, score_tile=score_tile, row_C=row_C, k=k, top_only=top_only, dtype=query_BD.dtype, on_progress=on_progress
    )


def rank_by_scores(
    queries: Queries,
    *,
    score_tile: ScoreTile,
    row_C: NDArray[Any],
    k: int,
    top_only: bool = False,
    tile_columns: int | None = None,
    dtype: Any = np.float32,
    on_progress: Callable[[int], None] = lambda num_queries: None,
) -> Ranking:
    """Rank all unseen items by the scores of `score_tile` for every query.

    Args:
        score_tile: called in several threads.
        row_C: item row of each column of the scores. Of two items with equal scores, the item in the lower column is first.
        tile_columns: number of columns of a tile; TILE_COLUMNS by default.
        dtype: floating-point type of the scores.
    """
    num_items, tile_columns = len(row_C), tile_columns or TILE_COLUMNS
    k = min(k, num_items)
    num_held_columns = min(num_items, max(BOUND_COLUMNS, k, tile_columns)) if top_only else num_items
    num_workers = max(1, min(torch.get_num_threads(), MAX_SCORES // (MIN_CHUNK_QUERIES * max(1, num_held_columns))))
    chunk_queries = max(MIN_CHUNK_QUERIES, min(MAX_CHUNK_QUERIES, CHUNK_SCORES // max(1, num_held_columns)))

    def rank_chunk(chunk: slice, seen: JaggedArray, targets: JaggedArray) -> tuple[NDArray[Any], NDArray[Any]]:
        tiles = _Tiles(score_tile, chunk, seen=seen, tile_columns=tile_columns, dtype=dtype)
        held_BC = tiles.fill(num_held_columns)
        top_BK = np.empty((len(held_BC), 0), np.int64)
        if k:
            top_BK = top_columns(held_BC, tiles.later(num_held_columns, num_items), k=k)
        query_T, column_T = targets.list_index_L, targets.values_L
        if not top_only:
            positions = [_position(held_BC[query], column) for query, column in zip(query_T, column_T, strict=True)]
            return top_BK, np.array(positions, np.int64)
        position_T = np.full(len(column_T), num_items)
        target_T, position = np.nonzero(top_BK[query_T] == column_T[:, None])
        position_T[target_T] = position
        return top_BK, position_T

    # Each worker computes on its own core. The threads of a BLAS library would wait in spin loops for cores that are busy.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(num_workers) as pool:
        return _rank_in_chunks(
            queries, partial(pool.map, rank_chunk), row_C=row_C, k=k, chunk_queries=chunk_queries, on_progress=on_progress
        )


def _rank_on_gpu(
    queries: Queries, *, item_vector_CD: Tensor, row_C: NDArray[Any], k: int, on_progress: Callable[[int], None], device: str
) -> Ranking:
    """Rank like `rank_by_scores`, by inner product on a GPU. The score matrix of a chunk of queries is in its memory."""
    item_CD, k = item_vector_CD.to(device), min(k, len(row_C))

    def rank_chunk(chunk: slice, seen: JaggedArray, targets: JaggedArray) -> tuple[NDArray[Any], NDArray[Any]]:
        score_BC = queries.query_BD[chunk].to(device) @ item_CD.T
        seen_query_L, seen_column_L, query_T, column_T = (
            torch.from_numpy(array).to(device) for lists in (seen, targets) for array in (lists.list_index_L, lists.values_L)
        )
        score_BC[seen_query_L, seen_column_L] = -torch.inf
        top_BK = top_columns_on_gpu(score_BC, k=k)
        return top_BK.cpu().numpy(), positions_on_gpu(score_BC, query_T, column_T).cpu().numpy()

    chunk_queries = max(1, min(MAX_CHUNK_QUERIES, GPU_CHUNK_SCORES // max(1, len(row_C))))
    return _rank_in_chunks(
        queries, partial(map, rank_chunk), row_C=row_C, k=k, chunk_queries=chunk_queries, on_progress=on_progress
    )


def _rank_in_chunks(
    queries: Queries,
    map_chunks: Callable[..., Iterator[tuple[NDArray[Any], NDArray[Any]]]],
    *,
    row_C: NDArray[Any],
    k: int,
    chunk_queries: int,
    on_progress: Callable[[int], None],
) -> Ranking:
    """Build the ranking from the columns of the top lists and the positions of the targets of each chunk.

    map_chunks: function of the slices of the queries, and of the columns of their seen items and of their targets.
    """
    num_queries, num_items = len(queries.targets), len(row_C)
    targets, seen, num_seen_targets = _exclude_seen(queries, num_items=num_items)
    column_I = np.argsort(row_C)
    chunks = list(chunk_slices(num_queries, length=chunk_queries))
    seen_by_chunk, targets_by_chunk = (
        [columns.slice(chunk.start, chunk.stop) for chunk in chunks]
        for columns in (JaggedArray(items.offset, column_I[items.values_L]) for items in (seen, targets))
    )
    top_BK, position_T = np.full((num_queries, k), -1, np.int32), np.empty(len(targets.values_L), np.int64)
    for chunk, (top_columns_BK, chunk_position_T) in zip(
        chunks, map_chunks(chunks, seen_by_chunk, targets_by_chunk), strict=True
    ):
        top_BK[chunk] = np.where(top_columns_BK >= 0, row_C[top_columns_BK], -1)
        position_T[targets.offset[chunk.start] : targets.offset[chunk.stop]] = chunk_position_T
        on_progress(chunk.stop - chunk.start)
    return Ranking(
        query_T=targets.list_index_L,
        item_T=targets.values_L,
        position_T=position_T,
        num_candidates_B=num_items - seen.lengths,
        top_BK=top_BK,
        num_seen_targets=num_seen_targets,
        num_items=num_items,
    )


class _Tiles:
    """The scores of a chunk of queries, computed tile by tile. Scores of seen columns are -inf."""

    def __init__(self, score_tile: ScoreTile, queries: slice, *, seen: JaggedArray, tile_columns: int, dtype: Any) -> None:
        self._score_tile, self._queries, self._tile_columns, self._dtype = score_tile, queries, tile_columns, dtype
        order_L = np.argsort(seen.values_L, kind="stable")
        self._seen_query_L, self._seen_column_L = seen.list_index_L[order_L], seen.values_L[order_L]

    def fill(self, num_columns: int) -> NDArray[Any]:
        """Return the scores of the first columns, [B, C]."""
        score_BC = np.empty((self._queries.stop - self._queries.start, num_columns), self._dtype)
        for columns in chunk_slices(num_columns, length=self._tile_columns):
            self._score(columns, score_BC[:, columns])
        return score_BC

    def later(self, first_column: int, num_columns: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield the first column and the scores of each later tile. All tiles share one buffer."""
        num_queries = self._queries.stop - self._queries.start
        buffer = np.empty(num_queries * self._tile_columns, self._dtype)
        for columns in chunk_slices(num_columns - first_column, length=self._tile_columns):
            columns = slice(columns.start + first_column, columns.stop + first_column)
            width = columns.stop - columns.start
            score_BC = buffer[: num_queries * width].reshape(num_queries, width)
            self._score(columns, score_BC)
            yield columns.start, score_BC

    def _score(self, columns: slice, score_BC: NDArray[Any]) -> None:
        self._score_tile(self._queries, columns, score_BC)
        seen_range = slice(*np.searchsorted(self._seen_column_L, [columns.start, columns.stop]))
        score_BC[self._seen_query_L[seen_range], self._seen_column_L[seen_range] - columns.start] = -np.inf


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
    top_only: bool = False,
    device: str = "cpu",
    on_progress: Callable[[int], None] = lambda num_queries: None,
) -> Ranking:
    """Rank as the Retriever does: by inner product for known users, by popularity for the other users.

    order_I: all item rows by falling popularity. The other arguments are those of `rank_catalogue`.
    """
    query_groups = [np.flatnonzero(queries.is_known_B), np.flatnonzero(~queries.is_known_B)]
    known_queries, unknown_queries = (queries.take(query_indices) for query_indices in query_groups)
    ranking_by_score = rank_catalogue(
        known_queries, item_vector_ID=item_vector_ID, k=k, top_only=top_only, device=device, on_progress=on_progress
    )
    rankings = (ranking_by_score, rank_by_order(unknown_queries, order_I=order_I, k=k))
    on_progress(len(query_groups[1]))
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
    seen_keys, target_keys = seen.pair_keys(bound=num_items), distinct_targets.pair_keys(bound=num_items)
    index_T = np.searchsorted(seen_keys, target_keys)  # both are sorted, which makes this faster than np.isin
    is_seen_T = np.append(seen_keys, -1)[index_T] == target_keys
    return distinct_targets.filter(~is_seen_T), seen, int(np.count_nonzero(is_seen_T))


def _position(score_C: NDArray[Any], column: int) -> int:
    """Return the number of columns ranked above `column`: columns with higher scores, and lower columns with the same score."""
    score = score_C[column]
    return int(np.count_nonzero(score_C[:column] >= score) + np.count_nonzero(score_C[column + 1 :] > score))
