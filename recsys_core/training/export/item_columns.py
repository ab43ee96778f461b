"""Vectors that stay on the ranks: the rows that a rank has encoded, and the item vectors that travel between the ranks.

In a ranking, each item has a column, and the columns have another order than the rows. The ranks therefore exchange their rows
once, so that each rank owns the vectors of a contiguous range of columns. Then each range travels to all ranks in blocks.

Shapes: I items, C columns, D width of a vector, R rows of a rank, W ranks.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from recsys_core.launching.rank import Process

EXCHANGE_ROWS = 8_192
"""Number of rows that each rank sends at once. It bounds the memory of the copies."""


def rows_of_rank(num_rows: int, process: Process) -> slice:
    """Return the contiguous range of the rows that this rank encodes.

    >>> [rows_of_rank(7, Process(rank, 3, torch.device("cpu"))) for rank in range(3)]
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    min_num_rows, num_longer_ranges = divmod(num_rows, process.world_size)
    start, stop = (rank * min_num_rows + min(rank, num_longer_ranges) for rank in (process.rank, process.rank + 1))
    return slice(start, stop)


class EncodedRows:
    """The rows of an array of vectors that this rank has encoded, in the memory of its device.

    Attributes:
        rows: range of the rows.
        vector_RD: vectors of the rows, float32.
    """

    def __init__(self, num_rows: int, *, dim: int, process: Process) -> None:
        self.rows = rows_of_rank(num_rows, process)
        self.vector_RD = torch.empty((self.rows.stop - self.rows.start, dim), dtype=torch.float32, device=process.device)

    def add(self, first_row: int, first_column: int, values_RC: Tensor) -> None:
        """Copy a rectangle of the array into these rows, as `Part.add` does into a file."""
        row, column = first_row - self.rows.start, first_column
        self.vector_RD[row : row + values_RC.shape[0], column : column + values_RC.shape[1]] = values_RC


class TravellingColumns:
    """Item vectors as columns of a score matrix. Each rank owns some blocks of columns, and broadcasts them in turn.

    Args:
        items: item vectors that this rank has encoded.
        item_row_C: item row of each column. Items without a column are left out.
        columns_per_block: number of columns of a block.
    """

    def __init__(self, items: EncodedRows, *, item_row_C: NDArray[np.int64], columns_per_block: int, process: Process) -> None:
        """Collective. Exchange the vectors, so that this rank has the vectors of its columns."""
        self._num_columns, self._block_columns, self._process = len(item_row_C), columns_per_block, process
        num_blocks = -(-self._num_columns // columns_per_block)
        blocks_by_rank = np.array_split(np.arange(num_blocks), process.world_size)
        self._owner_rank_by_block = np.repeat(np.arange(process.world_size), [len(blocks) for blocks in blocks_by_rank])
        first_block = int(np.searchsorted(self._owner_rank_by_block, process.rank))
        self._first_owned_column = first_block * columns_per_block
        num_owned_columns = min(
            self._num_columns - self._first_owned_column, len(blocks_by_rank[process.rank]) * columns_per_block
        )
        vector_RD = items.vector_RD
        self._owned_vector_CD = vector_RD.new_empty((max(0, num_owned_columns), vector_RD.shape[1]))

        is_encoded_C = (item_row_C >= items.rows.start) & (item_row_C < items.rows.stop)
        encoded_column_R = np.flatnonzero(is_encoded_C)
        encoded_row_R = item_row_C[encoded_column_R] - items.rows.start
        # Every rank takes part in every exchange, even after it has sent all its rows.
        num_exchanges = int(gather_counts(len(encoded_row_R), process=process).max() + EXCHANGE_ROWS - 1) // EXCHANGE_ROWS
        for exchange_index in range(num_exchanges):
            exchange_range = slice(exchange_index * EXCHANGE_ROWS, (exchange_index + 1) * EXCHANGE_ROWS)
            self._send_to_owners(encoded_column_R[exchange_range], vector_RD[torch.from_numpy(encoded_row_R[exchange_range])])

    def _send_to_owners(self, column_R: NDArray[np.int64], vector_RD: Tensor) -> None:
        """Collective. Send each vector to the owner of its column. The columns are ascending, and so are their owners."""
        device, world_size = self._process.device, self._process.world_size
        owner_rank_R = self._owner_rank_by_block[column_R // self._block_columns]
        num_sent_W = torch.from_numpy(np.bincount(owner_rank_R, minlength=world_size)).to(device)
        num_received_W = torch.empty_like(num_sent_W)
        dist.all_to_all_single(num_received_W, num_sent_W)
        received_counts, sent_counts = num_received_W.tolist(), num_sent_W.tolist()
        sent_column_R = torch.from_numpy(column_R).to(device)
        received_column_R = sent_column_R.new_empty(sum(received_counts))
        received_vector_RD = vector_RD.new_empty((sum(received_counts), vector_RD.shape[1]))
        for received_tensor, sent_tensor in ((received_column_R, sent_column_R), (received_vector_RD, vector_RD)):
            dist.all_to_all_single(received_tensor, sent_tensor, received_counts, sent_counts)
        self._owned_vector_CD[received_column_R - self._first_owned_column] = received_vector_RD

    @property
    def num_owned_columns(self) -> int:
        """Number of columns whose vectors are in the memory of this rank."""
        return len(self._owned_vector_CD)

    def travel(self) -> Iterator[tuple[int, Tensor]]:
        """Collective. Yield (first column, vectors [C, D]) of each block. The next block may overwrite the vectors."""
        buffer_CD = self._owned_vector_CD.new_empty(
            (min(self._block_columns, self._num_columns), self._owned_vector_CD.shape[1])
        )
        for block_index, owner_rank in enumerate(self._owner_rank_by_block.tolist()):
            first_column = block_index * self._block_columns
            num_columns = min(self._block_columns, self._num_columns - first_column)
            block_CD = buffer_CD[:num_columns]
            if owner_rank == self._process.rank:
                block_start = first_column - self._first_owned_column
                block_CD = self._owned_vector_CD[block_start : block_start + num_columns]
            dist.broadcast(block_CD, src=owner_rank)
            yield first_column, block_CD


def gather_counts(count: int, *, process: Process) -> NDArray[np.int64]:
    """Collective. Return the `count` of every rank, [W]."""
    counts = [torch.empty(1, dtype=torch.int64, device=process.device) for _ in range(process.world_size)]
    dist.all_gather(counts, torch.tensor([count], device=process.device))
    count_W: NDArray[np.int64] = torch.cat(counts).cpu().numpy()
    return count_W
