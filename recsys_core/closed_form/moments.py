"""Second moments and covariances of vectors in single precision, summed in double precision and in chunks.

Shapes: R rows, D width of a vector.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.jagged import chunk_slices

Floats32 = NDArray[np.float32]
CHUNK_ROWS = 1 << 16


def row_chunks(vector_RD: Floats32) -> Iterator[Floats32]:
    """Yield views of at most CHUNK_ROWS rows."""
    return (vector_RD[chunk] for chunk in chunk_slices(len(vector_RD), length=CHUNK_ROWS))


def second_moments(chunks: Iterable[Floats32], *, width: int) -> NDArray[Any]:
    """Return the sum of the products of each vector with itself, [D, D].

    >>> second_moments([np.array([[1, 2]], np.float32), np.array([[3, 0]], np.float32)], width=2).tolist()
    [[10.0, 2.0], [2.0, 4.0]]
    """
    moments_DD = np.zeros((width, width))
    for chunk_RD in chunks:
        double_RD = chunk_RD.astype(np.float64)
        moments_DD += double_RD.T @ double_RD
    return moments_DD


def covariance(vector_RD: Floats32, *, num_rows: int | None = None) -> NDArray[Any]:
    """Return the covariance of the vectors, [D, D], like np.cov.

    num_rows: number of rows with those that are zero and not in `vector_RD`; None if all are there.

    >>> covariance(np.array([[1, 0], [3, 2]], np.float32)).tolist()
    [[2.0, 2.0], [2.0, 2.0]]
    """
    count = len(vector_RD) if num_rows is None else num_rows
    total_D = vector_RD.sum(axis=0, dtype=np.float64)
    moments_DD = second_moments(row_chunks(vector_RD), width=vector_RD.shape[1])
    covariance_DD: NDArray[Any] = (moments_DD - np.outer(total_D, total_D) / count) / (count - 1)
    return covariance_DD
