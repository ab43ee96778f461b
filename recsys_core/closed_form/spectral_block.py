"""Two vectors per item from a truncated singular value decomposition of the log: for histories, and as a candidate.

Shapes: I items, M singular vectors.
"""

import numpy as np
from scipy.sparse import csr_array

from recsys_core.closed_form.linear_models import Floats32, singular_vectors
from recsys_core.closed_form.moments import covariance
from recsys_core.errors import InputError

RELATIVE_RIDGE = 1e-6
"""Ridge of the covariance, relative to its mean diagonal. Without it, few distinct candidates make it singular."""


def block_factors(matrix_UI: csr_array, *, dim: int, item_exponent: float) -> tuple[Floats32, Floats32]:
    """Return the vectors of the items in histories and as candidates, [I, M] each; an item without events has zeros.

    The score of a candidate is the inner product of its vector with the sum of the vectors of a history. With the singular
    vectors V of the normalised matrix and the numbers of events D, the scores of histories X (0 or 1 per item) are
    proportional to X D^-a V V' D^a, where a is `item_exponent`. With the exponent 0.5, it is the ideal low-pass filter of
    GF-CF (Shen et al., CIKM 2021).

    Both vectors are given in a basis in which the candidate vectors have the covariance 1. The standard deviation of the scores
    of a query over the catalogue is then the length of the query vector.

    Args:
        matrix_UI: 1 for each item of a user.
        dim: number of singular vectors M.

    Raises:
        InputError: there are too few users or items with events for `dim` singular vectors.
    """
    count_I = np.asarray(matrix_UI.sum(axis=0)).ravel()
    has_event_I, has_event_U = count_I > 0, np.diff(matrix_UI.indptr) > 0
    matrix_UV = matrix_UI[has_event_U][:, has_event_I]
    smaller, subject = min((matrix_UV.shape[1], "items"), (matrix_UV.shape[0], "users"))
    if dim >= smaller:
        raise InputError(
            f"model.spectral_block.dim is {dim}, but only {smaller:,} {subject} have training events, which give at most "
            f"{max(0, smaller - 1):,} singular vectors; lower dim, or remove model.spectral_block"
        )
    _, vector_VM = singular_vectors(matrix_UV, num_vectors=dim)
    scale_V1 = (count_I[has_event_I, None] ** item_exponent).astype(np.float32)
    covariance_MM = covariance(vector_VM * scale_V1, num_rows=len(count_I))
    covariance_MM[np.diag_indices(dim)] += RELATIVE_RIDGE * covariance_MM.trace() / dim
    root_MM = np.linalg.cholesky(covariance_MM)
    history_IM, candidate_IM = (np.zeros((len(count_I), dim), np.float32) for _ in range(2))
    history_IM[has_event_I] = vector_VM / scale_V1 @ root_MM.astype(np.float32)
    candidate_IM[has_event_I] = vector_VM * scale_V1 @ np.linalg.inv(root_MM).T.astype(np.float32)
    # The length of a sum of history vectors has no meaning: a query vector is scaled to the length 1.
    history_IM /= max(history_IM.max(), -history_IM.min())
    return history_IM, candidate_IM
