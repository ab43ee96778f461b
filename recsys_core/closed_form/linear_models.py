"""Linear models of the user-item matrix: EASE and the truncated singular value decomposition.

Shapes: U users, I items, R users or items, D singular vectors, L entries of a sparse matrix.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array
from scipy.sparse.linalg import eigsh, svds

from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import InputError
from recsys_core.seeds import CLOSED_FORM_SEED

Floats32 = NDArray[np.float32]


def user_item_matrix(items: JaggedArray, *, num_items: int) -> csr_array:
    """Return the matrix [lists, I] with a 1 for each distinct item of a list."""
    distinct_items = items.distinct(bound=num_items)
    ones_L = np.ones(len(distinct_items.values_L), np.float32)
    return csr_array((ones_L, distinct_items.values_L, distinct_items.offset), shape=(len(items), num_items))


def log_matrix(store: EventStore, *, before: EvaluationSplit, max_events: int, max_history: int | None = None) -> csr_array:
    """Return the matrix [U, I] of the events before the split `before`, for all users or for a sample with a fixed seed.

    Args:
        max_events: if there are more events before the split, the users are sampled.
        max_history: number of newest events of each user that are read; None for all events.
    """
    user_U = np.arange(store.num_users)
    sampled_share = max_events / max(1, int(store.item_counts_before(before).sum()))
    if sampled_share < 1:
        sample_size = max(1, int(sampled_share * len(user_U)))
        user_U = np.sort(np.random.default_rng(CLOSED_FORM_SEED).choice(user_U, sample_size, replace=False))
    return user_item_matrix(store.items_before(user_U, before, max_items=max_history), num_items=store.num_items)


def ease_weights(matrix_UI: csr_array, *, l2: float) -> Floats32:
    """Return the weights [I, I] of EASE, the linear model that predicts each item from the other items (Steck, WWW 2019).

    The weights W minimise ||X - X W||^2 + l2 ||W||^2 with a diagonal of 0: W = I - P diag(1 / diag P), P = (X'X + l2 I)^-1.

    >>> matrix_UI = csr_array(np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]], np.float32))
    >>> ease_weights(matrix_UI, l2=2.0).round(2).tolist()  # 2 users have both items: 2 / (2 + 2)
    [[0.0, 0.5, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    inverse_II = _ease_inverse(matrix_UI, l2=l2)
    weight_II = (-inverse_II / np.diag(inverse_II)).astype(np.float32, copy=False)
    np.fill_diagonal(weight_II, 0.0)
    return weight_II + 0.0  # no negative zeros


def ease_vectors(matrix_UI: csr_array, *, l2: float, dim: int) -> Floats32:
    """Return item vectors [I, D] whose inner products approximate the weights of EASE, up to a factor per row and column.

    With Q = diag P (see `ease_weights`), the matrix Q^-1/2 W Q^1/2 is symmetric. Its largest eigenvalues and their
    eigenvectors give each item one vector, which represents the item in histories and as a candidate.

    Raises:
        InputError: all weights are 0 because no user has two items, or the matrix has no inverse in single precision.
    """
    inverse_II = _ease_inverse(matrix_UI, l2=l2)
    root_diagonal_I = np.sqrt(np.diag(inverse_II))
    symmetric_II = inverse_II  # scaled in place, because the matrix is large
    symmetric_II /= -root_diagonal_I
    symmetric_II /= root_diagonal_I[:, None]
    np.fill_diagonal(symmetric_II, 0.0)
    if not symmetric_II.any():
        raise InputError(
            f"embeddings.method is ease, but none of the {matrix_UI.shape[0]:,} users has training events with two items, so "
            "all weights of EASE are 0; add events, or remove the entry"
        )
    eigenvalue_D, vector_ID = eigsh(symmetric_II, k=dim, which="LA", v0=_start_vector(len(symmetric_II)))
    order_D = np.argsort(-eigenvalue_D)
    return np.ascontiguousarray(vector_ID[:, order_D] * np.sqrt(np.maximum(eigenvalue_D[order_D], 0)), np.float32)


def singular_vectors(
    matrix_UI: csr_array, *, num_vectors: int, user_exponent: float = 0.5, item_exponent: float = 0.5
) -> tuple[Floats32, Floats32]:
    """Return the largest singular values [D] of the normalised matrix, largest first, and the items' singular vectors [I, D].

    The normalised matrix is Du^-a X Di^-b with the exponents a and b. The diagonal matrix Du has the number of items of each
    user, and Di has the number of users of each item.
    """
    user_weight_U = inverse_power(matrix_UI.sum(axis=1), user_exponent)
    item_weight_I = inverse_power(matrix_UI.sum(axis=0), item_exponent)
    normalised_UI = (diags_array(user_weight_U) @ matrix_UI @ diags_array(item_weight_I)).astype(np.float32)
    start_vector = _start_vector(min(normalised_UI.shape))
    _, singular_value_D, vector_DI = svds(normalised_UI, k=num_vectors, v0=start_vector, return_singular_vectors="vh")
    order_D = np.argsort(-singular_value_D)
    return singular_value_D[order_D].astype(np.float32), np.ascontiguousarray(vector_DI[order_D].T, np.float32)


def inverse_power(count_R: NDArray[Any], exponent: float) -> Floats32:
    """Return count^-exponent, and 0 for a count of 0."""
    return np.where(count_R > 0, np.maximum(count_R, 1) ** -exponent, 0.0).astype(np.float32)


def _ease_inverse(matrix_UI: csr_array, *, l2: float) -> NDArray[Any]:
    gram_II = (matrix_UI.T @ matrix_UI).toarray()
    gram_II[np.diag_indices_from(gram_II)] += l2
    # Torch is faster than np.linalg.inv. scipy.linalg.inv 1.17 can end the process if the matrix is not positive definite.
    cholesky_II, failed_minor_size = torch.linalg.cholesky_ex(torch.from_numpy(gram_II))
    if failed_minor_size:
        raise InputError(
            f"EASE with l2 = {l2:g}: the matrix X'X + l2 I has no inverse in single precision; set l2 to a larger number"
        )
    inverse_II: NDArray[Any] = torch.cholesky_inverse(cholesky_II).numpy()
    return inverse_II


def _start_vector(length: int) -> Floats32:
    """Return a fixed start vector, so that an iterative decomposition always has the same result."""
    return np.random.default_rng(CLOSED_FORM_SEED).random(length, np.float32)
