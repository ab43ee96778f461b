"""A random user-item matrix, for comparisons with dense computations."""

import numpy as np

NUM_USERS, NUM_ITEMS, ITEM_WITHOUT_EVENT = 60, 25, 7


def dense_matrix() -> np.ndarray:
    """Return a matrix [users, items] with 1 for each pair with an event and 0 otherwise."""
    rng = np.random.default_rng(0)
    dense_UI = (rng.random((NUM_USERS, NUM_ITEMS)) < rng.random(NUM_ITEMS) / 2).astype(np.float32)
    dense_UI[:, ITEM_WITHOUT_EVENT] = 0
    return dense_UI
