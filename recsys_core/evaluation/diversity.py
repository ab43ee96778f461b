"""Metrics of the recommended items beyond accuracy: novelty, concentration, popularity, diversity and known negatives.

Shapes: B queries, K items of a list, I items, D width. -1 in a list is no item.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.jagged import JaggedArray, chunk_slices

CHUNK_QUERIES = 4_096


def novelty(top_BK: NDArray[Any], *, train_count_I: NDArray[Any]) -> float:
    """Return the mean self-information in bits of the recommended items: -log2 of their share of the training events.

    Each item gets one additional event, so an item without an event has a finite value (Zhou et al., PNAS 2010).

    >>> novelty(np.array([[0, 1], [1, -1]]), train_count_I=np.array([3, 1, 0, 0]))  # shares 4/8 and 2/8
    1.6666666666666667
    """
    information_I = -np.log2((train_count_I + 1) / (train_count_I.sum() + len(train_count_I)))
    return float(information_I[top_BK[top_BK >= 0]].mean())


def gini(top_BK: NDArray[Any], *, num_items: int) -> float:
    """Return the Gini coefficient of the number of recommendations of each item: 0 if all items are recommended equally often.

    >>> gini(np.array([[0, 1], [2, 3]]), num_items=4), gini(np.array([[0], [0]]), num_items=4)
    (0.0, 0.75)
    """
    count_I = np.sort(np.bincount(top_BK[top_BK >= 0], minlength=num_items))
    rank_I = np.arange(1, num_items + 1)
    return float((2 * rank_I - num_items - 1) @ count_I / (num_items * count_I.sum()))


def popularity_lift(top_BK: NDArray[Any], *, history_item_L: NDArray[Any], train_count_I: NDArray[Any]) -> float:
    """Return the relative difference between the popularity of recommended items and of items in histories.

    The popularity is the mean number of training events (Abdollahpouri et al., UMAP 2021). NaN without histories.

    >>> popularity_lift(np.array([[0, 1]]), history_item_L=np.array([1, 2]), train_count_I=np.array([4, 2, 1]))
    1.0
    """
    history_popularity = train_count_I[history_item_L].mean() if len(history_item_L) else 0.0
    return float(train_count_I[top_BK[top_BK >= 0]].mean() / history_popularity - 1) if history_popularity else float("nan")


def intra_list_diversity(top_BK: NDArray[Any], *, vectors_RD: NDArray[np.float32], vector_row_I: NDArray[Any]) -> float:
    """Return the mean cosine distance of two items in a list, averaged over the lists (Ziegler et al., WWW 2005).

    Items without a vector are left out, and so are lists with fewer than two other items. NaN without a list.

    Args:
        vectors_RD: pretrained vectors.
        vector_row_I: row of each item in vectors_RD; -1 without a vector.

    >>> vectors_RD = np.array([[1, 0], [0, 2], [3, 0]], np.float32)
    >>> intra_list_diversity(np.array([[0, 1], [0, 2]]), vectors_RD=vectors_RD, vector_row_I=np.arange(3))
    0.5
    """
    distance_sum, num_lists = 0.0, 0
    for start in range(0, len(top_BK), CHUNK_QUERIES):
        chunk_BK = top_BK[start : start + CHUNK_QUERIES]
        row_BK = np.where(chunk_BK >= 0, np.asarray(vector_row_I)[chunk_BK], -1)
        vector_BKD = vectors_RD[np.maximum(row_BK, 0)].astype(np.float64)
        norm_BK1 = np.linalg.norm(vector_BKD, axis=2, keepdims=True)
        is_used_BK = (row_BK >= 0) & (norm_BK1[..., 0] > 0)
        unit_BKD = np.where(is_used_BK[..., None], vector_BKD / np.maximum(norm_BK1, np.finfo(np.float64).tiny), 0.0)
        num_used_B = is_used_BK.sum(axis=1)
        # The squared length of the sum of unit vectors is their number plus the cosines of all ordered pairs.
        cosine_sum_B = (unit_BKD.sum(axis=1) ** 2).sum(axis=1) - num_used_B
        has_pair_B = num_used_B > 1
        num_pairs_B = num_used_B[has_pair_B] * (num_used_B[has_pair_B] - 1)
        distance_sum += float((1 - cosine_sum_B[has_pair_B] / num_pairs_B).sum())
        num_lists += int(has_pair_B.sum())
    return distance_sum / num_lists if num_lists else float("nan")


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
        negatives = known_negatives.slice(chunk.start, chunk.stop)
        item_BK = top_BK[chunk, :k].astype(np.int64)
        key_BK = np.where(item_BK >= 0, np.arange(len(item_BK))[:, None] * num_items + item_BK, -1)
        num_negatives_B = np.isin(key_BK, negatives.pair_keys(bound=num_items)).sum(axis=1)
        share_B[chunk] = np.where(negatives.lengths > 0, num_negatives_B / k, np.nan)
    return share_B
