"""Slices of the test events: by popularity of the item, by the user's training events, and by the values of a feature.

Shapes: I items, U users, T (user, target item) pairs, L test events or feature values of all targets, R rows of a feature's
table.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.dataset.jagged import Int64Array, chunk_slices, ragged_ranges
from recsys_core.errors import InputError
from recsys_core.evaluation.config import EvaluationConfig, FeatureSlice
from recsys_core.evaluation.estimates import Accuracy, Columns, slice_report
from recsys_core.evaluation.held_out import CHUNK_USERS
from recsys_core.evaluation.metrics import TargetPositions
from recsys_core.manifests import FeaturesManifest, SliceReport

ITEM_GROUPS = ("head", "torso", "tail", "cold")
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
    return _group_slices(_popularity_group(train_count_I), item_T=item_T)


def _group_slices(group_I: NDArray[np.int8], *, item_T: NDArray[Any]) -> Masks:
    group_T = group_I[item_T]
    return {f"{group_name} items": group_T == group_index for group_index, group_name in enumerate(ITEM_GROUPS)}


def _popularity_group(train_count_I: NDArray[Any]) -> NDArray[np.int8]:
    """Return the group of each item as an index of ITEM_GROUPS, [I]; see `item_slices`."""
    order_I = np.argsort(-train_count_I, kind="stable")
    num_events_above_I = np.empty(len(train_count_I), np.float64)
    num_events_above_I[order_I] = np.cumsum(train_count_I[order_I]) - train_count_I[order_I]
    third_I = np.minimum(3 * num_events_above_I // max(1, train_count_I.sum()), 2)
    return np.where(train_count_I == 0, ITEM_GROUPS.index("cold"), third_I).astype(np.int8)


def user_slices(train_count_U: NDArray[Any], *, user_T: NDArray[Any], median_count: float | None = None) -> Masks:
    """Return the slices by the user's number of training events.

    New users have no training event. Light users have at most `median_count` training events, heavy users have more.

    median_count: the default is the median over the users that have a training event.

    >>> masks = user_slices(np.array([0, 2, 3, 9]), user_T=np.array([0, 1, 2, 2, 3]))
    >>> {name: np.flatnonzero(mask_T).tolist() for name, mask_T in masks.items()}
    {'new users': [0], 'light users': [1, 2, 3], 'heavy users': [4]}
    """
    is_new_U = train_count_U == 0
    median_count = _median_count(train_count_U) if median_count is None else median_count
    is_heavy_T = train_count_U[user_T] > median_count
    return {"new users": is_new_U[user_T], "light users": ~is_new_U[user_T] & ~is_heavy_T, "heavy users": is_heavy_T}


def _median_count(train_count_U: NDArray[Any]) -> float:
    """Return the median number of training events over the users with such events; 0 if no user has one."""
    is_new_U = train_count_U == 0
    return float(np.median(train_count_U[~is_new_U])) if not is_new_U.all() else 0.0


def feature_slices(config: FeatureSlice, features: FeaturesManifest | None, *, owner_T: Int64Array) -> Masks:
    """Return a slice <feature>=<value> for each of the most frequent values of a feature among the targets.

    If a target has several values, it belongs to the slice of each of them.

    Args:
        owner_T: owner of each target's feature value; see `feature_owners`.

    Raises InputError if the feature is not declared, or is standardised.
    """
    feature_values = FeatureValues(config, features)
    feature_values.count(owner_T)
    return feature_values.slices(owner_T)


class FeatureValues:
    """The most frequent values of a feature among the targets. Call `count` with all chunks of targets before `slices`."""

    def __init__(self, config: FeatureSlice, features: FeaturesManifest | None) -> None:
        """Open the feature. Raises InputError like `feature_slices`."""
        self._key = key = config.feature
        if features is None or key not in features.features:
            declared_text = ", ".join(sorted(features.features)) if features is not None else "none"
            raise InputError(
                f"evaluation.slices: {key} is not declared under features (declared: {declared_text}); declare it, or remove "
                "the slice"
            )
        if features.features[key].mean is not None:
            raise InputError(
                f"evaluation.slices: {key} is standardised, so it has no values to slice by; declare it with buckets"
            )
        self._features, self._max_values = features, config.max_values
        self._feature = FeatureStore.open(features).feature_by_key[key]
        self._target_count_R = np.zeros(1, np.int64)

    def count(self, owner_T: Int64Array) -> None:
        """Count the values of a chunk of targets."""
        value_rows, _ = self._feature.rows_and_weights(owner_T)
        count_R = np.bincount(value_rows.values_L, minlength=len(self._target_count_R))
        count_R[: len(self._target_count_R)] += self._target_count_R
        self._target_count_R = count_R

    def slices(self, owner_T: Int64Array) -> Masks:
        """Return the slices of a chunk of targets; see `feature_slices`."""
        value_rows, _ = self._feature.rows_and_weights(owner_T)
        masks: Masks = {}
        for row, slice_name in self._slice_name_by_row.items():
            # A value that is itself named "(other)" shares the slice of the values outside the vocabulary.
            mask_T = masks.setdefault(slice_name, np.zeros(len(owner_T), np.bool_))
            mask_T[value_rows.list_index_L[value_rows.values_L == row]] = True
        return masks

    @cached_property
    def _slice_name_by_row(self) -> dict[int, str]:
        """Names of the slices by row of the value, the most frequent value first."""
        frequent_rows = np.argsort(-self._target_count_R, kind="stable")[: self._max_values]
        rows = frequent_rows[self._target_count_R[frequent_rows] > 0].tolist()
        return {row: f"{self._key}={_value_name(self._features, self._key, row=row)}" for row in rows}


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

    If no target has a value of a feature, there is one empty slice with the name of the feature, so that reports show it.

    Args:
        user_row_U: rows of the users.
        user_T, item_T: for each target, the index of its user in `user_row_U`, and its item row.

    Raises InputError like `feature_slices`.
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
    """Return the owner of the feature for each target, [T].

    The owner is a user row for a feature such as user.country, and an item row for item.brand. For context.device, it is the
    index of the user's first test event with the target.

    Args: see `guarded_slices`.
    """
    side = key.partition(".")[0]
    if side != "context":
        return user_row_U[user_T] if side == "user" else item_T
    targets = store.targets(user_row_U, "test")
    event_index_L = ragged_ranges(store.first_event_index(user_row_U, "test"), targets.lengths)
    distinct_keys, first_indices = np.unique(targets.pair_keys(bound=store.num_items), return_index=True)
    event_index_T: Int64Array = event_index_L[first_indices[np.searchsorted(distinct_keys, user_T * store.num_items + item_T)]]
    return event_index_T


def _value_name(features: FeaturesManifest, key: str, *, row: int) -> str:
    """Return the name of a row of the feature's table: a value, or a bucket of numbers such as [1, 5)."""
    if row == 0:
        return "(other)"
    boundaries = features.features[key].boundaries
    if boundaries is not None:
        bound_texts = ["-inf", *_boundary_texts(boundaries), "inf"]
        return f"[{bound_texts[row - 1]}, {bound_texts[row]})"
    vocabulary_file = f"{key}.vocabulary.parquet"
    if vocabulary_file not in features.files:
        return f"(hash {row})"
    return str(pq.read_table(features.path(vocabulary_file), columns=["value"])["value"][row].as_py())


