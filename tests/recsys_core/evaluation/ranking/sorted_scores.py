"""Rankings of small score matrices by a sort in plain Python, with which tests compare rankings."""

import numpy as np
import torch
from hypothesis import strategies as st

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation.ranking.queries import Queries, Ranking, tie_order

NUM_ITEMS, NUM_QUERIES = 9, 5
lists_of_item_rows = st.lists(st.lists(st.integers(0, NUM_ITEMS - 1), max_size=4), min_size=NUM_QUERIES, max_size=NUM_QUERIES)


def jagged_of(lists: list[list[int]]) -> JaggedArray:
    return JaggedArray(np.cumsum([0, *map(len, lists)]), np.array([row for rows in lists for row in rows], np.int64))


def queries_of(
    vectors: np.ndarray | torch.Tensor, *, seen: list[list[int]], targets: list[list[int]], known: list[bool] | None = None
) -> Queries:
    """Return queries with these vectors, seen items and targets. known: whether each user is known; None if all are."""
    is_known_B = np.ones(len(vectors), bool) if known is None else np.array(known)
    query_BD = torch.as_tensor(vectors, dtype=torch.float32)
    return Queries(query_BD, is_known_B=is_known_B, seen=jagged_of(seen), targets=jagged_of(targets))


Positions = dict[tuple[int, int], int]
"""Position of each (query index, target item row)."""


def sorted_ranking(score: np.ndarray, *, seen: list[list[int]], targets: list[list[int]]) -> tuple[Positions, list[list[int]]]:
    """Return the position of each target, and the unseen item rows of each query by falling score, with ties in `tie_order`."""
    tie_index_by_row = {row: index for index, row in enumerate(tie_order(score.shape[1]).tolist())}
    orders = [
        sorted({*range(score.shape[1])} - {*seen_rows}, key=lambda row: (-score_I[row], tie_index_by_row[row]))
        for score_I, seen_rows in zip(score, seen, strict=True)
    ]
    positions = {
        (query, target): order.index(target)
        for query, order in enumerate(orders)
        for target in {*targets[query]} - {*seen[query]}
    }
    return positions, orders


def assert_ranking(ranking: Ranking, *, positions: Positions, orders: list[list[int]], k: int) -> None:
    queries_items_and_positions = zip(
        ranking.query_T.tolist(), ranking.item_T.tolist(), ranking.position_T.tolist(), strict=True
    )
    assert [*queries_items_and_positions] == [(query, target, positions[query, target]) for query, target in sorted(positions)]
    assert [[row for row in top if row >= 0] for top in ranking.top_BK.tolist()] == [order[:k] for order in orders]
    assert ranking.num_candidates_B.tolist() == [len(order) for order in orders]
