"""The ranking of small score matrices by a sort in plain Python."""

import numpy as np
import torch
from hypothesis import strategies as st

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation.ranking.queries import Queries, Ranking, tie_order

NUM_ITEMS, NUM_QUERIES = 9, 5
row_lists = st.lists(st.lists(st.integers(0, NUM_ITEMS - 1), max_size=4), min_size=NUM_QUERIES, max_size=NUM_QUERIES)


def lists_of(python: list[list[int]]) -> JaggedArray:
    return JaggedArray(np.cumsum([0, *map(len, python)]), np.array([row for rows in python for row in rows], np.int64))


def queries_of(
    vectors: np.ndarray | torch.Tensor, *, seen: list[list[int]], targets: list[list[int]], known: list[bool] | None = None
) -> Queries:
    is_known_B = np.ones(len(vectors), bool) if known is None else np.array(known)
    query_BD = torch.as_tensor(vectors, dtype=torch.float32)
    return Queries(query_BD, is_known_B=is_known_B, seen=lists_of(seen), targets=lists_of(targets))


Positions = dict[tuple[int, int], int]


def oracle(score: np.ndarray, *, seen: list[list[int]], targets: list[list[int]]) -> tuple[Positions, list[list[int]]]:
    """Return the position of each (query, target) and the full order of each query, by a sort with ties in `tie_order`."""
    tie_index = {row: index for index, row in enumerate(tie_order(score.shape[1]).tolist())}
    orders = [
        sorted(set(range(score.shape[1])) - set(seen[q]), key=lambda row: (-score_I[row], tie_index[row]))
        for q, score_I in enumerate(score)
    ]
    return {(q, t): order.index(t) for q, order in enumerate(orders) for t in {*targets[q]} - {*seen[q]}}, orders


def check(ranking: Ranking, *, positions: Positions, orders: list[list[int]], k: int) -> None:
    pairs = zip(ranking.query_T.tolist(), ranking.item_T.tolist(), ranking.position_T.tolist(), strict=True)
    assert [*pairs] == [(q, t, positions[q, t]) for q, t in sorted(positions)]
    assert [[row for row in top if row >= 0] for top in ranking.top_BK.tolist()] == [order[:k] for order in orders]
    assert ranking.num_candidates_B.tolist() == [len(order) for order in orders]
