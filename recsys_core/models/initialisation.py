"""First values of the embedding tables: random rows, and pretrained vectors copied into each rank's own shards.

Both depend on the row alone, never on the sharding, so every plan starts from the same model.
Shapes: R rows and C columns of a shard, D width of the table.
"""

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.models.shards import LocalShard

CHUNK_ROWS = 8_192


def fill_random(shard: LocalShard, *, table: str, dim: int, seed: int, std: float) -> None:
    """Fills `shard` with N(0, std) values that are a function of (seed, table, row, column)."""
    rows, columns = shard.weight_RC.shape
    for chunk in range(shard.row // CHUNK_ROWS, math.ceil((shard.row + rows) / CHUNK_ROWS)):
        start, stop = max(chunk * CHUNK_ROWS, shard.row), min((chunk + 1) * CHUNK_ROWS, shard.row + rows)
        generator = torch.Generator().manual_seed(_chunk_seed(seed, table, chunk))
        # Always a whole chunk: torch draws a tensor's values in an order that depends on its size.
        values_RD = torch.empty(CHUNK_ROWS, dim).normal_(0.0, std, generator=generator)
        first = chunk * CHUNK_ROWS
        shard.weight_RC[start - shard.row : stop - shard.row].copy_(
            values_RD[start - first : stop - first, shard.column : shard.column + columns]
        )


def blank_rows(shard: LocalShard, *, blank: NDArray[np.bool_]) -> None:
    """Sets the marked rows to zero, which is what an id that is not there looks up.

    Args:
        blank: [rows of the table]; a row that no training example holds would else stay random and speak all the same.
    """
    rows = len(shard.weight_RC)
    mine = torch.from_numpy(np.flatnonzero(blank[shard.row : shard.row + rows])).to(shard.weight_RC.device)
    shard.weight_RC[mine] = 0.0


def copy_pretrained(
    shard: LocalShard, *, vectors: NDArray[np.float32], vector_row: NDArray[np.int64], norm: float | None
) -> None:
    """Overwrites the rows of `shard` that have a pretrained vector.

    Args:
        vectors: memory-mapped [n, D]; only the pages of this shard's rows are read.
        vector_row: the row in `vectors` of each row of the table, -1 for none.
        norm: scale each vector to this length, best that of a random row (`random_norm`): row-wise Adagrad moves a row by about
            the learning rate whatever its scale, so vectors of a larger scale would hardly be trained. None: as they are.
    """
    rows, columns = shard.weight_RC.shape
    for start in range(0, rows, CHUNK_ROWS):
        source_R = vector_row[shard.row + start : shard.row + min(start + CHUNK_ROWS, rows)]
        found_R = np.flatnonzero(source_R >= 0)
        values_RD = torch.from_numpy(vectors[source_R[found_R]])
        if norm is not None:
            values_RD = rescaled(values_RD, norm=norm)
        target_R = torch.from_numpy(found_R + start).to(shard.weight_RC.device)
        shard.weight_RC[target_R] = values_RD[:, shard.column : shard.column + columns].to(shard.weight_RC.device)


def mean_vector(vectors: NDArray[np.float32], *, vector_row: NDArray[np.int64], norm: float | None) -> Tensor:
    """Mean [D] of what copy_pretrained writes into a whole table, the same on every rank; zeros where no row has a vector."""
    sum_D, count = torch.zeros(vectors.shape[1], dtype=torch.float64), 0
    for found_R in rows_with_vector(vector_row):
        values_RD = torch.from_numpy(vectors[found_R])
        sum_D += (values_RD if norm is None else rescaled(values_RD, norm=norm)).sum(dim=0, dtype=torch.float64)
        count += len(found_R)
    return (sum_D / max(count, 1)).float()


def rows_with_vector(vector_row: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """The entries that are not -1, in order, CHUNK_ROWS at a time: a table may have more rows than there is memory for copies.

    >>> [rows.tolist() for rows in rows_with_vector(np.array([4, -1, 0]))]
    [[4, 0]]
    """
    left = vector_row[:0]
    for start in range(0, len(vector_row), CHUNK_ROWS):
        entries = vector_row[start : start + CHUNK_ROWS]
        left = np.concatenate([left, entries[entries >= 0]])
        if len(left) >= CHUNK_ROWS:
            yield left[:CHUNK_ROWS]
            left = left[CHUNK_ROWS:]
    if len(left):
        yield left


def no_vectors(rows: int) -> NDArray[np.int64]:
    """-1 for each row of a table of which none has a vector; takes no memory."""
    return np.broadcast_to(np.int64(-1), rows)


def fill_missing(shard: LocalShard, *, vector_row: NDArray[np.int64], value_D: Tensor | None) -> None:
    """Sets the rows of `shard` without a pretrained vector to `value_D`, to zero where there is none."""
    rows, columns = shard.weight_RC.shape
    value_C = torch.zeros(columns) if value_D is None else value_D[shard.column : shard.column + columns]
    for start in range(0, rows, CHUNK_ROWS):
        missing = np.flatnonzero(vector_row[shard.row + start : shard.row + min(start + CHUNK_ROWS, rows)] < 0) + start
        shard.weight_RC[torch.from_numpy(missing).to(shard.weight_RC.device)] = value_C.to(shard.weight_RC.device)


def rescaled(values_RD: Tensor, *, norm: float) -> Tensor:
    """Vectors scaled to length `norm`; a row of zeros stays one.

    >>> rescaled(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), norm=10.0).tolist()
    [[6.0, 8.0], [0.0, 0.0]]
    """
    norm_R1 = values_RD.norm(dim=1, keepdim=True).clamp(min=torch.finfo(values_RD.dtype).tiny)
    unit_RD: Tensor = values_RD / norm_R1  # first: norm / tiny may be infinite, and 0 times that is NaN
    return unit_RD.mul(norm)


def _chunk_seed(seed: int, table: str, chunk: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{table}/{chunk}".encode()).digest()[:8], "little") >> 1
