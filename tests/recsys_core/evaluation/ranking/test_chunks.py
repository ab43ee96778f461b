"""Chunks of queries that are ranked in blocks of items, compared bit by bit with a ranking of the whole score matrix."""

from functools import partial

import numpy as np
import pytest
import torch

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import InputError
from recsys_core.evaluation.ranking import chunks as chunks_module
from recsys_core.evaluation.ranking.catalogue import rank_catalogue, rank_in_chunks
from recsys_core.evaluation.ranking.chunks import CpuChunk, Grid, inner_products
from recsys_core.evaluation.ranking.queries import Queries, tie_order
from tests.recsys_core.evaluation.ranking.random_queries import random_queries_and_items

NUM_ITEMS, NUM_QUERIES, DIM = 5_003, 150, 24


@pytest.fixture
def queries_and_items() -> tuple[Queries, torch.Tensor]:
    return random_queries_and_items(num_queries=NUM_QUERIES, num_items=NUM_ITEMS, dim=DIM)


@pytest.mark.parametrize("top_only", [False, True], ids=["full ranking", "top lists only"])
@pytest.mark.parametrize("k", [0, 30])
def test_blocks_of_columns_give_the_ranking_of_the_whole_catalogue(
    queries_and_items: tuple[Queries, torch.Tensor],
    top_only: bool,
    k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries, item_vector_ID = queries_and_items
    for name, value in {
        "BOUND_COLUMNS": 256,
        "BLOCK_COLUMNS": 600,
        "TILE_COLUMNS": 128,
        "CHUNK_SCORES": 64 * NUM_ITEMS,
    }.items():
        monkeypatch.setattr(chunks_module, name, value)
    whole_ranking = rank_catalogue(queries, item_vector_ID=item_vector_ID, k=k, top_only=top_only)
    grid, row_C = Grid.of(NUM_ITEMS, k=k, top_only=top_only), tie_order(NUM_ITEMS)
    assert grid.columns_per_block == 640  # 600 is rounded up to whole tiles
    blocks = [(start, item_vector_ID[row_C[start : start + 640]]) for start in range(0, NUM_ITEMS, 640)]

    def rank_chunk(chunk: slice, seen: JaggedArray, targets: JaggedArray):
        cpu_chunk = CpuChunk(grid, queries.query_BD[chunk], seen=seen, targets=targets)
        for process_block in (cpu_chunk.add,) if top_only else (cpu_chunk.find_target_scores, cpu_chunk.add):
            for block in blocks:
                process_block(*block)
        return cpu_chunk.result()

    queries_per_chunk = grid.queries_per_chunk(on_gpu=False)
    block_ranking = rank_in_chunks(
        queries, partial(map, rank_chunk), row_C=row_C, k=grid.k, queries_per_chunk=queries_per_chunk
    )
    np.testing.assert_array_equal(block_ranking.top_BK, whole_ranking.top_BK)
    np.testing.assert_array_equal(block_ranking.position_T, whole_ranking.position_T)


def test_the_score_of_a_target_equals_bit_by_bit_its_score_in_a_tile(queries_and_items: tuple[Queries, torch.Tensor]) -> None:
    queries, item_vector_ID = queries_and_items
    grid = Grid.of(NUM_ITEMS, k=0, top_only=False)
    block_CD = item_vector_ID[:4_100]  # two whole tiles and a narrow one
    targets = queries.targets.filter(queries.targets.values_L < 4_100)
    chunk = CpuChunk(grid, queries.query_BD, seen=JaggedArray.empty(NUM_QUERIES), targets=targets)
    chunk.find_target_scores(0, block_CD)
    score_BC = np.empty((NUM_QUERIES, 4_100), np.float32)
    for start in range(0, 4_100, grid.columns_per_tile):
        columns = slice(start, min(start + grid.columns_per_tile, 4_100))
        inner_products(queries.query_BD.numpy(), block_CD.numpy())(slice(0, NUM_QUERIES), columns, score_BC[:, columns])
    np.testing.assert_array_equal(chunk._target_score_T, score_BC[targets.list_index_L, targets.values_L])


def test_more_items_than_32_bit_rows_can_number_are_rejected() -> None:
    assert Grid.of(2**31, k=10, top_only=True).num_columns == 2**31
    with pytest.raises(InputError, match="has 2,147,483,649 items, but a ranking has at most 2,147,483,648; remove rare items"):
        Grid.of(2**31 + 1, k=10, top_only=True)
