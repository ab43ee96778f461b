"""Two vectors per item from a truncated singular value decomposition of the log: a history vector and a candidate vector.

The covariances of single-precision vectors are summed in double precision and in chunks.

Shapes: U users (with events in `matrix_UV`), I items, V items with events, M singular vectors, R rows, D width of a vector.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from recsys_core.closed_form.linear_models import Floats32, singular_vectors
from recsys_core.dataset.jagged import chunk_slices
from recsys_core.errors import InputError

CHUNK_ROWS = 1 << 16
"""Number of vectors that are converted to double precision at once. The copy takes twice the memory of the vectors."""
RELATIVE_RIDGE = 1e-6
"""Ridge of the covariance, relative to its mean diagonal. Without it, the covariance of few distinct candidates is singular."""


def block_factors(matrix_UI: csr_array, *, dim: int, item_exponent: float) -> tuple[Floats32, Floats32]:
    """Return the vectors of the items in histories and as candidates, [I, M] each; an item without events has zeros.

    The score of a candidate is the inner product of its vector with the sum of the vectors of a history. With the singular
    vectors V of the normalised matrix and the numbers of events D, the scores of histories X (0 or 1 per item) are
    proportional to X D^-a V V' D^a, where a is `item_exponent`. With the exponent 0.5, this model is the ideal low-pass
    filter of GF-CF (Shen et al., CIKM 2021).

    Both vectors are given in a basis in which the covariance of the candidate vectors is the identity matrix. The standard
    deviation of the scores of a query over the catalogue is then the norm of the query vector.

    Args:
        matrix_UI: 1 for each item of a user.
        dim: number of singular vectors M.

    Raises:
        InputError: there are too few users or items with events for `dim` singular vectors.
    """
    count_I = np.asarray(matrix_UI.sum(axis=0)).ravel()
    has_event_I, has_event_U = count_I > 0, np.diff(matrix_UI.indptr) > 0
    matrix_UV = matrix_UI[has_event_U][:, has_event_I]
    side_size, side_name = min((matrix_UV.shape[1], "items"), (matrix_UV.shape[0], "users"))
    if dim >= side_size:
        raise InputError(
            f"model.spectral_block.dim is {dim}, but only {side_size:,} {side_name} have training events, which give at most "
            f"{max(0, side_size - 1):,} singular vectors; lower dim, add events, or remove model.spectral_block"
        )
    _, vector_VM = singular_vectors(matrix_UV, num_vectors=dim)
    count_power_V1 = (count_I[has_event_I, None] ** item_exponent).astype(np.float32)
    covariance_MM = covariance(vector_VM * count_power_V1, num_rows=len(count_I))
    covariance_MM[np.diag_indices(dim)] += RELATIVE_RIDGE * covariance_MM.trace() / dim
    root_MM = np.linalg.cholesky(covariance_MM)
    history_factor_IM, candidate_factor_IM = (np.zeros((len(count_I), dim), np.float32) for _ in range(2))
    history_factor_IM[has_event_I] = vector_VM / count_power_V1 @ root_MM.astype(np.float32)
    candidate_factor_IM[has_event_I] = vector_VM * count_power_V1 @ np.linalg.inv(root_MM).T.astype(np.float32)
    # The scale of history vectors has no effect, because their sum is scaled to the norm 1.
    history_factor_IM /= max(history_factor_IM.max(), -history_factor_IM.min())
    return history_factor_IM, candidate_factor_IM


def row_chunks(vector_RD: Floats32) -> Iterator[Floats32]:
    """Yield views of at most CHUNK_ROWS rows."""
    return (vector_RD[chunk] for chunk in chunk_slices(len(vector_RD), length=CHUNK_ROWS))


def second_moments(chunks: Iterable[Floats32], *, width: int) -> NDArray[Any]:
    """Return the sum of the outer products of each vector with itself, [D, D].

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

    num_rows: number of rows including zero rows that are not in `vector_RD`; None if there are no such rows.

    >>> covariance(np.array([[1, 0], [3, 2]], np.float32)).tolist()
    [[2.0, 2.0], [2.0, 2.0]]
    """
    num_rows = len(vector_RD) if num_rows is None else num_rows
    total_D = vector_RD.sum(axis=0, dtype=np.float64)
    moments_DD = second_moments(row_chunks(vector_RD), width=vector_RD.shape[1])
    covariance_DD: NDArray[Any] = (moments_DD - np.outer(total_D, total_D) / num_rows) / (num_rows - 1)
    return covariance_DD
