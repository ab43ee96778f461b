"""Users and items by popularity, the number of their events."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.dataset.events import EvaluationSplit, EventStore
from recsys_core.dataset.jagged import Int64Array
from recsys_core.dataset.layout import vocabulary_file
from recsys_core.manifests import InteractionsManifest


def popularity_order(count_I: NDArray[Any], *, item_ids: pa.Array) -> NDArray[np.int32]:
    """Return item rows by falling count, int32 [I]. Equal counts are ordered by id: integers by value, strings by code point.

    >>> popularity_order(np.array([2, 5, 2]), item_ids=pa.array([30, 10, 20])).tolist()
    [1, 2, 0]
    """
    rows_in_id_order: NDArray[np.int64] = pc.sort_indices(item_ids).to_numpy().astype(np.int64)
    return rows_in_id_order[rows_by_falling_count(count_I[rows_in_id_order])].astype(np.int32)


def popularity_before(split: EvaluationSplit, *, store: EventStore, interactions: InteractionsManifest) -> NDArray[np.int32]:
    """Return item rows by falling number of events before `split`, int32 [I]. Unknown users get this order."""
    item_ids = pq.read_table(interactions.path(vocabulary_file("item")), columns=["id"])["id"].combine_chunks()
    return popularity_order(store.item_counts_before(split), item_ids=item_ids)


def popularity_ranks(count_R: NDArray[Any]) -> Int64Array:
    """Return the popularity rank of each row, [R]. Rank 0 has the highest count; rows with equal counts are ranked in order.

    >>> popularity_ranks(np.array([2, 5, 2])).tolist()
    [1, 0, 2]
    """
    rank_R = np.empty(len(count_R), np.int64)
    rank_R[rows_by_falling_count(count_R)] = np.arange(len(count_R))
    return rank_R


def rows_by_falling_count(count_R: NDArray[Any]) -> Int64Array:
    """Return the rows by falling count; rows with equal counts stay in order."""
    return np.argsort(-count_R, kind="stable")
