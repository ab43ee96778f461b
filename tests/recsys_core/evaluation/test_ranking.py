"""Exact ranking compared with a sort in plain Python."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import StageError
from recsys_core.evaluation import ranking as ranking_module
from recsys_core.evaluation.ranking import (
    Queries,
    Ranking,
    rank_among,
    rank_by_order,
    rank_catalogue,
    rank_served,
    tie_order,
)

ITEMS, QUERIES = 9, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu:0"  # the code for GPUs runs on any device but "cpu"
row_lists = st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=4), min_size=QUERIES, max_size=QUERIES)


def _lists(python: list[list[int]]) -> JaggedArray:
    return JaggedArray(np.cumsum([0, *map(len, python)]), np.array([row for rows in python for row in rows], np.int64))


def _queries(
    vectors: np.ndarray | torch.Tensor, *, seen: list[list[int]], targets: list[list[int]], known: list[bool] | None = None
) -> Queries:
    is_known_B = np.ones(len(vectors), bool) if known is None else np.array(known)
    query_BD = torch.as_tensor(vectors, dtype=torch.float32)
    return Queries(query_BD, is_known_B=is_known_B, seen=_lists(seen), targets=_lists(targets))


Positions = dict[tuple[int, int], int]


def _oracle(score: np.ndarray, *, seen: list[list[int]], targets: list[list[int]]) -> tuple[Positions, list[list[int]]]:
    """Return the position of each (query, target) and the full order of each query, by a sort with ties in `tie_order`."""
    tie_index = {row: index for index, row in enumerate(tie_order(score.shape[1]).tolist())}
    orders = [
        sorted(set(range(score.shape[1])) - set(seen[q]), key=lambda row: (-score_I[row], tie_index[row]))
        for q, score_I in enumerate(score)
    ]
    return {(q, t): order.index(t) for q, order in enumerate(orders) for t in {*targets[q]} - {*seen[q]}}, orders


def _check(ranking: Ranking, *, positions: Positions, orders: list[list[int]], k: int) -> None:
    pairs = zip(ranking.query_T.tolist(), ranking.item_T.tolist(), ranking.position_T.tolist(), strict=True)
    assert [*pairs] == [(q, t, positions[q, t]) for q, t in sorted(positions)]
    assert [[row for row in top if row >= 0] for top in ranking.top_BK.tolist()] == [order[:k] for order in orders]
    assert ranking.num_candidates_B.tolist() == [len(order) for order in orders]


@settings(deadline=None)
@given(st.integers(0, 10_000), row_lists, row_lists, st.integers(0, ITEMS + 3))
def test_positions_and_top_lists_equal_a_sort_with_ties_in_a_fixed_permutation(
    seed: int, seen: list[list[int]], targets: list[list[int]], k: int
) -> None:
    random = np.random.default_rng(seed)
    # Small integers give many ties, and additions that are exact in any order.
    query, item = random.integers(-1, 2, (QUERIES, 3)), random.integers(-1, 2, (ITEMS, 3))
    queries = _queries(query, seen=seen, targets=targets)
    ranking = rank_catalogue(queries, item_vector_ID=torch.tensor(item, dtype=torch.float32), k=k)
    positions, orders = _oracle(query @ item.T, seen=seen, targets=targets)
    _check(ranking, positions=positions, orders=orders, k=k)
    assert ranking.num_seen_targets == sum(len(set(t) & set(s)) for t, s in zip(targets, seen, strict=True))


@settings(deadline=None)
@given(st.permutations(range(ITEMS)), row_lists, row_lists, st.integers(0, ITEMS + 3))
def test_ranking_by_one_order_equals_ranking_by_falling_scores(
    order: list[int], seen: list[list[int]], targets: list[list[int]], k: int
) -> None:
    queries = _queries(np.zeros((QUERIES, 1)), seen=seen, targets=targets)
    ranking = rank_by_order(queries, order_I=np.array(order), k=k)
    score = np.tile(-np.argsort(order), (QUERIES, 1))
    positions, orders = _oracle(score, seen=seen, targets=targets)
    _check(ranking, positions=positions, orders=orders, k=k)


@settings(deadline=None)
@given(st.integers(0, 10_000), row_lists, row_lists, st.lists(st.booleans(), min_size=QUERIES, max_size=QUERIES))
def test_unknown_queries_are_ranked_by_popularity(
    seed: int, seen: list[list[int]], targets: list[list[int]], known: list[bool]
) -> None:
    random = np.random.default_rng(seed)
    query, item, order = random.integers(-1, 2, (QUERIES, 3)), random.integers(-1, 2, (ITEMS, 3)), random.permutation(ITEMS)
    counted: list[int] = []
    ranking = rank_served(
        _queries(query, seen=seen, targets=targets, known=known),
        item_vector_ID=torch.tensor(item, dtype=torch.float32),
        order_I=order,
        k=4,
        on_progress=counted.append,
    )
    score = np.where(np.array(known)[:, None], query @ item.T, -np.argsort(order))
    positions, orders = _oracle(score, seen=seen, targets=targets)
    _check(ranking, positions=positions, orders=orders, k=4)
    assert sum(counted) == QUERIES


def test_a_model_with_equal_scores_ranks_at_random_and_not_by_popularity() -> None:
    items, queries = 2_000, 300
    popular = [[query % 100] for query in range(queries)]  # rows are numbered by falling popularity
    equal = _queries(np.ones((queries, 4)), seen=[[]] * queries, targets=popular)
    ranking = rank_catalogue(equal, item_vector_ID=torch.ones((items, 4)), k=100)
    assert 0.4 < ranking.position_T.mean() / items < 0.6
    assert 0.4 < ranking.top_BK.mean() / items < 0.6


def test_chunk_size_and_number_of_threads_do_not_change_the_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    query, item = (torch.tensor(random.integers(-2, 3, shape), dtype=torch.float32) for shape in ((40, 4), (30, 4)))
    seen, targets = ([random.integers(0, 30, n).tolist() for _ in range(40)] for n in (3, 4))
    queries = _queries(query, seen=seen, targets=targets)
    whole = rank_catalogue(queries, item_vector_ID=item, k=7)
    monkeypatch.setattr(ranking_module, "MIN_CHUNK_QUERIES", 1)
    monkeypatch.setattr(ranking_module, "CHUNK_SCORES", 70)
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            small = rank_catalogue(queries, item_vector_ID=item, k=7)
            assert torch.get_num_threads() == count
        finally:
            torch.set_num_threads(threads)
        np.testing.assert_array_equal(whole.position_T, small.position_T)
        np.testing.assert_array_equal(whole.top_BK, small.top_BK)


def test_a_catalogue_of_many_blocks_is_ranked_exactly() -> None:
    random = np.random.default_rng(5)
    query, item = (torch.tensor(random.integers(-3, 4, shape), dtype=torch.float32) for shape in ((6, 3), (3_001, 3)))
    seen, targets = ([random.integers(0, 3_001, n).tolist() for _ in range(6)] for n in (50, 9))
    ranking = rank_catalogue(_queries(query, seen=seen, targets=targets), item_vector_ID=item, k=20)
    positions, orders = _oracle((query @ item.T).numpy(), seen=seen, targets=targets)
    _check(ranking, positions=positions, orders=orders, k=20)


def test_a_vector_that_is_not_finite_is_rejected() -> None:
    item = torch.ones((3, 2))
    item[1, 0] = torch.nan
    with pytest.raises(StageError, match="item vector 1 "):
        rank_catalogue(_queries(np.ones((1, 2)), seen=[[]], targets=[[]]), item_vector_ID=item, k=1)


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
    all_queries = Queries(query + 1e-3, is_known_B=known, seen=_lists(seen), targets=_lists(targets))
    arguments = {"item_vector_ID": item, "order_I": order, "k": ITEMS}
    full_ranking = rank_served(all_queries, **arguments)
    ranking = rank_among(all_queries, candidate_rows=candidate_rows, **arguments)

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


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), held=st.integers(8, 20), tile=st.integers(1, 9), k=st.integers(1, 8))
def test_top_lists_alone_equal_those_of_the_full_ranking(seed: int, held: int, tile: int, k: int) -> None:
    random = np.random.default_rng(seed)
    query, item = random.integers(-1, 2, (QUERIES, 3)), random.integers(-1, 2, (50, 3))
    seen, targets = ([random.integers(0, 50, 5).tolist() for _ in range(QUERIES)] for _ in range(2))
    queries, item_vector_ID = _queries(query, seen=seen, targets=targets), torch.tensor(item, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking_module, "BOUND_COLUMNS", held)
        patch.setattr(ranking_module, "TILE_COLUMNS", tile)
        top = rank_catalogue(queries, item_vector_ID=item_vector_ID, k=k, top_only=True)
        full = rank_catalogue(queries, item_vector_ID=item_vector_ID, k=k)
    np.testing.assert_array_equal(top.top_BK, full.top_BK)
    np.testing.assert_array_equal(top.position_T, np.where(full.position_T < k, full.position_T, 50))


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000), k=st.integers(0, 12), chunk_scores=st.sampled_from([1, 60, 10_000]))
def test_the_ranking_on_a_gpu_equals_that_on_the_cpu(seed: int, k: int, chunk_scores: int) -> None:
    random = np.random.default_rng(seed)
    query, item = random.integers(-1, 2, (QUERIES, 3)), random.integers(-1, 2, (20, 3))
    seen, targets = ([random.integers(0, 20, length).tolist() for _ in range(QUERIES)] for length in (15, 5))
    queries, item_vector_ID = _queries(query, seen=seen, targets=targets), torch.tensor(item, dtype=torch.float32)
    on_cpu = rank_catalogue(queries, item_vector_ID=item_vector_ID, k=k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking_module, "GPU_CHUNK_SCORES", chunk_scores)
        on_gpu = rank_catalogue(queries, item_vector_ID=item_vector_ID, k=k, device=DEVICE)
    np.testing.assert_array_equal(on_gpu.top_BK, on_cpu.top_BK)
    np.testing.assert_array_equal(on_gpu.position_T, on_cpu.position_T)
