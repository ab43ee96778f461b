"""Initial values of the embedding tables: random rows, and pretrained vectors copied into each rank's shards.

An initial value depends on the table, row and column, never on the sharding, so every plan starts from the same model.

Shapes: R rows of a shard or of a chunk, D columns of a table or of a shard.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.dataset.jagged import chunk_slices
from recsys_core.models.tables.embedding_tables import LocalShard
from recsys_core.seeds import table_chunk_seed

CHUNK_ROWS = 8_192


def fill_random(shard: LocalShard, *, table: str, dim: int, seed: int, std: float) -> None:
    """Fill `shard` with random values from N(0, std^2). A value depends only on seed, table, row and column."""
    num_rows, shard_dim = shard.weight_RD.shape
    shard_end = shard.first_row + num_rows
    for chunk_index in range(shard.first_row // CHUNK_ROWS, math.ceil(shard_end / CHUNK_ROWS)):
        chunk_start = chunk_index * CHUNK_ROWS
        start_row, stop_row = max(chunk_start, shard.first_row), min(chunk_start + CHUNK_ROWS, shard_end)
        generator = torch.Generator().manual_seed(table_chunk_seed(seed, table=table, chunk=chunk_index))
        # Always draw a whole chunk: the order in which torch draws values depends on the tensor's size.
        value_RD = torch.empty(CHUNK_ROWS, dim).normal_(0.0, std, generator=generator)
        shard.weight_RD[start_row - shard.first_row : stop_row - shard.first_row].copy_(
            value_RD[start_row - chunk_start : stop_row - chunk_start, shard.first_column : shard.first_column + shard_dim]
        )


def copy_rows(
    shard: LocalShard, *, vectors: NDArray[np.float32], vector_row: NDArray[np.int64], norm: float | None, num_copies: int = 1
) -> None:
    """Overwrite the rows of `shard` that have a vector, such as a pretrained vector or the champion's row.

    Args:
        vectors: memory-mapped, one vector per row; only the vectors of this shard's rows are read from the file.
        vector_row: for each row of the whole table, the index of its vector in `vectors`; -1 if it has none.
        norm: norm to which each vector is scaled; None for no scaling. The caller usually passes the norm of a random row
            (`random_norm`). A step of row-wise Adagrad has about the norm of the learning rate, so it would hardly change a
            vector with a much larger norm.
        num_copies: number of copies of the vector in a row, one for each member of the model.
    """
    num_rows, shard_dim = shard.weight_RD.shape
    for chunk_start in range(0, num_rows, CHUNK_ROWS):
        vector_row_R = vector_row[shard.first_row + chunk_start : shard.first_row + min(chunk_start + CHUNK_ROWS, num_rows)]
        row_index = np.flatnonzero(vector_row_R >= 0)
        value_RD = torch.from_numpy(vectors[vector_row_R[row_index]])
        if norm is not None:
            value_RD = scale_to_norm(value_RD, norm=norm)
        target_row_R = torch.from_numpy(row_index + chunk_start).to(shard.weight_RD.device)
        value_RD = value_RD.tile(1, num_copies)
        shard.weight_RD[target_row_R] = value_RD[:, shard.first_column : shard.first_column + shard_dim].to(
            shard.weight_RD.device
        )


def mean_vector(vectors: NDArray[np.float32], *, vector_row: NDArray[np.int64], norm: float | None) -> Tensor:
    """Return the mean [D] of the pretrained vectors of a table, scaled as in `copy_rows`; zeros if there are no vectors.

    Every rank computes the same mean.
    """
    total_D, num_vectors = torch.zeros(vectors.shape[1], dtype=torch.float64), 0
    for vector_row_R in present_vector_rows(vector_row):
        chunk_RD = torch.from_numpy(vectors[vector_row_R])
        total_D += (chunk_RD if norm is None else scale_to_norm(chunk_RD, norm=norm)).sum(dim=0, dtype=torch.float64)
        num_vectors += len(vector_row_R)
    return (total_D / max(num_vectors, 1)).float()


def present_vector_rows(vector_row: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the entries of `vector_row` that are not -1, in chunks that bound the memory.

    >>> [vector_rows.tolist() for vector_rows in present_vector_rows(np.array([4, -1, 0]))]
    [[4, 0]]
    """
    for chunk in chunk_slices(len(vector_row), length=CHUNK_ROWS):
        yield vector_row[chunk][vector_row[chunk] >= 0]


def no_vectors(num_rows: int) -> NDArray[np.int64]:
    """Return the `vector_row` of a table without any vector: -1 for each row, without using memory."""
    return np.broadcast_to(np.int64(-1), num_rows)


def fill_missing(shard: LocalShard, *, vector_row: NDArray[np.integer[Any]], value_D: Tensor | None) -> None:
    """Set the rows of `shard` without a pretrained vector to `value_D`, or to zero if it is None."""
    num_rows, shard_dim = shard.weight_RD.shape
    shard_vector = torch.zeros(shard_dim) if value_D is None else value_D[shard.first_column : shard.first_column + shard_dim]
    for chunk_start in range(0, num_rows, CHUNK_ROWS):
        vector_row_R = vector_row[shard.first_row + chunk_start : shard.first_row + min(chunk_start + CHUNK_ROWS, num_rows)]
        missing_rows = torch.from_numpy(np.flatnonzero(vector_row_R < 0) + chunk_start)
        shard.weight_RD[missing_rows.to(shard.weight_RD.device)] = shard_vector.to(shard.weight_RD.device)


def scale_to_norm(value_RD: Tensor, *, norm: float) -> Tensor:
    """Return the vectors scaled to the norm `norm`; a zero vector stays zero.

    >>> scale_to_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), norm=10.0).tolist()
    [[6.0, 8.0], [0.0, 0.0]]
    """
    norm_R1 = value_RD.norm(dim=1, keepdim=True).clamp(min=torch.finfo(value_RD.dtype).tiny)
    unit_RD: Tensor = value_RD / norm_R1  # divide first: norm / tiny may be infinite, and 0 * inf is NaN
    return unit_RD.mul(norm)
