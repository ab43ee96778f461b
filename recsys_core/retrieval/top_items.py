"""The best items that may be recommended to each query of a batch, from the candidates of an index.

Shapes: B queries, I items, D width, K recommended items, N candidates fetched from the index, L excluded items of all queries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.jagged import JaggedArray, is_in_sorted
from recsys_core.retrieval.kinds import AnyIndexKind
from recsys_core.retrieval.search import Selection, search, search_exhaustively

MAX_SEARCHED_SHARE = 1 / 16
"""A query that needs a larger share of the allowed items is compared with all of them, which is faster than a deep search."""


@dataclass(frozen=True)
class Candidates:
    """The items that a request allows.

    Attributes:
        num_items: number of allowed items.
        is_allowed_I, selection: the allowed items as a mask and as a FAISS selection; both are None if all items are allowed.
        excluded_rows: distinct rows of allowed items that the request excludes for all queries.
    """

    num_items: int
    is_allowed_I: NDArray[np.bool_] | None
    selection: Selection | None
    excluded_rows: NDArray[np.int64]

    def excluded_from(self, excluded_items: JaggedArray, *, bound: int) -> JaggedArray:
        """Return the allowed items that are excluded for each query. `excluded_items`: distinct items to exclude, per query."""
        if len(self.excluded_rows):
            num_queries = len(excluded_items)
            length_B = np.full(num_queries, len(self.excluded_rows))
            request_excluded_items = JaggedArray.from_lengths(length_B, np.tile(self.excluded_rows, num_queries))
            excluded_items = excluded_items.union(request_excluded_items, bound=bound)
        if self.is_allowed_I is None:
            return excluded_items
        return excluded_items.filter(self.is_allowed_I[excluded_items.values_L])


class TopItems:
    """The best items that are not excluded, for each query of a batch.

    Attributes:
        num_requested_B: number of items to recommend: the smaller of k and the number of items that are not excluded.
        depth_B: number of candidates to fetch, so that num_requested_B items remain after the exclusion.
        num_items_B: number of items set in row_BK and score_BK.
        row_BK, score_BK: item rows and scores, best first.
    """

    def __init__(self, *, excluded_items: JaggedArray, k: int, num_candidates: int, bound: int) -> None:
        """Start without items.

        Args:
            excluded_items: sorted items that are excluded for each query.
            num_candidates: number of allowed items.
            bound: number of items of the catalogue.
        """
        self._excluded_items, self._bound = excluded_items, bound
        self.num_requested_B = np.minimum(k, num_candidates - excluded_items.lengths)
        self.depth_B = np.maximum(1, self.num_requested_B + np.where(self.num_requested_B > 0, excluded_items.lengths, 0))
        self.num_items_B = np.zeros(len(excluded_items), np.int64)
        self.row_BK = np.full((len(excluded_items), k), -1, np.int64)
        self.score_BK = np.zeros((len(excluded_items), k), np.float32)

    def is_short(self, query_indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each query has fewer items than requested."""
        return self.num_items_B[query_indices] < self.num_requested_B[query_indices]

    def fill(self, query_indices: NDArray[np.int64], row_BN: NDArray[np.int64], score_BN: NDArray[np.float32]) -> None:
        """Set the items of the queries to the first candidates that are not excluded. Row -1 marks a missing candidate."""
        candidate_key_BN = np.arange(len(query_indices))[:, None] * self._bound + row_BN
        excluded_keys = self._excluded_items.take(query_indices).pair_keys(bound=self._bound)
        is_recommended_BN = (row_BN >= 0) & ~is_in_sorted(candidate_key_BN, excluded_keys)
        position_BN = is_recommended_BN.cumsum(axis=1) - 1
        is_recommended_BN &= position_BN < self.num_requested_B[query_indices][:, None]
        query_BN = np.broadcast_to(query_indices[:, None], is_recommended_BN.shape)
        self.row_BK[query_BN[is_recommended_BN], position_BN[is_recommended_BN]] = row_BN[is_recommended_BN]
        self.score_BK[query_BN[is_recommended_BN], position_BN[is_recommended_BN]] = score_BN[is_recommended_BN]
        self.num_items_B[query_indices] = is_recommended_BN.sum(axis=1)

    def complete(
        self,
        query_indices: NDArray[np.int64],
        *,
        is_allowed_I: NDArray[np.bool_] | None,
        score_items: Callable[[int, NDArray[np.int64]], NDArray[np.float32]],
    ) -> None:
        """Add the best further items to queries that have fewer items than requested after an exhaustive search.

        This is necessary for the kind pq_fastscan without rescore: its search never returns an item whose codes have the lowest
        possible score.

        Args:
            is_allowed_I: the allowed items; None if all items are allowed.
            score_items: returns the scores of a query with items, given the index of the query and the item rows.
        """
        for query in query_indices[self.is_short(query_indices)].tolist():
            free_places = slice(int(self.num_items_B[query]), int(self.num_requested_B[query]))
            is_available_I = np.ones(self._bound, np.bool_) if is_allowed_I is None else is_allowed_I.copy()
            is_available_I[self._excluded_items.slice(query, query + 1).values_L] = False
            is_available_I[self.row_BK[query, : free_places.start]] = False
            available_rows = np.flatnonzero(is_available_I)
            score_N = score_items(query, available_rows)
            best_indices = np.argsort(-score_N, kind="stable")[: free_places.stop - free_places.start]
            # An exact score may be above the approximate scores of the items before it.
            max_score = self.score_BK[query, : free_places.start].min(initial=np.inf)
            self.row_BK[query, free_places] = available_rows[best_indices]
            self.score_BK[query, free_places] = np.minimum(score_N[best_indices], max_score)
            self.num_items_B[query] = free_places.stop

    def drop_below(self, min_score: float, query_indices: NDArray[np.int64]) -> None:
        """Drop the items whose score is below `min_score`: the last items of each query."""
        # Places without an item have a score of 0, which may be above `min_score`.
        is_above_min_BK = self.is_item_BK[query_indices] & (self.score_BK[query_indices] >= min_score)
        self.num_items_B[query_indices] = is_above_min_BK.sum(axis=1)

    @property
    def is_item_BK(self) -> NDArray[np.bool_]:
        """Whether each place of row_BK and score_BK has an item."""
        is_item_BK: NDArray[np.bool_] = np.arange(self.row_BK.shape[1]) < self.num_items_B[:, None]
        return is_item_BK


