"""Slices of the test events: by popularity of the item, by length of the user's history, and by the values of a feature.

Shapes: I items, U users, T (user, target item) pairs, L test events.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.dataset.jagged import Int64Array, ragged_ranges
from recsys_core.errors import InputError
from recsys_core.evaluation.config import FeatureSlice
from recsys_core.manifests import FeaturesManifest

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


def feature_slices(config: FeatureSlice, features: FeaturesManifest | None, *, owner_T: Int64Array) -> Masks:
    """Return a slice <feature>=<value> for each of the most frequent values of a feature among the targets.

    With a list of values, a target belongs to the slice of each of its values.

    Args:
        owner_T: row of the user or item, or index of the event, whose feature each target has.

    Raises InputError if the feature is not declared, or has numbers instead of values.
    """
    key = config.feature
    if features is None or key not in features.features:
        declared = ", ".join(sorted(features.features)) if features is not None else "none"
        raise InputError(
            f"evaluation.slices: {key} is not declared under features (declared: {declared}); declare it, or remove it"
        )
    facts = features.features[key]
    if facts.mean is not None:
        raise InputError(f"evaluation.slices: {key} is standardised, so it has no values to slice by; declare it with buckets")
    values, _ = FeatureStore.open(features).feature_by_key[key].rows_and_weights(owner_T)
    target_count_R = np.bincount(values.values_L, minlength=1)
    frequent_rows = np.argsort(-target_count_R, kind="stable")[: config.max_values]
    masks = {}
    for row in frequent_rows[target_count_R[frequent_rows] > 0].tolist():
        mask_T = np.zeros(len(owner_T), np.bool_)
        mask_T[values.list_index_L[values.values_L == row]] = True
        masks[f"{key}={_value_name(features, key, row=row)}"] = mask_T
    return masks


def guarded_slices(
    configs: Sequence[FeatureSlice],
    features: FeaturesManifest | None,
    *,
    store: EventStore,
    user_row_U: Int64Array,
    user_T: Int64Array,
    item_T: Int64Array,
) -> tuple[Masks, dict[str, int | None]]:
    """Return the slices of test targets by the values of several features, and `min_users` of each slice.

    A feature without a value for any target has one empty slice with the name of the feature, so that it stays visible.

    Args:
        user_row_U: rows of the users.
        user_T, item_T: index of each target's user in `user_row_U`, and row of its item.

    Raises InputError as `feature_slices`.
    """
    masks: Masks = {}
    min_users_by_slice: dict[str, int | None] = {}
    for config in configs:
        owner_T = feature_owners(config.feature, store=store, user_row_U=user_row_U, user_T=user_T, item_T=item_T)
        feature_masks = feature_slices(config, features, owner_T=owner_T)
        masks |= feature_masks or {config.feature: np.zeros(len(item_T), np.bool_)}
        min_users_by_slice |= dict.fromkeys(feature_masks or (config.feature,), config.min_users)
    return masks, min_users_by_slice


def feature_owners(
    key: str, *, store: EventStore, user_row_U: Int64Array, user_T: Int64Array, item_T: Int64Array
) -> Int64Array:
    """Return the owner of the feature for each target, [T]: row of the user or item, or index of the event.

    The event is the user's first test event with the target.

    Args: see `guarded_slices`.
    """
    side = key.partition(".")[0]
    if side != "context":
        return user_row_U[user_T] if side == "user" else item_T
    targets = store.targets(user_row_U, "test")
    event_index_L = ragged_ranges(store.first_event_index(user_row_U, "test"), targets.lengths)
    distinct_keys, first_L = np.unique(targets.pair_keys(bound=store.num_items), return_index=True)
    event_index_T: Int64Array = event_index_L[first_L[np.searchsorted(distinct_keys, user_T * store.num_items + item_T)]]
    return event_index_T


def _value_name(features: FeaturesManifest, key: str, *, row: int) -> str:
    """Return the value of a row of the feature's table; its bucket for a number."""
    if row == 0:
        return "(other)"
    boundaries = features.features[key].boundaries
    if boundaries is not None:
        bounds = ["-inf", *(f"{boundary:g}" for boundary in boundaries), "inf"]
        return f"[{bounds[row - 1]}, {bounds[row]})"
    vocabulary_file = f"{key}.vocabulary.parquet"
    if vocabulary_file not in features.files:
        return f"(hash {row})"
    return str(pq.read_table(features.path(vocabulary_file), columns=["value"])["value"][row].as_py())
