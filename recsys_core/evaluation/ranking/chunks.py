"""The ranking of one chunk of queries over blocks of columns (items), on a CPU or a GPU.

In a float32 matrix product, the last bits of an entry depend on the shapes of the matrices, and on the row and column of the
entry. The grid of chunks and tiles therefore depends only on the numbers of queries and items, and not on the number of threads
or ranks. Scores then have the same bits for any number of threads or ranks, and the items have the same order.

Shapes: B queries of the chunk, C columns, D width, K length of the top list, T targets of the chunk, L seen items or targets
of the chunk, V distinct columns of the targets.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.jagged import JaggedArray, chunk_slices
from recsys_core.dataset.layout import row_dtype
from recsys_core.errors import InputError
from recsys_core.evaluation.ranking.top_k import (
    Scores,
    TopLists,
    listed_positions,
    num_above,
    num_above_on_gpu,
    top_columns_on_gpu,
)

CHUNK_SCORES = 1 << 22
"""Number of scores that one thread holds at once: 16 MiB in float32."""
MIN_CHUNK_QUERIES, MAX_CHUNK_QUERIES = 16, 4_096
"""Bounds of the queries per chunk. Each chunk costs a pass over the item vectors. `TopLists` allows at most 65,536 queries."""
GPU_CHUNK_SCORES = 1 << 26
"""Number of scores in the memory of a GPU at once: 256 MiB, and about 1 GiB of intermediate results."""
TILE_COLUMNS = 2_048
"""Number of columns whose scores are computed at once, so that the scores of a chunk stay in the cache of a core."""
BOUND_COLUMNS = 1 << 14
"""The scores of this many columns give a lower bound of the k-th best score, if only the top lists are needed."""
BLOCK_COLUMNS = 1 << 16
"""Number of item vectors that are sent between ranks, or are in GPU memory, at once: 16 MiB with a width of 64."""

ScoreTile = Callable[[slice, slice, NDArray[Any]], None]
"""Function that writes the scores of a slice of the queries and a slice of the columns into an array [B, C]."""
Result = tuple[NDArray[Any], NDArray[Any]]
"""Columns of the top lists [B, K], and positions of the targets [T]."""


@dataclass(frozen=True)
class Grid:
    """Division of a score matrix into chunks of queries, and into tiles and blocks of columns.

    Attributes:
        num_columns: number of items.
        k: length of the top list, at most num_columns; 0 for no top list.
        top_only: whether positions are needed only for the targets in the top lists.
        columns_per_tile: number of columns of a tile.
    """

    num_columns: int
    k: int
    top_only: bool
    columns_per_tile: int

    @classmethod
    def of(cls, num_columns: int, *, k: int, top_only: bool, columns_per_tile: int | None = None) -> "Grid":
        """Return the grid for a top list of at most `k` columns. columns_per_tile: TILE_COLUMNS by default.

        Raises InputError if a column does not fit into 32 bits.
        """
        if row_dtype(num_columns) is not np.int32:
            raise InputError(
                f"the catalogue has {num_columns:,} items, but a ranking has at most 2,147,483,648; remove rare items with "
                "interactions.filter.min_item_events"
            )
        return cls(num_columns, min(k, num_columns), top_only, columns_per_tile or TILE_COLUMNS)

    @property
    def num_held_columns(self) -> int:
        """Number of columns whose scores a thread holds at once: all of them, unless only the top lists are needed."""
        bound_columns = self._round_up_to_tiles(max(BOUND_COLUMNS, self.k)) if self.top_only else self.num_columns
        return min(self.num_columns, bound_columns)

    @property
    def columns_per_block(self) -> int:
        """Number of columns of a block. It is a multiple of `columns_per_tile` and at least k."""
        return self._round_up_to_tiles(max(BLOCK_COLUMNS, BOUND_COLUMNS, self.k))

    def queries_per_chunk(self, *, on_gpu: bool) -> int:
        """Return the number of queries of a chunk."""
        if on_gpu:
            return max(1, min(MAX_CHUNK_QUERIES, GPU_CHUNK_SCORES // max(1, min(self.num_columns, self.columns_per_block))))
        return max(MIN_CHUNK_QUERIES, min(MAX_CHUNK_QUERIES, CHUNK_SCORES // max(1, self.num_held_columns)))

    def _round_up_to_tiles(self, num_columns: int) -> int:
        return -(-num_columns // self.columns_per_tile) * self.columns_per_tile


class ScoredChunk:
    """The ranking of a chunk of queries from the scores of blocks, which come in ascending order of their columns."""

    def __init__(self, grid: Grid, queries: slice, *, seen: JaggedArray, targets: JaggedArray, dtype: Any) -> None:
        self._grid, self._queries, self._dtype = grid, queries, dtype
        order_L = np.argsort(seen.values_L, kind="stable")
        self._seen_query_L, self._seen_column_L = seen.list_index_L[order_L], seen.values_L[order_L]
        self._query_T, self._column_T = targets.list_index_L, targets.values_L
        self._num_above_T = np.zeros(len(self._column_T), np.int64)
        self._top_lists = TopLists(queries.stop - queries.start, k=grid.k)
        self._is_first_block = True

    def add(self, columns: slice, score_tile: ScoreTile, *, target_score_T: NDArray[Any] | None = None) -> None:
        """Add the scores of a block.

        target_score_T: score of each target, bit for bit as in the block that contains the target. None if this block has all
            columns, and therefore the scores of all targets.
        """
        grid, is_first_block, self._is_first_block = self._grid, self._is_first_block, False
        if grid.top_only:
            held_columns = slice(columns.start, columns.start + grid.num_held_columns if is_first_block else columns.start)
            tiles = self._tiles(slice(held_columns.stop, columns.stop), score_tile)
            if is_first_block:
                tiles = chain([(columns.start, self._block_scores(held_columns, score_tile))], tiles)
            if grid.k:
                self._top_lists.add(tiles)
            return
        score_BC = self._block_scores(columns, score_tile)
        if grid.k:
            self._top_lists.add([(columns.start, score_BC)])
        query_T, column_T, first_column = self._query_T, self._column_T, columns.start
        score_T = score_BC[query_T, column_T] if target_score_T is None else target_score_T
        for target_index, (query, column, score) in enumerate(zip(query_T, column_T, score_T, strict=True)):
            self._num_above_T[target_index] += num_above(score_BC[query], first_column=first_column, column=column, score=score)

    def result(self) -> Result:
        """Return the ranking after the last block."""
        if not self._grid.top_only:
            return self._top_lists.column_BK, self._num_above_T
        num_columns = self._grid.num_columns
        return self._top_lists.column_BK, listed_positions(
            self._top_lists.column_BK, self._query_T, self._column_T, num_columns=num_columns
        )

    def _block_scores(self, columns: slice, score_tile: ScoreTile) -> Scores:
        """Compute the scores of the columns tile by tile, [B, C]."""
        score_BC = np.empty((self._queries.stop - self._queries.start, columns.stop - columns.start), self._dtype)
        for tile in chunk_slices(columns.stop - columns.start, length=self._grid.columns_per_tile):
            columns_of_tile = slice(tile.start + columns.start, tile.stop + columns.start)
            self._fill_tile(columns_of_tile, score_BC[:, tile], score_tile)
        return score_BC

    def _tiles(self, columns: slice, score_tile: ScoreTile) -> Iterator[tuple[int, Scores]]:
        """Yield the first column and the scores of each tile. All tiles share one buffer."""
        num_queries = self._queries.stop - self._queries.start
        buffer = np.empty(num_queries * self._grid.columns_per_tile, self._dtype)
        for tile in chunk_slices(columns.stop - columns.start, length=self._grid.columns_per_tile):
            num_columns = tile.stop - tile.start
            score_BC = buffer[: num_queries * num_columns].reshape(num_queries, num_columns)
            self._fill_tile(slice(tile.start + columns.start, tile.stop + columns.start), score_BC, score_tile)
            yield tile.start + columns.start, score_BC

    def _fill_tile(self, columns: slice, score_BC: Scores, score_tile: ScoreTile) -> None:
        """Write the scores of a tile into `score_BC`, -inf for seen columns."""
        score_tile(self._queries, columns, score_BC)
        seen_range = slice(*np.searchsorted(self._seen_column_L, [columns.start, columns.stop]))
        score_BC[self._seen_query_L[seen_range], self._seen_column_L[seen_range] - columns.start] = -np.inf


def inner_products(query_BD: NDArray[Any], block_CD: NDArray[Any], *, first_column: int = 0) -> ScoreTile:
    """Return a function that computes inner products with the item vectors of a block. first_column: column of block_CD[0]."""

    def score_tile(queries: slice, columns: slice, score_BC: NDArray[Any]) -> None:
        tile_CD = block_CD[columns.start - first_column : columns.stop - first_column]
        np.matmul(query_BD[queries], tile_CD.T, out=score_BC)

    return score_tile


class CpuChunk:
    """The ranking of a chunk of queries by inner product, from the item vectors of one block after another.

    The ranking of a target needs its score, so all blocks are passed twice: first to `find_target_scores`, then to `add`. If
    only the top lists are needed, `add` suffices.
    """

    def __init__(self, grid: Grid, query_BD: Tensor, *, seen: JaggedArray, targets: JaggedArray) -> None:
        self._grid, self._query_BD, self._targets = grid, query_BD.numpy(), targets
        self._target_score_T = np.empty(len(targets.values_L), self._query_BD.dtype)
        self._scored_chunk = ScoredChunk(grid, slice(0, len(query_BD)), seen=seen, targets=targets, dtype=self._query_BD.dtype)

    def find_target_scores(self, first_column: int, block_CD: Tensor) -> None:
        """Compute the scores of the targets in a block.

        The place of a column is its index within its tile. Target columns of several tiles are gathered into one tile, each at
        its own place, so that their scores have the same bits. Only columns with the same place need different tiles, so few
        tiles are computed.
        """
        item_vector_CD, columns_per_tile = block_CD.numpy(), self._grid.columns_per_tile
        column_T = self._targets.values_L - first_column
        target_indices = np.flatnonzero((column_T >= 0) & (column_T < len(item_vector_CD)))
        column_V, column_index_T = np.unique(column_T[target_indices], return_inverse=True)
        place_V = column_V % columns_per_tile
        for num_tile_columns, column_indices in _filled_tiles(
            column_V, num_columns=len(item_vector_CD), columns_per_tile=columns_per_tile
        ):
            filled_CD = np.zeros((num_tile_columns, item_vector_CD.shape[1]), item_vector_CD.dtype)
            filled_CD[place_V[column_indices]] = item_vector_CD[column_V[column_indices]]
            score_BC = self._query_BD @ filled_CD.T
            is_in_tile_T = np.isin(column_index_T, column_indices)
            query_T = self._targets.list_index_L[target_indices[is_in_tile_T]]
            self._target_score_T[target_indices[is_in_tile_T]] = score_BC[query_T, place_V[column_index_T[is_in_tile_T]]]

    def add(self, first_column: int, block_CD: Tensor) -> None:
        """Rank the columns of a block."""
        columns = slice(first_column, first_column + len(block_CD))
        score_tile = inner_products(self._query_BD, block_CD.numpy(), first_column=first_column)
        self._scored_chunk.add(columns, score_tile, target_score_T=self._target_score_T)

    def result(self) -> Result:
        """Return the ranking after the last block."""
        return self._scored_chunk.result()


def _filled_tiles(
    columns: NDArray[np.int64], *, num_columns: int, columns_per_tile: int
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield, for each tile to fill, its number of columns and the indices into `columns` of the columns that are placed in it.

    columns: distinct columns of a block of `num_columns` columns. The block's last tile may have fewer than `columns_per_tile`.

    >>> tiles = _filled_tiles(np.array([1, 4, 5, 8]), num_columns=10, columns_per_tile=4)
    >>> [(num_tile_columns, column_indices.tolist()) for num_tile_columns, column_indices in tiles]
    [(4, [1, 0]), (4, [2]), (2, [3])]
    """
    tile_number_V, place_V = np.divmod(columns, columns_per_tile)
    num_whole_tiles = num_columns // columns_per_tile
    whole_tile_indices = np.flatnonzero(tile_number_V < num_whole_tiles)
    indices_in_place_order = whole_tile_indices[np.argsort(place_V[whole_tile_indices], kind="stable")]
    sorted_places = place_V[indices_in_place_order]
    # Columns with the same place cannot share a filled tile: the first goes into filled tile 0, the second into filled tile 1.
    filled_tile_numbers = np.arange(len(indices_in_place_order)) - np.searchsorted(sorted_places, sorted_places)
    for tile_number in range(filled_tile_numbers.max(initial=-1) + 1):
        yield columns_per_tile, indices_in_place_order[filled_tile_numbers == tile_number]
    if len(whole_tile_indices) < len(columns):
        yield num_columns % columns_per_tile, np.flatnonzero(tile_number_V == num_whole_tiles)


