"""Exact top lists of a chunk of queries and positions of their targets, from scores that are computed tile by tile.

A tile has the scores of some columns (items), and is small enough for the cache of a core. Writing and reading the whole score
matrix would take longer than computing it.

Shapes: B queries of the chunk, C columns, K length of the top list, L candidates of all queries, T targets of the chunk.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.jagged import chunk_slices

_MAX_BLOCK_COLUMNS = 16
"""Largest number of columns in a block of `_lower_bound`."""

Scores = NDArray[Any]
"""Floating-point scores [B, C]. The score of an excluded column is -inf."""


class _Candidates(NamedTuple):
    """Scores that may be in the top lists, in any order of the queries. Equal scores of a query are in column order."""

    query_L: NDArray[np.int64]
    column_L: NDArray[Any]
    score_L: Scores


class TopLists:
    """The k best columns of each query, from tiles in ascending order of their columns. Equal scores are ordered by column.

    The first columns give a lower bound of the k-th best score. If the columns are in random order, only few scores of later
    columns are above this bound.

    Attributes:
        column_BK: int32, columns of the k best scores so far; -1 after the last column.

    >>> lists = TopLists(1, k=3)
    >>> lists.add([(0, np.array([[1.0, 3.0, -np.inf]])), (3, np.array([[3.0, 9.0]]))])
    >>> lists.column_BK.tolist()
    [[4, 1, 3]]
    >>> lists.add([(5, np.array([[3.0, 8.0]]))])
    >>> lists.column_BK.tolist()
    [[4, 6, 1]]
    """

    def __init__(self, num_queries: int, *, k: int) -> None:
        self._k = k
        self.column_BK = np.full((num_queries, k), -1, np.int32)
        self._score_BK: Scores | None = None

    def add(self, tiles: Iterable[tuple[int, Scores]]) -> None:
        """Add the columns of a block.

        tiles: first column and scores of each tile. All tiles may share one array. The first tile of the first block has at
            least k columns.
        """
        num_queries, tiles = len(self.column_BK), iter(tiles)
        if self._score_BK is None:
            first_column, first_score_BC = next(tiles)
            bound_B1 = _lower_bound(first_score_BC, k=self._k)[:, None]
            candidates = [_candidates_where(first_score_BC, first_score_BC >= bound_B1, first_column=first_column)]
        else:
            bound_B1 = self._score_BK[:, -1:]
            candidates = [self._listed_candidates(self._score_BK)]
        flag_buffer_L = np.empty(0, np.bool_)
        for first_column, score_BC in tiles:
            # A later column whose score equals the bound is below k earlier columns with at least this score.
            flag_buffer_L = flag_buffer_L if len(flag_buffer_L) >= score_BC.size else np.empty(score_BC.size, np.bool_)
            is_above_BC = flag_buffer_L[: score_BC.size].reshape(score_BC.shape)
            candidates.append(
                _candidates_where(score_BC, np.greater(score_BC, bound_B1, out=is_above_BC), first_column=first_column)
            )
        merged_candidates = _Candidates(*(np.concatenate(arrays) for arrays in zip(*candidates, strict=True)))
        column_BC, score_BC = _score_matrices(merged_candidates, num_queries=num_queries)
        if score_BC.shape[1] > self._k:  # sort only the scores that are at least the k-th best
            kth_score_B1 = np.partition(score_BC, -self._k, axis=1)[:, -self._k, None]
            query_L, index_L = np.nonzero(score_BC >= kth_score_B1)
            best_candidates = _Candidates(query_L, column_BC[query_L, index_L], score_BC[query_L, index_L])
            column_BC, score_BC = _score_matrices(best_candidates, num_queries=num_queries)
        order_BK = np.argsort(-score_BC, axis=1, kind="stable")[:, : self._k]
        self._score_BK = np.full((num_queries, self._k), -np.inf, score_BC.dtype)
        for list_BK, value_BC in ((self.column_BK, column_BC), (self._score_BK, score_BC)):
            list_BK[:, : order_BK.shape[1]] = np.take_along_axis(value_BC, order_BK, axis=1)

    def _listed_candidates(self, score_BK: Scores) -> "_Candidates":
        query_L, index_L = np.nonzero(score_BK > -np.inf)
        return _Candidates(query_L, self.column_BK[query_L, index_L], score_BK[query_L, index_L])


def listed_positions(
    column_BK: NDArray[Any], query_T: NDArray[np.int64], column_T: NDArray[np.int64], *, num_columns: int
) -> NDArray[np.int64]:
    """Return the position of each target in the top list of its query, or `num_columns` if the list does not contain it, [T].

    >>> listed_positions(np.array([[4, 1, 3]]), np.array([0, 0]), np.array([3, 2]), num_columns=5).tolist()
    [2, 5]
    """
    position_T = np.full(len(column_T), num_columns)
    target_T, position = np.nonzero(column_BK[query_T] == column_T[:, None])
    position_T[target_T] = position
    return position_T


def num_above(score_C: NDArray[Any], *, first_column: int, column: int, score: Any) -> int:
    """Return how many columns of a block are ranked above a target: higher scores, and equal scores in lower columns.

    first_column: column of score_C[0]. column, score: column and score of the target, which may be in another block.

    >>> num_above(np.array([5.0, 7.0, 5.0]), first_column=10, column=12, score=5.0)
    2
    """
    num_lower_columns = min(max(column - first_column, 0), len(score_C))
    return int(np.count_nonzero(score_C[:num_lower_columns] >= score) + np.count_nonzero(score_C[num_lower_columns:] > score))


def top_columns_on_gpu(score_BC: Tensor, *, k: int) -> Tensor:
    """Return the columns of the k best scores like `TopLists`, from a score matrix on its device.

    `torch.topk` orders equal scores arbitrarily, so it only determines the k-th best score.

    >>> top_columns_on_gpu(torch.tensor([[1.0, 3.0, -torch.inf, 3.0, 3.0]]), k=2).tolist()
    [[1, 3]]
    """
    if k == 0:
        return torch.empty((len(score_BC), 0), dtype=torch.int64)
    kth_score_B1 = score_BC.topk(k, dim=1).values[:, -1:]
    is_top_BC, is_tied_BC = score_BC > kth_score_B1, score_BC == kth_score_B1
    num_tied_in_list_B1 = k - is_top_BC.sum(dim=1, keepdim=True)
    is_top_BC |= is_tied_BC & (is_tied_BC.cumsum(dim=1, dtype=torch.int32) <= num_tied_in_list_B1)
    column_BK = is_top_BC.nonzero()[:, 1].view(len(score_BC), k)
    score_BK, order_BK = score_BC.gather(1, column_BK).sort(dim=1, descending=True, stable=True)
    return column_BK.gather(1, order_BK).masked_fill(score_BK == -torch.inf, -1)


def num_above_on_gpu(score_BC: Tensor, query_T: Tensor, column_T: Tensor, *, first_column: int, score_T: Tensor) -> Tensor:
    """Return how many columns of a block are ranked above each target like `num_above`, [T].

    >>> score_BC, query_T, column_T = torch.tensor([[5.0, 7.0, 5.0]]), torch.tensor([0]), torch.tensor([12])
    >>> num_above_on_gpu(score_BC, query_T, column_T, first_column=10, score_T=torch.tensor([5.0])).tolist()
    [2]
    """
    column_C = torch.arange(first_column, first_column + score_BC.shape[1], device=score_BC.device)
    num_above_by_slice = []
    for targets in chunk_slices(len(query_T), length=max(1, len(score_BC))):  # a slice needs as much memory as the scores
        row_BC, score_B1, column_B1 = score_BC[query_T[targets]], score_T[targets, None], column_T[targets, None]
        is_above_BC = (row_BC > score_B1) | ((row_BC == score_B1) & (column_C < column_B1))
        num_above_by_slice.append(is_above_BC.sum(dim=1))
    return torch.cat(num_above_by_slice) if num_above_by_slice else query_T


def _lower_bound(score_BC: Scores, *, k: int) -> Scores:
    """Return a lower bound of each query's k-th best score, [B]: the k-th highest of the maxima of at least k blocks."""
    num_queries, num_columns = score_BC.shape
    columns_per_block = max(1, min(_MAX_BLOCK_COLUMNS, num_columns // (4 * k)))
    num_blocks = num_columns // columns_per_block
    block_max_BC = score_BC[:, : columns_per_block * num_blocks].reshape(num_queries, columns_per_block, num_blocks).max(axis=1)
    bound_B: Scores = np.partition(block_max_BC, num_blocks - k, axis=1)[:, num_blocks - k]
    return bound_B


def _candidates_where(score_BC: Scores, is_candidate_BC: NDArray[np.bool_], *, first_column: int) -> _Candidates:
    """Return the scores where `is_candidate_BC` is true, without excluded columns."""
    index_L = np.flatnonzero(is_candidate_BC)
    score_L = score_BC.reshape(-1)[index_L]
    is_ranked_L = score_L > -np.inf
    if not is_ranked_L.all():
        index_L, score_L = index_L[is_ranked_L], score_L[is_ranked_L]
    query_L = index_L // score_BC.shape[1]  # np.divmod is slower
    return _Candidates(query_L, index_L - query_L * score_BC.shape[1] + first_column, score_L)


def _score_matrices(candidates: _Candidates, *, num_queries: int) -> tuple[NDArray[np.int64], Scores]:
    """Return the columns and scores of each query as rows of two matrices, padded with -1 and -inf."""
    order_L = np.argsort(candidates.query_L.astype(np.uint16), kind="stable")  # 16-bit integers are sorted in linear time
    query_L, num_candidates_B = candidates.query_L[order_L], np.bincount(candidates.query_L, minlength=num_queries)
    index_L = np.arange(len(query_L)) - np.repeat(np.cumsum(num_candidates_B) - num_candidates_B, num_candidates_B)
    shape = (num_queries, int(num_candidates_B.max(initial=0)))
    column_BC, score_BC = np.full(shape, -1, np.int64), np.full(shape, -np.inf, candidates.score_L.dtype)
    column_BC[query_L, index_L], score_BC[query_L, index_L] = candidates.column_L[order_L], candidates.score_L[order_L]
    return column_BC, score_BC