def _boundary_texts(boundaries: Sequence[float]) -> list[str]:
    """Return the boundaries with six digits, or with all digits if two boundaries have the same first six digits.

    >>> _boundary_texts((0.1, 1 / 3)), _boundary_texts((1_000_000.0, 1_000_001.5))
    (['0.1', '0.333333'], ['1000000', '1000001.5'])
    """
    short_texts = [f"{boundary:g}" for boundary in boundaries]
    if len(set(short_texts)) == len(boundaries):
        return short_texts
    return [str(boundary).removesuffix(".0") for boundary in boundaries]


class _TargetChunk(NamedTuple):
    """The ranked targets of a chunk of users.

    Attributes:
        users: slice of the evaluated users.
        user_row_U: rows of these users.
        user_T, item_T, position_T: for each target, the index of its user in user_row_U, its item row, and its position.
    """

    users: slice
    user_row_U: NDArray[np.int64]
    user_T: NDArray[np.int64]
    item_T: NDArray[np.int64]
    position_T: NDArray[np.int64]

    def positions(self, mask_T: NDArray[np.bool_]) -> TargetPositions:
        """Return the positions of some targets. The numbers of candidates are 0, because no metric of a slice needs them."""
        return TargetPositions.from_pairs(
            user_T=self.user_T[mask_T],
            position_T=self.position_T[mask_T],
            num_candidates_B=np.zeros(len(self.user_row_U), np.int64),
        )

    def owners(self, feature: str, *, store: EventStore) -> NDArray[np.int64]:
        """Return the owner of the feature for each target; see `feature_owners`."""
        return feature_owners(feature, store=store, user_row_U=self.user_row_U, user_T=self.user_T, item_T=self.item_T)


