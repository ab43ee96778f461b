"""Principal component analysis (PCA) of pretrained vectors, fitted on a sample.

Shapes: N rows of a block, D width of an input vector, P width of a projected vector.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

MAX_SAMPLE_ROWS = 131_072
"""Largest number of vectors to which a projection is fitted, which is enough for a few thousand dimensions.

With more vectors, only the third digit of the explained variance changes.
"""
_MAX_ROUNDING_VARIANCE = 1e-12
"""Largest variance that rounding can cause among equal vectors, as a share of their mean squared norm."""


@dataclass(frozen=True)
class Projection:
    """The projection x -> (x - mean) @ components onto the principal components, which have decreasing variance."""

    mean_D: NDArray[np.float64]
    component_DP: NDArray[np.float32]
    explained_variance: float
    """Share of the sample's variance in the principal components; NaN if all vectors of the sample are equal."""

    @classmethod
    def fit(cls, blocks_ND: Iterable[NDArray[np.float32]], *, dim: int) -> Self:
        """Fit `dim` components to the rows of all blocks, in one pass; memory is O(D * D).

        >>> line = np.outer(np.arange(5, dtype=np.float32), [3, 4])
        >>> projection = Projection.fit([line[:2], line[2:]], dim=1)
        >>> projection.explained_variance, projection.component_DP.round(3).tolist()
        (1.0, [[0.6000000238418579], [0.800000011920929]])
        """
        num_rows = 0
        sum_D = moment_DD = np.zeros(())
        for block_ND in blocks_ND:
            float64_ND = block_ND.astype(np.float64)
            num_rows += len(float64_ND)
            sum_D = sum_D + float64_ND.sum(axis=0)
            moment_DD = moment_DD + float64_ND.T @ float64_ND
        mean_D = sum_D / num_rows
        covariance_DD = moment_DD / num_rows - np.outer(mean_D, mean_D)
        eigenvalue_D, eigenvector_DD = np.linalg.eigh(covariance_DD)  # ascending
        component_DP = eigenvector_DD[:, ::-1][:, :dim]
        # The sign of a component is arbitrary. For reproducible results, the number of largest magnitude is made positive.
        component_DP = component_DP * np.sign(component_DP[np.abs(component_DP).argmax(axis=0), np.arange(dim)])
        total_variance = eigenvalue_D.clip(min=0).sum()
        all_rows_are_equal = total_variance <= _MAX_ROUNDING_VARIANCE * np.trace(moment_DD) / num_rows
        component_variance = eigenvalue_D[::-1][:dim].clip(min=0).sum()
        explained_share = math.nan if all_rows_are_equal else min(round(float(component_variance / total_variance), 12), 1.0)
        return cls(mean_D, np.ascontiguousarray(component_DP, np.float32), explained_share)

    def apply(self, block_ND: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the projected vectors."""
        projected_NP: NDArray[np.float32] = (block_ND - self.mean_D).astype(np.float32) @ self.component_DP
        return projected_NP


def with_unit_norm(block_NP: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the rows scaled to the norm 1; a row of zeros stays unchanged.

    >>> with_unit_norm(np.array([[3, 4], [0, 0]], np.float32)).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    norm_N1 = np.linalg.norm(block_NP.astype(np.float64), axis=1, keepdims=True)
    return (block_NP / np.where(norm_N1 > 0, norm_N1, 1.0)).astype(np.float32)
