"""popularity_by.parquet: the most popular items for each value of a user or context feature.

A *segment* is all events with one value of the feature, if there are enough. The file has one row per segment:

- value_row: int32, row of the value in the vocabulary of the feature.
- item_rows: list of int32, at most MAX_SEGMENT_ITEMS item rows by falling number of events.
- shares: list of float32, the share of each of these items in the events of the segment.

Shapes: U users, E events, I items, L pairs of segment and item.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.jagged import Int64Array, ragged_ranges
from recsys_core.dataset.layout import memory_map
from recsys_core.errors import InputError
from recsys_core.manifests import SPLITS, FeaturesManifest, InteractionsManifest

MAX_SEGMENT_ITEMS = 1_000
"""An answer with more items continues with the most popular items of all users."""
_MAX_CHUNK_EVENTS = 1 << 23


def write_segments(
    path: Path,
    key: str,
    *,
    interactions: InteractionsManifest,
    features: FeaturesManifest | None,
    item_by_popularity_I: NDArray[np.int32],
    min_events: int,
) -> None:
    """Write popularity_by.parquet from the events before the test split.

    Args:
        key: feature user.<name> or context.<name>.
        item_by_popularity_I: item rows by falling popularity; items with equal counts in a segment are in this order.
        min_events: smallest number of events of a segment.

    Raises:
        InputError: the feature is not a categorical feature of users or context with a vocabulary.
    """
    feature = None if features is None or key.startswith("item.") else features.features.get(key)
    if features is None or feature is None or feature.kind != "categorical" or feature.hash_rows is not None:
        raise InputError(
            f"package.popularity_by: {key} is not a categorical user or context feature with a vocabulary; declare it under "
            "features, or remove popularity_by"
        )
    value_row_L, item_row_L, count_L = _pair_counts(key, interactions, features)
    popularity_rank_I = np.empty(len(item_by_popularity_I), np.int64)
    popularity_rank_I[item_by_popularity_I] = np.arange(len(popularity_rank_I))
    order_L = np.lexsort((popularity_rank_I[item_row_L], -count_L, value_row_L))
    value_row_L, item_row_L, count_L = value_row_L[order_L], item_row_L[order_L], count_L[order_L]
    distinct_value_rows, pair_start, num_pairs = np.unique(value_row_L, return_index=True, return_counts=True)
    num_events = np.add.reduceat(count_L, pair_start) if len(pair_start) else count_L
    # All values that have no row of their own share row 0, so row 0 is not a segment.
    is_segment = (num_events >= min_events) & (distinct_value_rows > 0)
    num_segment_items = np.minimum(num_pairs[is_segment], MAX_SEGMENT_ITEMS)
    pair_index_L = ragged_ranges(pair_start[is_segment], num_segment_items)
    share_L = (count_L[pair_index_L] / np.repeat(num_events[is_segment], num_segment_items)).astype(np.float32)
    offset = pa.array(np.concatenate([[0], np.cumsum(num_segment_items)]).astype(np.int32))
    columns = {
        "value_row": distinct_value_rows[is_segment].astype(np.int32),
        "item_rows": pa.ListArray.from_arrays(offset, pa.array(item_row_L[pair_index_L].astype(np.int32))),
        "shares": pa.ListArray.from_arrays(offset, pa.array(share_L)),
    }
    pq.write_table(pa.table(columns), path)


def replace_items_of_segments(source_path: Path, target_path: Path, new_row_I: NDArray[np.int32]) -> None:
    """Copy popularity_by.parquet and replace its item rows. new_row_I: new row of each item; -1 for an item that is removed."""
    table = pq.read_table(source_path)
    item_rows, shares = (table[name].combine_chunks() for name in ("item_rows", "shares"))
    row_L = new_row_I[item_rows.flatten().to_numpy()]
    new_offset_by_old = np.concatenate([[0], np.cumsum(row_L >= 0)]).astype(np.int32)
    offset = pa.array(new_offset_by_old[item_rows.offsets.to_numpy()])
    columns = {
        "value_row": table["value_row"],
        "item_rows": pa.ListArray.from_arrays(offset, pa.array(row_L[row_L >= 0])),
        "shares": pa.ListArray.from_arrays(offset, pa.array(shares.flatten().to_numpy()[row_L >= 0])),
    }
    pq.write_table(pa.table(columns), target_path)


def _pair_counts(
    key: str, interactions: InteractionsManifest, features: FeaturesManifest
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the value row, the item row and the number of events of each pair of value and item that has events."""
    pair_codes, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for value_row_E, item_row_E in _event_rows(key, interactions, features):
        chunk_codes, chunk_counts = np.unique(value_row_E * interactions.num_items + item_row_E, return_counts=True)
        pair_codes, pair_index = np.unique(np.concatenate([pair_codes, chunk_codes]), return_inverse=True)
        counts = np.bincount(pair_index, weights=np.concatenate([counts, chunk_counts])).astype(np.int64)
    return pair_codes // interactions.num_items, pair_codes % interactions.num_items, counts


def _event_rows(
    key: str, interactions: InteractionsManifest, features: FeaturesManifest
) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Yield the value rows and the item rows of the events before the test split, in chunks of users."""
    value_rows = memory_map(features.path(f"{key}.row.npy"))
    for chunk in EventStore.open(interactions).user_chunks(max_events=_MAX_CHUNK_EVENTS):
        is_before_test_E = chunk.split_E < SPLITS.index("test")
        value_row_E = value_rows[chunk.events] if key.startswith("context.") else value_rows[chunk.user_row_U][chunk.user_E]
        yield value_row_E[is_before_test_E].astype(np.int64), chunk.item_E[is_before_test_E]
