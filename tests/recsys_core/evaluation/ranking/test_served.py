"""Rankings of known and unknown users, and rankings among candidates, compared with a sort in plain Python."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.evaluation.ranking.queries import Queries
from recsys_core.evaluation.ranking.served import rank_among, rank_as_served, rank_by_order
from tests.recsys_core.evaluation.ranking.sorted_scores import (
    NUM_ITEMS,
    NUM_QUERIES,
    assert_ranking,
    jagged_of,
    lists_of_item_rows,
    queries_of,
    sorted_ranking,
)


@given(st.permutations(range(NUM_ITEMS)), lists_of_item_rows, lists_of_item_rows, st.integers(0, NUM_ITEMS + 3))
def test_a_ranking_by_one_order_equals_a_ranking_by_scores_that_fall_in_this_order(
    order: list[int], seen: list[list[int]], targets: list[list[int]], k: int
) -> None:
    queries = queries_of(np.zeros((NUM_QUERIES, 1)), seen=seen, targets=targets)
    ranking = rank_by_order(queries, order_I=np.array(order), k=k)
    score_BI = np.tile(-np.argsort(order), (NUM_QUERIES, 1))
    positions, orders = sorted_ranking(score_BI, seen=seen, targets=targets)
    assert_ranking(ranking, positions=positions, orders=orders, k=k)


@given(
    st.integers(0, 10_000),
    lists_of_item_rows,
    lists_of_item_rows,
    st.lists(st.booleans(), min_size=NUM_QUERIES, max_size=NUM_QUERIES),
)
def test_unknown_queries_are_ranked_by_popularity(
    seed: int, seen: list[list[int]], targets: list[list[int]], is_known_by_query: list[bool]
) -> None:
    random = np.random.default_rng(seed)
    query_BD, item_ID = random.integers(-1, 2, (NUM_QUERIES, 3)), random.integers(-1, 2, (NUM_ITEMS, 3))
    popularity_order_I = random.permutation(NUM_ITEMS)
    progress_counts: list[int] = []
    ranking = rank_as_served(
        queries_of(query_BD, seen=seen, targets=targets, known=is_known_by_query),
        item_vector_ID=torch.tensor(item_ID, dtype=torch.float32),
        order_I=popularity_order_I,
        k=4,
        on_progress=progress_counts.append,
    )
    score_BI = np.where(np.array(is_known_by_query)[:, None], query_BD @ item_ID.T, -np.argsort(popularity_order_I))
    positions, orders = sorted_ranking(score_BI, seen=seen, targets=targets)
    assert_ranking(ranking, positions=positions, orders=orders, k=4)
    assert sum(progress_counts) == NUM_QUERIES


@given(st.integers(0, 10_000), lists_of_item_rows, lists_of_item_rows, st.sets(st.integers(0, NUM_ITEMS - 1)))
def test_a_ranking_of_candidates_is_the_full_ranking_without_the_other_items(
    seed: int, seen: list[list[int]], targets: list[list[int]], candidate_rows: set[int]
) -> None:
    random = np.random.default_rng(seed)
    query_BD, item_ID = (
        torch.tensor(random.integers(-1, 2, (num_rows, 3)), dtype=torch.float64) for num_rows in (NUM_QUERIES, NUM_ITEMS)
    )
    candidate_row_C = np.array(sorted(candidate_rows), np.int64)
    # Avoid ties: `rank_among` breaks ties in another order than `rank_as_served`.
    item_ID += torch.tensor(random.permutation(NUM_ITEMS))[:, None] / 1e3
    is_known_B, popularity_order_I = random.random(NUM_QUERIES) < 0.7, random.permutation(NUM_ITEMS)
    all_queries = Queries(query_BD + 1e-3, is_known_B=is_known_B, seen=jagged_of(seen), targets=jagged_of(targets))
    arguments = {"item_vector_ID": item_ID, "order_I": popularity_order_I, "k": NUM_ITEMS}
    full_ranking = rank_as_served(all_queries, **arguments)
    ranking = rank_among(all_queries, candidate_rows=candidate_row_C, **arguments)

    queries_with_target = [query for query in range(NUM_QUERIES) if candidate_rows & set(targets[query])]
    expected_rows = [
        [row for row in full_ranking.top_BK[query].tolist() if row in candidate_rows] for query in queries_with_target
    ]
    assert [[int(candidate_row_C[index]) for index in top if index >= 0] for top in ranking.top_BK.tolist()] == expected_rows
    assert ranking.num_candidates_B.tolist() == [len(rows) for rows in expected_rows]
    assert ranking.num_items == len(candidate_rows)
    queries_items_and_positions = zip(
        ranking.query_T.tolist(), candidate_row_C[ranking.item_T].tolist(), ranking.position_T.tolist(), strict=True
    )
    assert set(queries_items_and_positions) == {
        (query_index, row, expected_rows[query_index].index(row))
        for query_index, query in enumerate(queries_with_target)
        for row in candidate_rows & set(targets[query]) - set(seen[query])
    }