def _target_chunks(columns: Columns) -> Iterator[_TargetChunk]:
    """Yield the targets of the model's ranking in chunks of users."""
    user_row_U, user_T = columns.read("target/user_row"), columns.read("target/user_index")
    item_T, position_T = columns.read("target/item"), columns.read("target/position")
    for users in chunk_slices(len(user_row_U), length=CHUNK_USERS):
        targets = slice(*np.searchsorted(user_T, [users.start, users.stop]).tolist())
        yield _TargetChunk(
            users, *map(np.asarray, (user_row_U[users], user_T[targets] - users.start, item_T[targets], position_T[targets]))
        )


def slice_reports(
    columns: Columns, *, config: EvaluationConfig, store: EventStore, features: FeaturesManifest | None
) -> tuple[SliceReport, ...]:
    """Return the metrics of the slices of items, users and features, from the positions of the model's targets."""
    user_row_U = columns.read("target/user_row")
    group_I, train_count_U = _popularity_group(store.train_count_I), store.train_count_U[user_row_U]
    median_count = _median_count(train_count_U)
    values_of_features = [FeatureValues(slice_config, features) for slice_config in config.slices]
    for chunk in _target_chunks(columns) if values_of_features else ():
        for slice_config, feature_values in zip(config.slices, values_of_features, strict=True):
            feature_values.count(chunk.owners(slice_config.feature, store=store))
    accuracy_by_slice: dict[tuple[int, str], Accuracy] = {}

    def add_chunk(masks: Masks, chunk: _TargetChunk, *, set_index: int) -> None:
        """Add a chunk to its slices. set_index: 0 for slices of items and users, n for the n-th entry of `config.slices`."""
        for slice_name, mask_T in masks.items():
            if (set_index, slice_name) not in accuracy_by_slice:
                prefix = f"slice/{set_index}/{slice_name}"
                accuracy_by_slice[set_index, slice_name] = Accuracy(
                    columns, prefix, config=config, metric_names=("recall", "ndcg")
                )
            accuracy_by_slice[set_index, slice_name].add(chunk.positions(mask_T))

    for chunk in _target_chunks(columns):
        masks = _group_slices(group_I, item_T=chunk.item_T)
        masks |= user_slices(train_count_U[chunk.users], user_T=chunk.user_T, median_count=median_count)
        masks |= {"warm items": ~masks["cold items"], "known users": ~masks["new users"]}
        add_chunk(masks, chunk, set_index=0)
        for set_index, (slice_config, feature_values) in enumerate(
            zip(config.slices, values_of_features, strict=True), start=1
        ):
            add_chunk(feature_values.slices(chunk.owners(slice_config.feature, store=store)), chunk, set_index=set_index)
    min_users_by_set = [
        config.min_slice_users,
        *(slice_config.min_users or config.min_slice_users for slice_config in config.slices),
    ]
    return tuple(
        slice_report(name, accuracy, min_users=min_users_by_set[set_index])
        for (set_index, name), accuracy in sorted(accuracy_by_slice.items(), key=lambda item: item[0][0])
    )
