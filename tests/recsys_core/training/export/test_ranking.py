"""Rankings that several ranks compute, compared bit by bit with the ranking of one process."""

from pathlib import Path

import numpy as np
import pytest
import torch

from recsys_core.evaluation.ranking import chunks
from recsys_core.evaluation.ranking.catalogue import rank_catalogue
from recsys_core.evaluation.ranking.served import restrict_to_candidates
from recsys_core.training.export.ranking import rank_collectively
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.evaluation.ranking.random_queries import random_queries_and_items
from tests.recsys_core.training.export.shares import share_of

NUM_ITEMS, NUM_QUERIES, DIM, K = 5_003, 157, 24, 30
COLD_ROW_C = np.arange(3, NUM_ITEMS, 11)
SIZE_BY_CONSTANT = {"BOUND_COLUMNS": 256, "BLOCK_COLUMNS": 600, "TILE_COLUMNS": 128, "CHUNK_SCORES": 64 * NUM_ITEMS}
"""Small sizes: a chunk has 64 queries, and the items form eight blocks. BLOCK_COLUMNS is rounded up to whole tiles, so a block
has 640 columns. The last tile of the last block is narrower."""


def rank_own_queries(rank: int, folder: Path, query_ranges: list[tuple[int, int]]) -> None:
    """Write three rankings of this rank's queries.

    `full` has positions and top lists, `top` has only top lists, and `cold` ranks only the cold items.
    """
    for constant, size in SIZE_BY_CONSTANT.items():
        setattr(chunks, constant, size)
    process = cpu_process(rank)
    queries, item_vector_ID = random_queries_and_items(num_queries=NUM_QUERIES, num_items=NUM_ITEMS, dim=DIM)
    own_item_vectors, own_queries = share_of(item_vector_ID, process), queries.take(np.arange(*query_ranges[rank]))
    own_queries_of_cold_items = restrict_to_candidates(own_queries, COLD_ROW_C, num_items=NUM_ITEMS)
    for name, ranked_queries, candidate_rows, k, top_only in (
        ("full", own_queries, np.arange(NUM_ITEMS), K, False),
        ("top", own_queries, np.arange(NUM_ITEMS), K, True),
        ("cold", own_queries_of_cold_items, COLD_ROW_C, 0, False),
    ):
        ranking = rank_collectively(
            ranked_queries, items=own_item_vectors, candidate_rows=candidate_rows, k=k, top_only=top_only, process=process
        )
        assert len(ranking.top_BK) == ranking.query_count_W[rank] and len(ranking.position_T) == ranking.target_count_W[rank]
        np.savez(folder / f"{name}-{rank}.npz", top_BK=ranking.top_BK, position_T=ranking.position_T)


@pytest.mark.parametrize(
    "query_ranges",
    [
        [(0, 157)],
        [(0, 79), (79, 157)],
        [(0, 10), (10, 10), (10, 130), (130, 157)],  # less than a chunk, no query, more than a chunk
    ],
    ids=["1 rank", "2 ranks", "4 ranks"],
)
def test_ranks_compute_the_ranking_of_one_process(
    query_ranges: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(rank_own_queries, world_size=len(query_ranges), arguments=(tmp_path, query_ranges))
    for constant, size in SIZE_BY_CONSTANT.items():
        monkeypatch.setattr(chunks, constant, size)
    queries, item_vector_ID = random_queries_and_items(num_queries=NUM_QUERIES, num_items=NUM_ITEMS, dim=DIM)
    expected_ranking_by_name = {
        "full": rank_catalogue(queries, item_vector_ID=item_vector_ID, k=K),
        "top": rank_catalogue(queries, item_vector_ID=item_vector_ID, k=K, top_only=True),
        "cold": rank_catalogue(
            restrict_to_candidates(queries, COLD_ROW_C, num_items=NUM_ITEMS),
            item_vector_ID=item_vector_ID[torch.from_numpy(COLD_ROW_C)],
            k=0,
        ),
    }
    for name, ranking in expected_ranking_by_name.items():
        arrays_by_rank = [np.load(tmp_path / f"{name}-{rank}.npz") for rank in range(len(query_ranges))]
        np.testing.assert_array_equal(np.concatenate([rank_arrays["top_BK"] for rank_arrays in arrays_by_rank]), ranking.top_BK)
        np.testing.assert_array_equal(
            np.concatenate([rank_arrays["position_T"] for rank_arrays in arrays_by_rank]), ranking.position_T
        )
