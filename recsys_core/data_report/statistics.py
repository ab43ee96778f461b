"""One night's log in numbers: sizes, shares, how events are spread over users and items.

Shapes: I items, U users.
"""

import math

import numpy as np
from numpy.typing import NDArray

from recsys_core.data_report.leaks import SplitFacts
from recsys_core.manifests import InteractionsManifest

HEAD_SHARE = 0.01
"""The head: this share of the items that have training events, the most frequent ones."""
_CURVE_POINTS = 60
_BOUNDS = ("user_offset", "train_end", "validation_end")

Ints = NDArray[np.int64]


def sizes(interactions: InteractionsManifest, facts: SplitFacts) -> dict[str, float]:
    """Counts, the span in days, and how long histories are."""
    offset = np.load(interactions.path("user_offset.npy"), mmap_mode="r")
    length_U = train_lengths(interactions)
    trained_U = length_U[length_U > 0]
    span = (max(facts.days) - min(facts.days) + 1) if facts.days else math.nan
    return {
        "train_events": float(interactions.train_events),
        "validation_events": float(interactions.validation_events),
        "test_events": float(interactions.test_events),
        "users": float(np.sum(np.diff(offset) > 0)),
        "items": float(np.sum(facts.events_I > 0)),
        "items_in_catalogue": float(interactions.items),
        "days": float(span),
        "empty_day_share": 1 - len(facts.days) / span,
        "history_median": float(np.median(trained_U)),
        "history_p95": float(np.percentile(trained_U, 95)),
        "history_longest": float(trained_U.max()),
        "files_without_checksums": float(_without_checksums(interactions)),
    }


def _without_checksums(interactions: InteractionsManifest) -> int:
    """Files of the log whose pages have no checksum, so that a flipped bit in them cannot be noticed."""
    with_some = {file.source for part in interactions.parts for file in part.files if file.checksums}
    return sum(source not in with_some for source in interactions.sources)


def shares(interactions: InteractionsManifest, facts: SplitFacts, count_I: Ints) -> dict[str, float]:
    """Shares and indexes; nan for what cannot be told from this log. count_I: training events by item row."""
    train, test = interactions.train_events, interactions.test_events
    held_out = interactions.validation_events + test
    timed = "event_time.npy" in interactions.files
    vector_I = np.load(interactions.path("vector_row.npy"), mmap_mode="r") >= 0
    rows = sum(source.rows for source in interactions.sources)
    falling = np.sort(count_I[count_I > 0])[::-1]
    head = max(1, math.ceil(HEAD_SHARE * len(falling)))
    unseen_I = count_I == 0
    start, train_end, validation_end = (np.load(interactions.path(f"{name}.npy"), mmap_mode="r") for name in _BOUNDS)
    tested_U = start[1:] > validation_end
    # Only times tell whether an event is the same one again, and what came before what.
    misplaced = float(facts.misplaced + (facts.unordered if interactions.ordered else 0))
    return {
        "item_vector_share": _ratio(float(vector_I.sum()), float(np.sum(vector_I | (facts.events_I > 0)))),
        "train_event_vector_share": _ratio(float(count_I[vector_I].sum()), train),
        "gini": gini(falling),
        "head_share": _ratio(float(falling[:head].sum()), train),
        "null_share": max((_ratio(column.nulls, rows) for column in interactions.columns.values()), default=math.nan),
        "duplicate_share": _ratio(facts.duplicates, train + held_out) if timed else math.nan,
        "repeated_train_pair_share": _ratio(facts.repeated_train_pairs, train),
        "repeated_pair_share": _ratio(facts.repeated_test_pairs, test),
        "unseen_item_share": _ratio(float(facts.test_events_I[unseen_I].sum()), test),
        "unseen_user_share": _ratio(float(np.sum(tested_U & (train_end == start[:-1]))), float(tested_U.sum())),
        "leaked_event_share": _ratio(facts.leaked, held_out) if timed else math.nan,
        "future_event_share": _ratio(facts.future, train) if timed else math.nan,
        "split_violations": misplaced if timed or interactions.ordered else math.nan,
    }


def gini(count_I: Ints) -> float:
    """How unevenly events are spread over items: 0 for equal counts, near 1 when one item has all.

    >>> gini(np.array([2, 2, 2, 2])), gini(np.array([0, 0, 0, 8]))
    (0.0, 0.75)
    """
    rising_I = np.sort(count_I)
    n = len(rising_I)
    if n == 0 or rising_I[-1] == 0:
        return 0.0
    return float(2 * np.dot(np.arange(1, n + 1, dtype=np.float64), rising_I) / (n * rising_I.sum()) - (n + 1) / n)


def history_classes(length_U: Ints) -> tuple[tuple[str, int], ...]:
    """Users by number of training events, in classes that double.

    >>> history_classes(np.array([0, 1, 2, 3, 4, 4, 9]))
    (('0', 1), ('1', 1), ('2-3', 2), ('4-7', 2), ('8-15', 1))
    """
    class_U = np.frexp(np.asarray(length_U, np.float64))[1]  # 0 -> 0, 1 -> 1, 2 and 3 -> 2, 4 to 7 -> 3
    names = [str(low) if low == high else f"{low:,}-{high:,}" for low, high in ((2**n // 2, 2**n - 1) for n in range(64))]
    return tuple((names[number], count) for number, count in enumerate(np.bincount(class_U).tolist()))


def train_lengths(interactions: InteractionsManifest) -> Ints:
    """[users]: training events of each."""
    start, end = (np.load(interactions.path(f"{name}.npy"), mmap_mode="r") for name in ("user_offset", "train_end"))
    length_U: Ints = end - start[:-1]
    return length_U


def popularity_curve(count_I: Ints) -> tuple[tuple[int, float], ...]:
    """Rank (from 1) and share, evenly spread over the logarithm of the rank."""
    falling = np.sort(count_I[count_I > 0])[::-1]
    if not len(falling):
        return ()
    ranks = np.unique(np.geomspace(1, len(falling), _CURVE_POINTS).round().astype(np.int64))
    return tuple(zip(ranks.tolist(), (falling[ranks - 1] / falling.sum()).tolist(), strict=True))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
