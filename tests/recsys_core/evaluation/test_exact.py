"""Ranking the catalogue against a sort in plain Python."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.data.lists import Lists
from recsys_core.errors import StageError
from recsys_core.evaluation import exact
from recsys_core.evaluation.exact import rank_catalogue

ITEMS, QUERIES = 9, 5
row_lists = st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=4), min_size=QUERIES, max_size=QUERIES)


def _lists(python: list[list[int]]) -> Lists:
    offset = np.concatenate([[0], np.cumsum([len(rows) for rows in python])]).astype(np.int64)
    return Lists(offset, np.array([row for rows in python for row in rows], np.int64))


@settings(deadline=None)
@given(st.integers(0, 10_000), row_lists, row_lists, st.integers(1, ITEMS + 3))
def test_ranks_and_top_lists_equal_a_sort_with_ties_by_row(
    seed: int, seen: list[list[int]], targets: list[list[int]], k: int
) -> None:
    random = np.random.default_rng(seed)
    # Whole numbers in a narrow range: many ties, and sums that are exact in any order.
    query, item = random.integers(-1, 2, (QUERIES, 3)), random.integers(-1, 2, (ITEMS, 3))
    ranking = rank_catalogue(
        torch.tensor(query, dtype=torch.float32),
        item_ID=torch.tensor(item, dtype=torch.float32),
        seen=_lists(seen),
        targets=_lists(targets),
        k=k,
    )
    pairs = {(q, t): r for q, t, r in zip(ranking.query_P, ranking.target_row_P, ranking.rank_P, strict=True)}
    expected = {}
    for q in range(QUERIES):
        order = sorted((row for row in range(ITEMS) if row not in seen[q]), key=lambda row: (-(query[q] @ item[row]), row))
        expected |= {(q, t): order.index(t) for t in set(targets[q]) - set(seen[q])}
        top = [row for row in ranking.top_EK[q].tolist() if row >= 0]
        assert top == order[:k]
        assert ranking.candidates_E[q] == len(order)
    assert pairs == expected
    assert ranking.seen_targets == sum(len(set(t) & set(s)) for t, s in zip(targets, seen, strict=True))


def test_the_size_of_the_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "LEAST_QUERIES", 1)
    random = np.random.default_rng(3)
    query, item = (torch.tensor(random.integers(-2, 3, shape), dtype=torch.float32) for shape in ((40, 4), (30, 4)))
    seen = _lists([random.integers(0, 30, 3).tolist() for _ in range(40)])
    targets = _lists([random.integers(0, 30, 4).tolist() for _ in range(40)])
    whole, small = (
        rank_catalogue(query, item_ID=item, seen=seen, targets=targets, k=7, score_budget=budget) for budget in (10**6, 70)
    )
    np.testing.assert_array_equal(whole.rank_P, small.rank_P)
    np.testing.assert_array_equal(whole.top_EK, small.top_EK)


def test_a_vector_that_is_not_finite_is_refused() -> None:
    item = torch.ones((3, 2))
    item[1, 0] = torch.nan
    with pytest.raises(StageError, match="item vector 1 "):
        rank_catalogue(torch.ones((1, 2)), item_ID=item, seen=Lists.empty(1), targets=Lists.empty(1), k=1)
