"""Initial values of the embedding tables: random rows, and pretrained vectors copied into each rank's shards.

An initial value depends on the table, row and column, never on the sharding: every plan starts from the same model.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.models.embedding_tables import LocalShard
from recsys_core.seeds import table_chunk_seed

CHUNK_ROWS = 8_192


def fill_random(shard: LocalShard, *, table: str, dim: int, seed: int, std: float) -> None:
    """Fill `shard` with values from N(0, std), a function of (seed, table, row, column)."""
    num_rows, shard_dim = shard.weight_RD.shape
    shard_end = shard.row + num_rows
    for chunk in range(shard.row // CHUNK_ROWS, math.ceil(shard_end / CHUNK_ROWS)):
        chunk_start = chunk * CHUNK_ROWS
        start, stop = max(chunk_start, shard.row), min(chunk_start + CHUNK_ROWS, shard_end)
        generator = torch.Generator().manual_seed(table_chunk_seed(seed, table=table, chunk=chunk))
        # Always draw a whole chunk: the order in which torch draws values depends on the tensor's size.
        values_RD = torch.empty(CHUNK_ROWS, dim).normal_(0.0, std, generator=generator)
        shard.weight_RD[start - shard.row : stop - shard.row].copy_(
            values_RD[start - chunk_start : stop - chunk_start, shard.column : shard.column + shard_dim]
        )


def zero_rows(shard: LocalShard, *, is_zero_R: NDArray[np.bool_]) -> None:
    """Set the marked rows to zero, the value that an id without a row looks up.

    Args:
        is_zero_R: one flag per row of the table. A row without a training example would otherwise stay random and still affect
            scores.
    """
    num_rows = len(shard.weight_RD)
    zero_index = np.flatnonzero(is_zero_R[shard.row : shard.row + num_rows])
    shard.weight_RD[torch.from_numpy(zero_index).to(shard.weight_RD.device)] = 0.0


def copy_pretrained(
    shard: LocalShard, *, vectors: NDArray[np.float32], vector_row: NDArray[np.int64], norm: float | None
) -> None:
    """Overwrite the rows of `shard` that have a pretrained vector.

    Args:
        vectors: memory-mapped, one vector per row; only the pages of this shard's rows are read.
        vector_row: for each row of the table its row in `vectors`, -1 for none.
        norm: length to which each vector is scaled, best the length of a random row (`random_norm`): row-wise Adagrad moves a
            row by about the learning rate at any scale, so that vectors of a larger scale would hardly be trained. None: no
            scaling.
    """
    num_rows, shard_dim = shard.weight_RD.shape
    for start in range(0, num_rows, CHUNK_ROWS):
        vector_row_R = vector_row[shard.row + start : shard.row + min(start + CHUNK_ROWS, num_rows)]
        has_vector = np.flatnonzero(vector_row_R >= 0)
        values_RD = torch.from_numpy(vectors[vector_row_R[has_vector]])
        if norm is not None:
            values_RD = scale_to_norm(values_RD, norm=norm)
        target_R = torch.from_numpy(has_vector + start).to(shard.weight_RD.device)
        shard.weight_RD[target_R] = values_RD[:, shard.column : shard.column + shard_dim].to(shard.weight_RD.device)


def mean_vector(vectors: NDArray[np.float32], *, vector_row: NDArray[np.int64], norm: float | None) -> Tensor:
    """Return the mean [D] of the rows that `copy_pretrained` writes into the whole table; zeros if no row has a vector.

    Every rank computes the same mean.
    """
    sum_D, count = torch.zeros(vectors.shape[1], dtype=torch.float64), 0
    for vector_row_R in rows_with_vector(vector_row):
        values_RD = torch.from_numpy(vectors[vector_row_R])
        sum_D += (values_RD if norm is None else scale_to_norm(values_RD, norm=norm)).sum(dim=0, dtype=torch.float64)
        count += len(vector_row_R)
    return (sum_D / max(count, 1)).float()


def rows_with_vector(vector_row: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the entries that are not -1, in order, CHUNK_ROWS at a time: a copy of all of them may not fit into memory.

    >>> [rows.tolist() for rows in rows_with_vector(np.array([4, -1, 0]))]
    [[4, 0]]
    """
    buffered = vector_row[:0]
    for start in range(0, len(vector_row), CHUNK_ROWS):
        entries = vector_row[start : start + CHUNK_ROWS]
        buffered = np.concatenate([buffered, entries[entries >= 0]])
        if len(buffered) >= CHUNK_ROWS:
            yield buffered[:CHUNK_ROWS]
            buffered = buffered[CHUNK_ROWS:]
    if len(buffered):
        yield buffered


def no_vectors(num_rows: int) -> NDArray[np.int64]:
    """Return the `vector_row` of a table without any vector: -1 for each row, without using memory."""
    return np.broadcast_to(np.int64(-1), num_rows)


def fill_missing(shard: LocalShard, *, vector_row: NDArray[np.int64], value_D: Tensor | None) -> None:
    """Set the rows of `shard` without a pretrained vector to `value_D`, or to zero if it is None."""
    num_rows, shard_dim = shard.weight_RD.shape
    shard_value = torch.zeros(shard_dim) if value_D is None else value_D[shard.column : shard.column + shard_dim]
    for start in range(0, num_rows, CHUNK_ROWS):
        vector_row_R = vector_row[shard.row + start : shard.row + min(start + CHUNK_ROWS, num_rows)]
        missing = torch.from_numpy(np.flatnonzero(vector_row_R < 0) + start)
        shard.weight_RD[missing.to(shard.weight_RD.device)] = shard_value.to(shard.weight_RD.device)


def scale_to_norm(values_RD: Tensor, *, norm: float) -> Tensor:
    """Return the vectors scaled to length `norm`; a zero vector stays zero.

    >>> scale_to_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), norm=10.0).tolist()
    [[6.0, 8.0], [0.0, 0.0]]
    """
    norm_R1 = values_RD.norm(dim=1, keepdim=True).clamp(min=torch.finfo(values_RD.dtype).tiny)
    unit_RD: Tensor = values_RD / norm_R1  # divide first: norm / tiny may be infinite, and 0 * inf is NaN
    return unit_RD.mul(norm)
