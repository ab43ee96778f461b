"""Statistics of one run's log: sizes, shares, and the distribution of events over users and items.

Shapes: I items, U users.
"""

import math

import numpy as np
from numpy.typing import NDArray

from recsys_core.data_report.leaks import SplitCounts
from recsys_core.dataset.events import EventStore
from recsys_core.manifests import InteractionsManifest

HEAD_SHARE = 0.01
"""Share of the items with training events that form the head: the most popular items."""
_NUM_CURVE_POINTS = 60

Ints = NDArray[np.int64]


def size_metrics(interactions: InteractionsManifest, split_counts: SplitCounts, *, num_events_I: Ints) -> dict[str, float]:
    """Return the numbers of events, users, items and days, and the median, 95th percentile and maximum of history lengths.

    num_events_I: number of events of each item, in all parts.
    """
    store = EventStore.open(interactions)
    train_count_U = store.train_count_U
    history_lengths = train_count_U[train_count_U > 0]
    days = split_counts.days
    num_days = days[-1] - days[0] + 1 if days else math.nan
    return {
        "train_events": float(interactions.num_train_events),
        "validation_events": float(interactions.num_validation_events),
        "test_events": float(interactions.num_test_events),
        "users": float(np.sum(store.event_count_U > 0)),
        "validation_users": float(len(store.users_with_targets("validation"))),
        "test_users": float(len(store.users_with_targets("test"))),
        "items": float(np.sum(num_events_I > 0)),
        "items_in_catalogue": float(interactions.num_items),
        "days": float(num_days),
        "empty_day_share": 1 - len(days) / num_days,
        "history_median": float(np.median(history_lengths)),
        "history_p95": float(np.percentile(history_lengths, 95)),
        "history_longest": float(history_lengths.max()),
        "files_without_checksums": float(_num_files_without_checksums(interactions)),
    }


def share_metrics(interactions: InteractionsManifest, split_counts: SplitCounts, *, num_events_I: Ints) -> dict[str, float]:
    """Return the shares, the Gini coefficient and the number of split violations. A metric that cannot be measured is NaN.

    num_events_I: number of events of each item, in all parts.
    """
    store = EventStore.open(interactions)
    train_count_I = store.train_count_I
    num_train_events, num_test_events = interactions.num_train_events, interactions.num_test_events
    num_held_out_events = interactions.num_validation_events + num_test_events
    num_rows = sum(source.num_rows for source in interactions.sources)
    item_vector_row_I = store.vector_rows("item")
    assert item_vector_row_I is not None  # every ingest writes the vector rows of the items
    has_vector_I = item_vector_row_I >= 0
    descending_train_count_I = np.sort(train_count_I[train_count_I > 0])[::-1]
    num_head_items = max(1, math.ceil(HEAD_SHARE * len(descending_train_count_I)))
    test_users = store.users_with_targets("test")
    # Duplicates and leaks are events with the same user, item and time, so they cannot be measured without timestamps.
    has_times = store.has_times
    num_split_violations = float(
        split_counts.num_misplaced_events + (split_counts.num_unordered_events if interactions.is_ordered else 0)
    )
    null_shares = [
        _ratio(column.num_nulls, num_rows if column.num_checked_values is None else column.num_checked_values)
        for column in interactions.columns.values()
    ]
    return {
        "item_vector_share": _ratio(float(has_vector_I.sum()), float(np.sum(has_vector_I | (num_events_I > 0)))),
        "train_event_vector_share": _ratio(float(train_count_I[has_vector_I].sum()), num_train_events),
        "gini": gini(descending_train_count_I),
        "head_share": _ratio(float(descending_train_count_I[:num_head_items].sum()), num_train_events),
        "null_share": max(null_shares, default=math.nan),
        "duplicate_share": _ratio(split_counts.num_duplicates, num_train_events + num_held_out_events)
        if has_times
        else math.nan,
        "repeated_train_pair_share": _ratio(split_counts.num_repeated_train_pairs, num_train_events),
        "repeated_pair_share": _ratio(split_counts.num_repeated_test_pairs, num_test_events),
        "unseen_item_share": _ratio(split_counts.num_unseen_item_events, num_test_events),
        "unseen_user_share": _ratio(float(np.sum(store.train_count_U[test_users] == 0)), float(len(test_users))),
        "leaked_event_share": _ratio(split_counts.num_leaked_events, num_held_out_events) if has_times else math.nan,
        "future_event_share": _ratio(split_counts.num_future_events, num_train_events) if has_times else math.nan,
        "split_violations": num_split_violations if has_times or interactions.is_ordered else math.nan,
    }


def gini(count_I: Ints) -> float:
    """Return the Gini coefficient of the counts: 0 for equal counts, near 1 if one of many items has all events.

    >>> gini(np.array([2, 2, 2, 2])), gini(np.array([0, 0, 0, 8]))
    (0.0, 0.75)
    """
    ascending_count_I = np.sort(count_I)
    num_items = len(ascending_count_I)
    if num_items == 0 or ascending_count_I[-1] == 0:
        return 0.0
    ordinal_I = np.arange(1, num_items + 1, dtype=np.float64)
    weighted_sum = np.dot(ordinal_I, ascending_count_I)
    return float(2 * weighted_sum / (num_items * ascending_count_I.sum()) - (num_items + 1) / num_items)


def history_histogram(length_U: Ints) -> tuple[tuple[str, int], ...]:
    """Return (range of the number of training events, number of users) for the range 0 and ranges that start at powers of two.

    >>> history_histogram(np.array([0, 1, 2, 3, 4, 4, 9]))
    (('0', 1), ('1', 1), ('2-3', 2), ('4-7', 2), ('8-15', 1))
    """
    range_index_U = np.frexp(np.asarray(length_U, np.float64))[1]  # 0 -> 0, 1 -> 1, 2 and 3 -> 2, 4 to 7 -> 3
    range_names = [str(low) if low == high else f"{low:,}-{high:,}" for low, high in ((2**n // 2, 2**n - 1) for n in range(64))]
    return tuple(
        (range_names[range_index], num_users) for range_index, num_users in enumerate(np.bincount(range_index_U).tolist())
    )


def popularity_curve(count_I: Ints) -> tuple[tuple[int, float], ...]:
    """Return (popularity rank from 1, share of the events) for ranks that are evenly spaced on a logarithmic scale."""
    descending_count_I = np.sort(count_I[count_I > 0])[::-1]
    if not len(descending_count_I):
        return ()
    popularity_ranks = np.unique(np.geomspace(1, len(descending_count_I), _NUM_CURVE_POINTS).round().astype(np.int64))
    shares = descending_count_I[popularity_ranks - 1] / descending_count_I.sum()
    return tuple(zip(popularity_ranks.tolist(), shares.tolist(), strict=True))


def _num_files_without_checksums(interactions: InteractionsManifest) -> int:
    """Return the number of input files without page checksums, in which a flipped bit cannot be detected."""
    files_with_checksums = {file.source for part in interactions.parts for file in part.files if file.has_checksums}
    return sum(source not in files_with_checksums for source in interactions.sources)


def _ratio(numerator: float, denominator: float) -> float:
    """Return numerator / denominator; NaN if `denominator` is 0."""
    return numerator / denominator if denominator else math.nan
