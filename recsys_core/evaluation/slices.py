"""Slices of the test events: by popularity of the item, and by length of the user's history.

Shapes: I items, U users, T (user, target item) pairs.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Masks = dict[str, NDArray[np.bool_]]
"""Whether each target belongs to a slice, by name of the slice."""


def item_slices(train_count_I: NDArray[Any], *, item_T: NDArray[Any]) -> Masks:
    """Return the slices by the number of training events of the target item.

    Head items are the most popular items with a third of the training events. Torso items have the next third, and tail items
    the last third. Cold items have no training event.

    >>> masks = item_slices(np.array([6, 4, 3, 2, 2, 1, 0]), item_T=np.arange(7))
    >>> {name: np.flatnonzero(mask_T).tolist() for name, mask_T in masks.items()}
    {'head items': [0], 'torso items': [1, 2], 'tail items': [3, 4, 5], 'cold items': [6]}
    """
    order_I = np.argsort(-train_count_I, kind="stable")
    count_before_I = np.empty(len(train_count_I), np.float64)
    count_before_I[order_I] = np.cumsum(train_count_I[order_I]) - train_count_I[order_I]
    third_T = np.minimum(3 * count_before_I[item_T] // max(1, train_count_I.sum()), 2)
    is_cold_T = train_count_I[item_T] == 0
    masks = {f"{name} items": (third_T == third) & ~is_cold_T for third, name in enumerate(("head", "torso", "tail"))}
    return masks | {"cold items": is_cold_T}


def user_slices(history_length_U: NDArray[Any], *, user_T: NDArray[Any]) -> Masks:
    """Return the slices by the number of items in the user's history.

    New users have no history. Light users have at most as many items as the median of the other users, heavy users have more.

    >>> masks = user_slices(np.array([0, 2, 3, 9]), user_T=np.array([0, 1, 2, 2, 3]))
    >>> {name: np.flatnonzero(mask_T).tolist() for name, mask_T in masks.items()}
    {'new users': [0], 'light users': [1, 2, 3], 'heavy users': [4]}
    """
    is_new_U = history_length_U == 0
    median = np.median(history_length_U[~is_new_U]) if not is_new_U.all() else 0
    is_heavy_T = history_length_U[user_T] > median
    return {"new users": is_new_U[user_T], "light users": ~is_new_U[user_T] & ~is_heavy_T, "heavy users": is_heavy_T}
