"""Ranking among chosen items against a ranking of the catalogue from which the others are taken out."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.data.events import EventStore
from recsys_core.data.jagged import JaggedArray
from recsys_core.evaluation.cold import cold_rows, rank_among
from recsys_core.evaluation.ranking import rank_served

ITEMS, QUERIES = 9, 5
row_lists = st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=4), min_size=QUERIES, max_size=QUERIES)


def _lists(python: list[list[int]]) -> JaggedArray:
    return JaggedArray(np.cumsum([0, *map(len, python)]), np.array([row for rows in python for row in rows], np.int64))


@settings(deadline=None)
@given(st.integers(0, 10_000), row_lists, row_lists, st.sets(st.integers(0, ITEMS - 1)))
def test_it_is_the_full_ranking_with_the_other_items_taken_out(
    seed: int, seen: list[list[int]], targets: list[list[int]], candidates: set[int]
) -> None:
    random = np.random.default_rng(seed)
    # Whole numbers in a narrow range: many ties, and sums that are exact in any order.
    query, item = (torch.tensor(random.integers(-1, 2, (rows, 3)), dtype=torch.float32) for rows in (QUERIES, ITEMS))
    chosen = np.array(sorted(candidates), np.int64)
    # Without ties: among fewer items equal scores go by another permutation.
    query, item = query.double(), item.double() + torch.tensor(random.permutation(ITEMS))[:, None] / 1e3
    known, order = random.random(QUERIES) < 0.7, random.permutation(ITEMS)
    given = {"known_E": known, "order_I": order, "seen": _lists(seen), "targets": _lists(targets), "k": ITEMS}
    whole = rank_served(query + 1e-3, item_ID=item, **given)
    found = rank_among(query + 1e-3, item_ID=item, candidate_rows=chosen, **given)

    asked = [number for number in range(QUERIES) if candidates & set(targets[number])]
    order = [[row for row in whole.top_EK[number].tolist() if row in candidates] for number in asked]
    assert [[int(chosen[place]) for place in top if place >= 0] for top in found.top_EK.tolist()] == order
    assert found.candidates_E.tolist() == [len(rows) for rows in order]
    assert found.items == len(candidates)
    pairs = zip(found.query_P.tolist(), chosen[found.target_row_P].tolist(), found.rank_P.tolist(), strict=True)
    assert set(pairs) == {
        (at, row, order[at].index(row))
        for at, number in enumerate(asked)
        for row in candidates & set(targets[number]) - set(seen[number])
    }


def test_an_item_is_cold_until_anybody_has_it() -> None:
    # One user: training has item 0, validation 2, the test 3; item 1 is in no event at all.
    store = EventStore(
        ordered=True, user_offset=np.array([0, 3]), train_end=np.array([1]), validation_end=np.array([2]),
        event_item=np.array([0, 2, 3], np.int32), train_user=np.array([0], np.int32), item_count=np.array([1, 0, 0, 0]),
        vector_row=np.full(4, -1),
    )  # fmt: skip
    assert cold_rows(store, "validation").tolist() == [1, 2, 3]
    assert cold_rows(store, "test").tolist() == [1, 3]
