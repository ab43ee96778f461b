"""Recall and latency of an index on queries, and the search settings that reach a recall with the least latency.

FAISS's own search of operating points (ParameterSpace) is not used. It cannot set the parameters of an index inside an
IndexIDMap, it counts an item with the score of the last exact item as wrong, and it does not stop at a target.

Shapes: B queries, D width, I items, K exact items per query, N rows returned by an index.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from recsys_core.manifests import SearchPoint
from recsys_core.retrieval.kinds import AnyIndexKind, Flat
from recsys_core.retrieval.search import search

MAX_GATHERED_VALUES = 1 << 23
"""Largest number of vector values in memory while scores are computed."""
MIN_MEASURED_S, MAX_REPEATS = 0.2, 3
"""A search is repeated until its repetitions take MIN_MEASURED_S, at most MAX_REPEATS times. The fastest repetition counts,
because other processes disturb short measurements most."""

MIN_RECALL_GAIN = 0.001
"""A series of variants ends when twice the work raises the recall by less than this. Compressed vectors, for example, have a
limited recall."""


@dataclass(frozen=True)
class MeasuredQueries:
    """Queries with their exact results, on which an index is measured."""

    query_BD: NDArray[np.float32]
    exact_row_BK: NDArray[np.int64]
    item_vector_ID: NDArray[np.float32]

    @classmethod
    def with_exact_results(
        cls, query_BD: NDArray[np.float32], *, exact_index: Any, item_vector_ID: NDArray[np.float32], depth: int
    ) -> "MeasuredQueries":
        """Return the queries with the exact results that a flat index returns."""
        _, exact_row_BK = search(exact_index, query_BD, kind=Flat(), depth=depth)
        return cls(query_BD, exact_row_BK, item_vector_ID)

    def recall_and_latency(self, index: Any, kind: AnyIndexKind) -> tuple[NDArray[np.float64], float]:
        """Return the recall of each query [B], and the milliseconds per query. One thread searches all queries in one batch."""
        durations_s: list[float] = []
        with faiss_threads(1):
            while not durations_s or (len(durations_s) < MAX_REPEATS and sum(durations_s) < MIN_MEASURED_S):
                start_time = time.perf_counter()
                _, row_BN = search(index, self.query_BD, kind=kind, depth=self.exact_row_BK.shape[1])
                durations_s.append(time.perf_counter() - start_time)
        recall_B = recall_per_query(
            row_BN, exact_row_BK=self.exact_row_BK, query_BD=self.query_BD, item_vector_ID=self.item_vector_ID
        )
        return recall_B, 1000 * min(durations_s) / len(self.query_BD)

    def measure(self, index: Any, kind: AnyIndexKind) -> SearchPoint:
        """Return mean recall and latency of the index."""
        recall_B, ms_per_query = self.recall_and_latency(index, kind)
        return SearchPoint(
            parameters=kind.model_dump(exclude={"kind"}), recall=float(recall_B.mean()), ms_per_query=ms_per_query
        )


def tune(
    kind: AnyIndexKind, index: Any, queries: MeasuredQueries, *, recall_target: float
) -> tuple[AnyIndexKind, tuple[SearchPoint, ...]]:
    """Return the settings of the fastest search that reaches the target on the queries, and the points that were measured.

    If there is only one setting, nothing is measured. If no setting reaches the target, return the setting with the highest
    recall.
    """
    all_series: list[list[AnyIndexKind]] = [[*series] for series in kind.search_variants(queries.exact_row_BK.shape[1])]
    if sum(map(len, all_series)) == 1:
        return all_series[0][0], ()
    measured_pairs: list[tuple[AnyIndexKind, SearchPoint]] = []
    best_pair: tuple[AnyIndexKind, SearchPoint] | None = None
    for series in all_series:
        recalls: list[float] = []
        for variant in series:
            point = queries.measure(index, variant)
            measured_pairs.append((variant, point))
            recalls.append(point.recall)
            is_slower = best_pair is not None and point.ms_per_query >= best_pair[1].ms_per_query
            if point.recall >= recall_target and not is_slower:
                best_pair = variant, point
            if point.recall >= recall_target or is_slower or _has_stalled(recalls):
                break
    best_pair = best_pair or max(measured_pairs, key=lambda pair: pair[1].recall)
    return best_pair[0], tuple(point for _, point in measured_pairs)


def _has_stalled(recalls: Sequence[float]) -> bool:
    """Return whether the last two steps of a series, which double the work of a search, gained less than MIN_RECALL_GAIN."""
    return len(recalls) > 2 and recalls[-3] > 0 and recalls[-1] - recalls[-3] < MIN_RECALL_GAIN


def recall_per_query(
    row_BN: NDArray[np.int64],
    *,
    exact_row_BK: NDArray[np.int64],
    query_BD: NDArray[np.float32],
    item_vector_ID: NDArray[np.float32],
) -> NDArray[np.float64]:
    """Return the share of the exact top K items that an index returns for each query, [B]. Row -1 marks a missing item.

    An item with the same score as the last exact item counts as correct, because the order of equal scores is arbitrary.

    >>> item_vector_ID = np.array([[3], [2], [2], [1]], np.float32)
    >>> exact_row_BK = np.array([[0, 1], [0, 1]])
    >>> query_BD = np.ones((2, 1), np.float32)
    >>> row_BN = np.array([[0, 2], [3, -1]])
    >>> recall_per_query(row_BN, exact_row_BK=exact_row_BK, query_BD=query_BD, item_vector_ID=item_vector_ID)
    array([1., 0.])
    """
    num_queries, depth = exact_row_BK.shape
    num_correct_B = np.zeros(num_queries, np.int64)
    queries_per_chunk = max(1, MAX_GATHERED_VALUES // (query_BD.shape[1] * (depth + row_BN.shape[1])))
    for start in range(0, num_queries, queries_per_chunk):
        query_slice = slice(start, start + queries_per_chunk)
        # The same expression computes the scores on both sides, so that equal vectors have exactly equal scores.
        exact_score_BK, score_BN = (
            (item_vector_ID[rows] * query_BD[query_slice, None]).sum(axis=2)
            for rows in (exact_row_BK[query_slice], row_BN[query_slice])
        )
        is_correct_BN = (row_BN[query_slice] >= 0) & (score_BN >= exact_score_BK.min(axis=1, keepdims=True))
        num_correct_B[query_slice] = np.minimum(depth, is_correct_BN.sum(axis=1))
    recall_B: NDArray[np.float64] = num_correct_B / depth
    return recall_B


@contextmanager
def faiss_threads(num_threads: int) -> Iterator[None]:
    """Set the number of FAISS threads for a `with` block."""
    previous_num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(num_threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(previous_num_threads)
