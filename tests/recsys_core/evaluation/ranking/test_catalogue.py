"""Exact rankings of a catalogue, compared with a sort in plain Python."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.errors import StageError
from recsys_core.evaluation.ranking import chunks
from recsys_core.evaluation.ranking.catalogue import rank_catalogue
from tests.recsys_core.evaluation.ranking.sorted_scores import (
    NUM_ITEMS,
    NUM_QUERIES,
    assert_ranking,
    lists_of_item_rows,
    queries_of,
    sorted_ranking,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu:0"  # rank_catalogue runs its GPU code on every device except "cpu"


@given(st.integers(0, 10_000), lists_of_item_rows, lists_of_item_rows, st.integers(0, NUM_ITEMS + 3))
def test_positions_and_top_lists_equal_a_sort_with_ties_in_tie_order(
    seed: int, seen: list[list[int]], targets: list[list[int]], k: int
) -> None:
    random = np.random.default_rng(seed)
    # Small integers give many ties, and additions that are exact in any order.
    query_BD, item_ID = random.integers(-1, 2, (NUM_QUERIES, 3)), random.integers(-1, 2, (NUM_ITEMS, 3))
    queries = queries_of(query_BD, seen=seen, targets=targets)
    ranking = rank_catalogue(queries, item_vector_ID=torch.tensor(item_ID, dtype=torch.float32), k=k)
    positions, orders = sorted_ranking(query_BD @ item_ID.T, seen=seen, targets=targets)
    assert_ranking(ranking, positions=positions, orders=orders, k=k)
    assert ranking.num_seen_targets == sum(
        len({*target_rows} & {*seen_rows}) for target_rows, seen_rows in zip(targets, seen, strict=True)
    )


def test_a_model_with_equal_scores_ranks_at_random_and_not_by_popularity() -> None:
    num_items, num_queries = 2_000, 300
    popular_targets = [[query % 100] for query in range(num_queries)]  # rows are numbered by falling popularity
    equal_queries = queries_of(np.ones((num_queries, 4)), seen=[[]] * num_queries, targets=popular_targets)
    ranking = rank_catalogue(equal_queries, item_vector_ID=torch.ones((num_items, 4)), k=100)
    assert 0.4 < ranking.position_T.mean() / num_items < 0.6
    assert 0.4 < ranking.top_BK.mean() / num_items < 0.6


def test_chunk_size_and_number_of_threads_do_not_change_the_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    query_BD, item_vector_ID = (
        torch.tensor(random.integers(-2, 3, shape), dtype=torch.float32) for shape in ((40, 4), (30, 4))
    )
    seen, targets = ([random.integers(0, 30, length).tolist() for _ in range(40)] for length in (3, 4))
    queries = queries_of(query_BD, seen=seen, targets=targets)
    whole_ranking = rank_catalogue(queries, item_vector_ID=item_vector_ID, k=7)
    monkeypatch.setattr(chunks, "MIN_CHUNK_QUERIES", 1)
    monkeypatch.setattr(chunks, "CHUNK_SCORES", 70)
    num_threads_before = torch.get_num_threads()
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        try:
            chunked_ranking = rank_catalogue(queries, item_vector_ID=item_vector_ID, k=7)
            assert torch.get_num_threads() == num_threads
        finally:
            torch.set_num_threads(num_threads_before)
        np.testing.assert_array_equal(whole_ranking.position_T, chunked_ranking.position_T)
        np.testing.assert_array_equal(whole_ranking.top_BK, chunked_ranking.top_BK)


def test_a_catalogue_of_many_blocks_is_ranked_exactly() -> None:
    random = np.random.default_rng(5)
    query_BD, item_vector_ID = (
        torch.tensor(random.integers(-3, 4, shape), dtype=torch.float32) for shape in ((6, 3), (3_001, 3))
    )
    seen, targets = ([random.integers(0, 3_001, length).tolist() for _ in range(6)] for length in (50, 9))
    ranking = rank_catalogue(queries_of(query_BD, seen=seen, targets=targets), item_vector_ID=item_vector_ID, k=20)
    positions, orders = sorted_ranking((query_BD @ item_vector_ID.T).numpy(), seen=seen, targets=targets)
    assert_ranking(ranking, positions=positions, orders=orders, k=20)


def test_a_vector_that_is_not_finite_is_rejected() -> None:
    item_vector_ID = torch.ones((3, 2))
    item_vector_ID[1, 0] = torch.nan
    with pytest.raises(StageError, match="item vector 1 "):
        rank_catalogue(queries_of(np.ones((1, 2)), seen=[[]], targets=[[]]), item_vector_ID=item_vector_ID, k=1)


@given(seed=st.integers(0, 10_000), bound_columns=st.integers(8, 20), columns_per_tile=st.integers(1, 9), k=st.integers(1, 8))
def test_a_ranking_of_top_lists_only_equals_the_full_ranking(
    seed: int, bound_columns: int, columns_per_tile: int, k: int
) -> None:
    random = np.random.default_rng(seed)
    query_BD, item_ID = random.integers(-1, 2, (NUM_QUERIES, 3)), random.integers(-1, 2, (50, 3))
    seen, targets = ([random.integers(0, 50, 5).tolist() for _ in range(NUM_QUERIES)] for _ in range(2))
    queries, item_vector_ID = queries_of(query_BD, seen=seen, targets=targets), torch.tensor(item_ID, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "BOUND_COLUMNS", bound_columns)
        patch.setattr(chunks, "TILE_COLUMNS", columns_per_tile)
        top_ranking = rank_catalogue(queries, item_vector_ID=item_vector_ID, k=k, top_only=True)
        full_ranking = rank_catalogue(queries, item_vector_ID=item_vector_ID, k=k)
    np.testing.assert_array_equal(top_ranking.top_BK, full_ranking.top_BK)
    # A target below the top list has the number of items as its position.
    np.testing.assert_array_equal(top_ranking.position_T, np.where(full_ranking.position_T < k, full_ranking.position_T, 50))


@given(
    seed=st.integers(0, 10_000),
    k=st.integers(0, 12),
    top_only=st.booleans(),
    chunk_scores=st.sampled_from([1, 60, 10_000]),
    columns_per_block=st.integers(1, 20),
)
def test_rankings_on_a_gpu_and_on_the_cpu_are_equal(
    seed: int, k: int, top_only: bool, chunk_scores: int, columns_per_block: int
) -> None:
    random = np.random.default_rng(seed)
    query_BD, item_ID = random.integers(-1, 2, (NUM_QUERIES, 3)), random.integers(-1, 2, (20, 3))
    seen, targets = ([random.integers(0, 20, length).tolist() for _ in range(NUM_QUERIES)] for length in (15, 5))
    queries, item_vector_ID = queries_of(query_BD, seen=seen, targets=targets), torch.tensor(item_ID, dtype=torch.float32)
    cpu_ranking = rank_catalogue(queries, item_vector_ID=item_vector_ID, k=k, top_only=top_only)
    with pytest.MonkeyPatch.context() as patch:
        value_by_constant = {
            "GPU_CHUNK_SCORES": chunk_scores,
            "BLOCK_COLUMNS": columns_per_block,
            "BOUND_COLUMNS": 1,
            "TILE_COLUMNS": 1,
        }
        for name, value in value_by_constant.items():
            patch.setattr(chunks, name, value)
        gpu_ranking = rank_catalogue(queries, item_vector_ID=item_vector_ID, k=k, top_only=top_only, device=DEVICE)
    np.testing.assert_array_equal(gpu_ranking.top_BK, cpu_ranking.top_BK)
    np.testing.assert_array_equal(gpu_ranking.position_T, cpu_ranking.position_T)
