"""Exact ranking of all items for every query, in chunks of queries.

Shapes: B queries, I items, D width, K length of the top list, T (query, target) pairs, C items as columns of a score matrix, L
seen items or targets of all queries.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController
from torch import Tensor

from recsys_core.dataset.jagged import JaggedArray, chunk_slices
from recsys_core.errors import StageError
from recsys_core.evaluation.ranking.chunks import (
    MIN_CHUNK_QUERIES,
    GpuChunk,
    Grid,
    Result,
    ScoredChunk,
    ScoreTile,
    inner_products,
)
from recsys_core.evaluation.ranking.queries import Queries, Ranking, tie_order

MAX_SCORES = 1 << 28
"""Largest number of scores that all threads hold together, 1 GiB in float32. A large catalogue therefore has fewer threads."""


def rank_catalogue(
    queries: Queries,
    *,
    item_vector_ID: Tensor,
    k: int,
    top_only: bool = False,
    device: str = "cpu",
    on_progress: Callable[[int], None] = lambda num_queries: None,
) -> Ranking:
    """Rank all unseen items by inner product for every query, including unknown users. Equal scores are ordered by `tie_order`.

    The targets of a user are candidates like any item. The queries are ranked in chunks by as many threads as torch uses.

    Args:
        item_vector_ID: vectors of the same floating-point type as the query vectors.
        k: length of the top list; 0 for no top list.
        top_only: determine only the top lists, which is faster on a large catalogue. See `Ranking.position_T`.
        device: torch device; the vectors are on the CPU.
        on_progress: called with the number of queries ranked since the previous call.

    Raises:
        StageError: a vector is not finite.
    """
    for vector_kind, vectors in (("query", queries.query_BD), ("item", item_vector_ID)):
        if not torch.isfinite(vectors).all():
            vector_index = int(torch.nonzero(~torch.isfinite(vectors).all(dim=1))[0])
            raise StageError(f"{vector_kind} vector {vector_index} is not finite: training diverged; lower the learning rates")
    row_C = tie_order(len(item_vector_ID))
    if device != "cpu":
        item_vector_CD = item_vector_ID[torch.from_numpy(row_C)].to(device)
        grid = Grid.of(len(row_C), k=k, top_only=top_only)
        return _rank_on_gpu(queries, item_vector_CD=item_vector_CD, row_C=row_C, grid=grid, on_progress=on_progress)
    query_BD = queries.query_BD.numpy()
    score_tile = inner_products(query_BD, item_vector_ID.numpy()[row_C])
    return rank_by_scores(
        queries, score_tile=score_tile, row_C=row_C, k=k, top_only=top_only, dtype=query_BD.dtype, on_progress=on_progress
    )


def rank_by_scores(
    queries: Queries,
    *,
    score_tile: ScoreTile,
    row_C: NDArray[Any],
    k: int,
    top_only: bool = False,
    columns_per_tile: int | None = None,
    dtype: Any = np.float32,
    on_progress: Callable[[int], None] = lambda num_queries: None,
) -> Ranking:
    """Rank all unseen items by the scores of `score_tile` for every query.

    Args:
        score_tile: function that computes the scores of a tile. Several threads call it.
        row_C: item row of each column of the scores. Of two items with equal scores, the item in the lower column is first.
        columns_per_tile: number of columns of a tile; TILE_COLUMNS by default.
        dtype: floating-point type of the scores.
    """
    grid = Grid.of(len(row_C), k=k, top_only=top_only, columns_per_tile=columns_per_tile)

    def rank_chunk(chunk: slice, seen: JaggedArray, targets: JaggedArray) -> Result:
        scored_chunk = ScoredChunk(grid, chunk, seen=seen, targets=targets, dtype=dtype)
        scored_chunk.add(slice(0, grid.num_columns), score_tile)
        return scored_chunk.result()

    with worker_threads(grid.num_held_columns) as pool:
        return rank_in_chunks(
            queries,
            partial(pool.map, rank_chunk),
            row_C=row_C,
            k=grid.k,
            queries_per_chunk=grid.queries_per_chunk(on_gpu=False),
            on_progress=on_progress,
        )


@contextmanager
def worker_threads(num_held_columns: int) -> Iterator[ThreadPoolExecutor]:
    """Yield the threads that rank chunks on a CPU. num_held_columns: columns whose scores a thread holds at once.

    BLAS computes in the calling thread, because its own threads would wait in spin loops for cores that are busy.
    """
    num_threads = min(torch.get_num_threads(), MAX_SCORES // (MIN_CHUNK_QUERIES * max(1, num_held_columns)))
    with _blas_controller().limit(limits=1), ThreadPoolExecutor(max(1, num_threads)) as pool:
        yield pool


@cache
def _blas_controller() -> ThreadpoolController:
    """Return the thread pools of BLAS. The result is cached, because the search for loaded libraries takes milliseconds."""
    return ThreadpoolController().select(user_api="blas")


def _rank_on_gpu(
    queries: Queries, *, item_vector_CD: Tensor, row_C: NDArray[Any], grid: Grid, on_progress: Callable[[int], None]
) -> Ranking:
    """Rank like `rank_by_scores`, by inner product on the device of the item vectors."""
    blocks = [(block.start, item_vector_CD[block]) for block in chunk_slices(len(row_C), length=grid.columns_per_block)]

    def rank_chunk(chunk: slice, seen: JaggedArray, targets: JaggedArray) -> Result:
        gpu_chunk = GpuChunk(grid, queries.query_BD[chunk].to(item_vector_CD.device), seen=seen, targets=targets)
        for process_block in (gpu_chunk.add,) if grid.top_only else (gpu_chunk.find_target_scores, gpu_chunk.add):
            for first_column, block_CD in blocks:
                process_block(first_column, block_CD)
        return gpu_chunk.result()

    return rank_in_chunks(
        queries,
        partial(map, rank_chunk),
        row_C=row_C,
        k=grid.k,
        queries_per_chunk=grid.queries_per_chunk(on_gpu=True),
        on_progress=on_progress,
    )


def rank_in_chunks(
    queries: Queries,
    rank_chunks: Callable[[Sequence[slice], Sequence[JaggedArray], Sequence[JaggedArray]], Iterable[Result]],
    *,
    row_C: NDArray[Any],
    k: int,
    queries_per_chunk: int,
    on_progress: Callable[[int], None] = lambda num_queries: None,
) -> Ranking:
    """Divide the queries into chunks, rank each chunk with `rank_chunks`, and return the combined ranking.

    rank_chunks: function that returns the result of each chunk. Its arguments have an entry per chunk: the slice of the
        queries, the columns of their seen items, and the columns of their targets.
    """
    num_queries, num_items = len(queries.targets), len(row_C)
    pairs = queries.ranked_pairs(num_items=num_items)
    column_I = np.argsort(row_C)
    chunks = list(chunk_slices(num_queries, length=queries_per_chunk))
    seen_by_chunk, targets_by_chunk = (
        [column_lists.slice(chunk.start, chunk.stop) for chunk in chunks]
        for column_lists in (
            JaggedArray(item_lists.offset, column_I[item_lists.values_L]) for item_lists in (pairs.seen, pairs.targets)
        )
    )
    top_BK, position_T = np.full((num_queries, k), -1, np.int32), np.empty(len(pairs.targets.values_L), np.int64)
    for chunk, (top_columns_BK, chunk_position_T) in zip(
        chunks, rank_chunks(chunks, seen_by_chunk, targets_by_chunk), strict=True
    ):
        top_BK[chunk] = np.where(top_columns_BK >= 0, row_C[top_columns_BK], -1)
        position_T[pairs.targets.offset[chunk.start] : pairs.targets.offset[chunk.stop]] = chunk_position_T
        on_progress(chunk.stop - chunk.start)
    return pairs.ranking(position_T=position_T, top_BK=top_BK, num_items=num_items)