@dataclass(frozen=True)
class IndexSearch:
    """A search of the allowed items with an index."""

    index: Any
    kind: AnyIndexKind
    candidates: Candidates

    def fill(self, top_items: TopItems, query_indices: NDArray[np.int64], query_BD: NDArray[np.float32]) -> None:
        """Fill the top items of some queries.

        Queries that need a similar number of candidates are searched together. If an approximate index returns too few items
        for a query, the query is searched again over all vectors.

        Args:
            query_indices: indices of the queries in the batch.
            query_BD: vectors of these queries, in the same order.
        """
        depth_B = top_items.depth_B[query_indices]
        log_depth_B = np.ceil(np.log2(np.maximum(depth_B, 1))).astype(np.int64)
        for log_depth in np.unique(log_depth_B):
            indices = np.flatnonzero(log_depth_B == log_depth)
            depth = int(depth_B[indices].max())
            is_exhaustive = depth > self.candidates.num_items * MAX_SEARCHED_SHARE
            self._fill_group(top_items, query_indices[indices], query_BD[indices], depth=depth, is_exhaustive=is_exhaustive)
            short_indices = indices[top_items.is_short(query_indices[indices])]
            if len(short_indices):
                self._fill_group(
                    top_items, query_indices[short_indices], query_BD[short_indices], depth=depth, is_exhaustive=True
                )

    def _fill_group(
        self,
        top_items: TopItems,
        query_indices: NDArray[np.int64],
        query_BD: NDArray[np.float32],
        *,
        depth: int,
        is_exhaustive: bool,
    ) -> None:
        search_items = search_exhaustively if is_exhaustive else search
        score_BN, row_BN = search_items(self.index, query_BD, kind=self.kind, depth=depth, selection=self.candidates.selection)
        top_items.fill(query_indices, row_BN, score_BN)
