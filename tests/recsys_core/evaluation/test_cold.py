"""Ranking among candidates, compared with a full ranking without the other items."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.dataset.layout import EventArrays
from recsys_core.evaluation.cold import cold_rows, rank_among
from recsys_core.evaluation.ranking import rank_served

ITEMS, QUERIES = 9, 5
row_lists = st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=4), min_size=QUERIES, max_size=QUERIES)


def _lists(python: list[list[int]]) -> JaggedArray:
    return JaggedArray(np.cumsum([0, *map(len, python)]), np.array([row for rows in python for row in rows], np.int64))


@settings(deadline=None)
@given(st.integers(0, 10_000), row_lists, row_lists, st.sets(st.integers(0, ITEMS - 1)))
def test_ranking_among_candidates_equals_the_full_ranking_without_the_other_items(
    seed: int, seen: list[list[int]], targets: list[list[int]], candidates: set[int]
) -> None:
    random = np.random.default_rng(seed)
    query, item = (torch.tensor(random.integers(-1, 2, (rows, 3)), dtype=torch.float32) for rows in (QUERIES, ITEMS))
    candidate_rows = np.array(sorted(candidates), np.int64)
    # The scores have no ties: among fewer items, another permutation orders equal scores.
    query, item = query.double(), item.double() + torch.tensor(random.permutation(ITEMS))[:, None] / 1e3
    known, order = random.random(QUERIES) < 0.7, random.permutation(ITEMS)
    arguments = {"is_known_B": known, "order_I": order, "seen": _lists(seen), "targets": _lists(targets), "k": ITEMS}
    full_ranking = rank_served(query + 1e-3, item_vector_ID=item, **arguments)
    ranking = rank_among(query + 1e-3, item_vector_ID=item, candidate_rows=candidate_rows, **arguments)

    queries = [number for number in range(QUERIES) if candidates & set(targets[number])]
    order = [[row for row in full_ranking.top_BK[number].tolist() if row in candidates] for number in queries]
    assert [[int(candidate_rows[index]) for index in top if index >= 0] for top in ranking.top_BK.tolist()] == order
    assert ranking.num_candidates_B.tolist() == [len(rows) for rows in order]
    assert ranking.num_items == len(candidates)
    pairs = zip(ranking.query_T.tolist(), candidate_rows[ranking.item_T].tolist(), ranking.position_T.tolist(), strict=True)
    assert set(pairs) == {
        (at, row, order[at].index(row))
        for at, number in enumerate(queries)
        for row in candidates & set(targets[number]) - set(seen[number])
    }


def test_an_item_is_cold_until_its_first_event() -> None:
    # One user: training has item 0, validation 2, the test 3; item 1 is in no event at all.
    arrays = EventArrays(
        user_offset=np.array([0, 3]), train_end=np.array([1]), validation_end=np.array([2]),
        event_item=np.array([0, 2, 3], np.int32), train_user=np.array([0], np.int32), item_count=np.array([1, 0, 0, 0]),
        vector_row=np.full(4, -1),
    )  # fmt: skip
    store = EventStore(arrays, is_ordered=True)
    assert cold_rows(store, "validation").tolist() == [1, 2, 3]
    assert cold_rows(store, "test").tolist() == [1, 3]