class GpuChunk:
    """The ranking of a chunk of queries by inner product on the device of its vectors; see CpuChunk."""

    def __init__(self, grid: Grid, query_BD: Tensor, *, seen: JaggedArray, targets: JaggedArray) -> None:
        self._grid, self._query_BD, device = grid, query_BD, query_BD.device
        self._seen_query_L, self._seen_column_L, self._query_T, self._column_T = (
            torch.from_numpy(array).to(device) for lists in (seen, targets) for array in (lists.list_index_L, lists.values_L)
        )
        self._target_score_T = torch.empty(len(self._column_T), dtype=query_BD.dtype, device=device)
        self._num_above_T = torch.zeros_like(self._column_T)
        self._column_BK = torch.empty((len(query_BD), 0), dtype=torch.int64, device=device)
        self._score_BK = torch.empty((len(query_BD), 0), dtype=query_BD.dtype, device=device)

    def find_target_scores(self, first_column: int, block_CD: Tensor) -> None:
        """Compute the scores of the targets in a block."""
        is_in_block_T = (self._column_T >= first_column) & (self._column_T < first_column + len(block_CD))
        score_BC = self._query_BD @ block_CD.T
        query_T, column_T = self._query_T[is_in_block_T], self._column_T[is_in_block_T]
        self._target_score_T[is_in_block_T] = score_BC[query_T, column_T - first_column]

    def add(self, first_column: int, block_CD: Tensor) -> None:
        """Rank the columns of a block."""
        score_BC = self._query_BD @ block_CD.T
        is_in_block_L = (self._seen_column_L >= first_column) & (self._seen_column_L < first_column + len(block_CD))
        score_BC[self._seen_query_L[is_in_block_L], self._seen_column_L[is_in_block_L] - first_column] = -torch.inf
        if not self._grid.top_only:
            self._num_above_T += num_above_on_gpu(
                score_BC, self._query_T, self._column_T, first_column=first_column, score_T=self._target_score_T
            )
        if not self._grid.k:
            return
        # All listed columns come before the columns of the block, so the merged columns are in order.
        num_listed_columns, merged_score_BC = self._score_BK.shape[1], torch.cat([self._score_BK, score_BC], dim=1)
        index_BK = top_columns_on_gpu(merged_score_BC, k=self._grid.k)
        is_empty_BK, index_BK = index_BK < 0, index_BK.clamp(min=0)
        self._score_BK = merged_score_BC.gather(1, index_BK).masked_fill(is_empty_BK, -torch.inf)
        column_BK = index_BK - num_listed_columns + first_column
        if num_listed_columns:
            listed_column_BK = self._column_BK.gather(1, index_BK.clamp(max=num_listed_columns - 1))
            column_BK = torch.where(index_BK < num_listed_columns, listed_column_BK, column_BK)
        self._column_BK = column_BK.masked_fill(is_empty_BK, -1)

    def result(self) -> Result:
        """Return the ranking after the last block."""
        column_BK = self._column_BK.cpu().numpy()
        if not self._grid.top_only:
            return column_BK, self._num_above_T.cpu().numpy()
        query_T, column_T = self._query_T.cpu().numpy(), self._column_T.cpu().numpy()
        return column_BK, listed_positions(column_BK, query_T, column_T, num_columns=self._grid.num_columns)
