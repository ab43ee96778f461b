"""Metrics of the recommended items: coverage, novelty, concentration, popularity, diversity and known negatives.

Shapes: B queries, K items of a list, I items, L items of all histories, R pretrained vectors, D width. -1 in a list means that
the list has no further item.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.jagged import JaggedArray, chunk_slices

CHUNK_QUERIES = 4_096
MAX_CHUNK_VALUES = 1 << 25
"""Largest number of values of item vectors that are in memory at once: 256 MiB, and twice as much for intermediate results."""


def coverage(top_BK: NDArray[np.int32], *, k: int, num_items: int) -> float:
    """Return the share of the catalogue that is among the first k items of at least one query.

    >>> coverage(np.array([[3, 1, 2], [3, 0, -1]], np.int32), k=2, num_items=4)
    0.75
    """
    coverage_at_k = Coverage((k,), num_items=num_items)
    coverage_at_k.add(top_BK)
    return coverage_at_k.shares()[k]


class Coverage:
    """The coverage at several cut-offs, from the top lists of chunks of queries."""

    def __init__(self, ks: Sequence[int], *, num_items: int) -> None:
        self._ks = sorted(ks)
        self._first_cut_off_index_I = np.full(num_items + 1, len(ks), np.uint8)  # the last entry is for row -1

    def add(self, top_BK: NDArray[np.int32]) -> None:
        """Add the top lists of a chunk of queries."""
        for cut_off_index, k in enumerate(self._ks):
            rows_BK = top_BK[:, :k]
            self._first_cut_off_index_I[rows_BK] = np.minimum(self._first_cut_off_index_I[rows_BK], cut_off_index)

    def shares(self) -> dict[int, float]:
        """Return the coverage at each cut-off."""
        first_cut_off_index_I = self._first_cut_off_index_I[:-1]
        return {
            k: float(np.count_nonzero(first_cut_off_index_I <= cut_off_index) / len(first_cut_off_index_I))
            for cut_off_index, k in enumerate(self._ks)
        }


def novelty(top_BK: NDArray[Any], *, train_count_I: NDArray[Any]) -> float:
    """Return the mean self-information in bits of the recommended items: -log2 of their share of the training events.

    Each item gets one additional event, so an item without an event has a finite value (Zhou et al., PNAS 2010).

    >>> novelty(np.array([[0, 1], [1, -1]]), train_count_I=np.array([3, 1, 0, 0]))  # shares 4/8 and 2/8
    1.6666666666666667
    """
    return float(item_information(train_count_I)[top_BK[top_BK >= 0]].mean())


def item_information(train_count_I: NDArray[Any]) -> NDArray[np.float64]:
    """Return the self-information of each item in bits; see `novelty`."""
    information_I: NDArray[np.float64] = -np.log2((train_count_I + 1) / (train_count_I.sum() + len(train_count_I)))
    return information_I


def gini(count_I: NDArray[np.int64]) -> float:
    """Return the Gini coefficient of the number of recommendations per item: 0 if all items are recommended equally often.

    >>> gini(np.array([1, 1, 1, 1])), gini(np.array([2, 0, 0, 0]))
    (0.0, 0.75)
    """
    count_I, num_items = np.sort(count_I), len(count_I)
    ordinal_I = np.arange(1, num_items + 1)
    return float((2 * ordinal_I - num_items - 1) @ count_I / (num_items * count_I.sum()))


def popularity_lift(top_BK: NDArray[Any], *, history_item_L: NDArray[Any], train_count_I: NDArray[Any]) -> float:
    """Return the relative difference between the popularity of recommended items and of items in histories.

    The popularity is the mean number of training events (Abdollahpouri et al., UMAP 2021). NaN if all histories are
    empty.

    >>> popularity_lift(np.array([[0, 1]]), history_item_L=np.array([1, 2]), train_count_I=np.array([4, 2, 1]))
    1.0
    """
    history_popularity = train_count_I[history_item_L].mean() if len(history_item_L) else 0.0
    return float(train_count_I[top_BK[top_BK >= 0]].mean() / history_popularity - 1) if history_popularity else float("nan")


def list_distances(
    top_BK: NDArray[Any], *, vectors_RD: NDArray[np.float32], vector_row_I: NDArray[Any]
) -> Iterator[tuple[float, int]]:
    """Yield the sum of the lists' distances and the number of lists, for each chunk of lists.

    The distance of a list is the mean cosine distance of two of its items, and the diversity is the mean distance of the lists
    (Ziegler et al., WWW 2005). Items without a vector are ignored. A list is ignored if fewer than two of its items have a
    vector.

    Args:
        vectors_RD: pretrained vectors.
        vector_row_I: row of each item in vectors_RD; -1 for an item without a vector.

    >>> vectors_RD = np.array([[1, 0], [0, 2], [3, 0]], np.float32)
    >>> [*list_distances(np.array([[0, 1], [0, 2], [1, -1]]), vectors_RD=vectors_RD, vector_row_I=np.arange(3))]
    [(1.0, 2)]
    """
    values_per_list = top_BK.shape[1] * vectors_RD.shape[1]
    lists_per_chunk = max(1, min(CHUNK_QUERIES, MAX_CHUNK_VALUES // max(1, values_per_list)))
    for chunk in chunk_slices(len(top_BK), length=lists_per_chunk):
        chunk_BK = top_BK[chunk]
        row_BK = np.where(chunk_BK >= 0, np.asarray(vector_row_I)[chunk_BK], -1)
        vector_BKD = vectors_RD[np.maximum(row_BK, 0)].astype(np.float64)
        norm_BK1 = np.linalg.norm(vector_BKD, axis=2, keepdims=True)
        has_vector_BK = (row_BK >= 0) & (norm_BK1[..., 0] > 0)
        unit_BKD = np.where(has_vector_BK[..., None], vector_BKD / np.maximum(norm_BK1, np.finfo(np.float64).tiny), 0.0)
        num_vectors_B = has_vector_BK.sum(axis=1)
        # The squared norm of a sum of unit vectors is their number plus the cosines of all ordered pairs.
        cosine_sum_B = (unit_BKD.sum(axis=1) ** 2).sum(axis=1) - num_vectors_B
        has_pair_B = num_vectors_B > 1
        num_pairs_B = num_vectors_B[has_pair_B] * (num_vectors_B[has_pair_B] - 1)
        yield float((1 - cosine_sum_B[has_pair_B] / num_pairs_B).sum()), int(has_pair_B.sum())


def known_negative_share(top_BK: NDArray[Any], *, known_negatives: JaggedArray, k: int, num_items: int) -> NDArray[np.float64]:
    """Return the share of known negatives among the first k items of each list, [B]. NaN for a user without known negatives.

    As in `precision`, the denominator is k even if fewer items are ranked.

    Args:
        known_negatives: item rows that each user has rejected.

    The known negatives of the first user are 3 and 5. The second user has none.

    >>> known_negatives = JaggedArray(np.array([0, 2, 2]), np.array([3, 5]))
    >>> top_BK = np.array([[3, 1, 5, 0], [3, 5, 0, 1]])
    >>> known_negative_share(top_BK, known_negatives=known_negatives, k=4, num_items=6).tolist()
    [0.5, nan]
    """
    share_B = np.full(len(top_BK), np.nan)
    for chunk in chunk_slices(len(top_BK), length=CHUNK_QUERIES):
        chunk_negatives = known_negatives.slice(chunk.start, chunk.stop)
        item_BK = top_BK[chunk, :k].astype(np.int64)
        pair_key_BK = np.where(item_BK >= 0, np.arange(len(item_BK))[:, None] * num_items + item_BK, -1)
        num_negatives_B = np.isin(pair_key_BK, chunk_negatives.pair_keys(bound=num_items)).sum(axis=1)
        share_B[chunk] = np.where(chunk_negatives.lengths > 0, num_negatives_B / k, np.nan)
    return share_B
