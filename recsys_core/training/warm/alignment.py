"""Rotation of vectors from the log onto the champion's item table.

A decomposition of the log determines its vectors only up to a rotation, and each run has its own. Without the rotation onto the
champion's rows, new items and frozen vectors would not fit the rows and layers that are carried over.

Shapes: I items, V vectors, R rows of the champion's table, D width.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def aligned_vectors(
    vector_VD: NDArray[np.float32],
    *,
    vector_row_I: NDArray[np.int64],
    champion_row_I: NDArray[np.int64],
    champion_RD: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Return the vectors, rotated so that they are as near as possible to the champion's rows of the same items.

    All vectors and rows have the same weight, because they are scaled to the norm 1 for the comparison. The result keeps the
    norms of the vectors.

    Args:
        vector_row_I: row of each item's vector, -1 without a vector.
        champion_row_I: row of each item in the champion's table, -1 for a new item.

    >>> rows, turned_RD = np.arange(2), np.array([[0, 1], [-1, 0]], np.float32)
    >>> aligned_vectors(np.eye(2, dtype=np.float32), vector_row_I=rows, champion_row_I=rows, champion_RD=turned_RD).tolist()
    [[0.0, 1.0], [-1.0, 0.0]]
    """
    is_common_I = (vector_row_I >= 0) & (champion_row_I >= 0)
    common_ID, target_ID = _unit(vector_VD[vector_row_I[is_common_I]]), _unit(champion_RD[champion_row_I[is_common_I]])
    left, _, right = np.linalg.svd(common_ID.T @ target_ID)
    rotated_VD: NDArray[np.float32] = np.ascontiguousarray(vector_VD @ (left @ right), np.float32)
    return rotated_VD + 0.0  # no negative zeros


def _unit(rows_RD: NDArray[np.float32]) -> NDArray[Any]:
    norm_R1 = np.linalg.norm(rows_RD, axis=1, keepdims=True)
    unit_RD: NDArray[Any] = rows_RD / np.maximum(norm_R1, np.finfo(np.float32).tiny)
    return unit_RD
