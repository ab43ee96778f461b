"""A random user-item matrix, for comparisons with dense computations."""

import numpy as np

NUM_USERS, NUM_ITEMS = 60, 25


def dense_matrix() -> np.ndarray:
    """Return a matrix [users, items] of 0 and 1. Item 7 has no event."""
    random = np.random.default_rng(0)
    dense = (random.random((NUM_USERS, NUM_ITEMS)) < random.random(NUM_ITEMS) / 2).astype(np.float32)
    dense[:, 7] = 0
    return dense
