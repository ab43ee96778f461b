"""Exact ranking compared with a sort in plain Python."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.errors import StageError
from recsys_core.evaluation.ranking import chunks
from recsys_core.evaluation.ranking.catalogue import rank_catalogue
from tests.recsys_core.evaluation.ranking.sorted_scores import NUM_ITEMS, NUM_QUERIES, check, oracle, queries_of, row_lists

DEVICE = "cuda" if torch.cuda.is_available() else "cpu:0"  # the code for GPUs runs on any device but "cpu"


@settings(deadline=None)
@given(st.integers(0, 10_000), row_lists, row_lists, st.integers(0, NUM_ITEMS + 3))
def test_positions_and_top_lists_equal_a_sort_with_ties_in_a_fixed_permutation(
    seed: int, seen: list[list[int]], targets: list[list[int]], k: int
) -> None:
    random = np.random.default_rng(seed)
    # Small integers give many ties, and additions that are exact in any order.
    query, item = random.integers(-1, 2, (NUM_QUERIES, 3)), random.integers(-1, 2, (NUM_ITEMS, 3))
    queries = queries_of(query, seen=seen, targets=targets)
    ranking = rank_catalogue(queries, item_vector_ID=torch.tensor(item, dtype=torch.float32), k=k)
    positions, orders = oracle(query @ item.T, seen=seen, targets=targets)
    check(ranking, positions=positions, orders=orders, k=k)
    assert ranking.num_seen_targets == sum(len(set(t) & set(s)) for t, s in zip(targets, seen, strict=True))


def test_a_model_with_equal_scores_ranks_at_random_and_not_by_popularity() -> None:
    items, queries = 2_000, 300
    popular = [[query % 100] for query in range(queries)]  # rows are numbered by falling popularity
    equal = queries_of(np.ones((queries, 4)), seen=[[]] * queries, targets=popular)
    ranking = rank_catalogue(equal, item_vector_ID=torch.ones((items, 4)), k=100)
    assert 0.4 < ranking.position_T.mean() / items < 0.6
    assert 0.4 < ranking.top_BK.mean() / items < 0.6


def test_chunk_size_and_number_of_threads_do_not_change_the_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    query, item = (torch.tensor(random.integers(-2, 3, shape), dtype=torch.float32) for shape in ((40, 4), (30, 4)))
    seen, targets = ([random.integers(0, 30, n).tolist() for _ in range(40)] for n in (3, 4))
    queries = queries_of(query, seen=seen, targets=targets)
    whole_ranking = rank_catalogue(queries, item_vector_ID=item, k=7)
    monkeypatch.setattr(chunks, "MIN_CHUNK_QUERIES", 1)
    monkeypatch.setattr(chunks, "CHUNK_SCORES", 70)
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            small_ranking = rank_catalogue(queries, item_vector_ID=item, k=7)
            assert torch.get_num_threads() == count
        finally:
            torch.set_num_threads(threads)
        np.testing.assert_array_equal(whole_ranking.position_T, small_ranking.position_T)
        np.testing.assert_array_equal(whole_ranking.top_BK, small_ranking.top_BK)


def test_a_catalogue_of_many_blocks_is_ranked_exactly() -> None:
    random = np.random.default_rng(5)
    query, item = (torch.tensor(random.integers(-3, 4, shape), dtype=torch.float32) for shape in ((6, 3), (3_001, 3)))
    seen, targets = ([random.integers(0, 3_001, n).tolist() for _ in range(6)] for n in (50, 9))
    ranking = rank_catalogue(queries_of(query, seen=seen, targets=targets), item_vector_ID=item, k=20)
    positions, orders = oracle((query @ item.T).numpy(), seen=seen, targets=targets)
    check(ranking, positions=positions, orders=orders, k=20)


def test_a_vector_that_is_not_finite_is_rejected() -> None:
    item = torch.ones((3, 2))
    item[1, 0] = torch.nan
    with pytest.raises(StageError, match="item vector 1 "):
        rank_catalogue(queries_of(np.ones((1, 2)), seen=[[]], targets=[[]]), item_vector_ID=item, k=1)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), held=st.integers(8, 20), tile=st.integers(1, 9), k=st.integers(1, 8))
def test_top_lists_alone_equal_those_of_the_full_ranking(seed: int, held: int, tile: int, k: int) -> None:
    random = np.random.default_rng(seed)
    query, item = random.integers(-1, 2, (NUM_QUERIES, 3)), random.integers(-1, 2, (50, 3))
    seen, targets = ([random.integers(0, 50, 5).tolist() for _ in range(NUM_QUERIES)] for _ in range(2))
    queries, item_vector_ID = queries_of(query, seen=seen, targets=targets), torch.tensor(item, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "BOUND_COLUMNS", held)
        patch.setattr(chunks, "TILE_COLUMNS", tile)
        top = rank_catalogue(queries, item_vector_ID=item_vector_ID, k=k, top_only=True)
        full_ranking = rank_catalogue(queries, item_vector_ID=item_vector_ID, k=k)
    np.testing.assert_array_equal(top.top_BK, full_ranking.top_BK)
    np.testing.assert_array_equal(top.position_T, np.where(full_ranking.position_T < k, full_ranking.position_T, 50))


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(0, 12),
    top_only=st.booleans(),
    chunk_scores=st.sampled_from([1, 60, 10_000]),
    block=st.integers(1, 20),
)
def test_the_ranking_on_a_gpu_equals_that_on_the_cpu(seed: int, k: int, top_only: bool, chunk_scores: int, block: int) -> None:
    random = np.random.default_rng(seed)
    query, item = random.integers(-1, 2, (NUM_QUERIES, 3)), random.integers(-1, 2, (20, 3))
    seen, targets = ([random.integers(0, 20, length).tolist() for _ in range(NUM_QUERIES)] for length in (15, 5))
    queries, item_vector_ID = queries_of(query, seen=seen, targets=targets), torch.tensor(item, dtype=torch.float32)
    on_cpu = rank_catalogue(queries, item_vector_ID=item_vector_ID, k=k, top_only=top_only)
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"GPU_CHUNK_SCORES": chunk_scores, "BLOCK_COLUMNS": block, "BOUND_COLUMNS": 1, "TILE_COLUMNS": 1}
        for name, size in sizes.items():
            patch.setattr(chunks, name, size)
        on_gpu = rank_catalogue(queries, item_vector_ID=item_vector_ID, k=k, top_only=top_only, device=DEVICE)
    np.testing.assert_array_equal(on_gpu.top_BK, on_cpu.top_BK)
    np.testing.assert_array_equal(on_gpu.position_T, on_cpu.position_T)
