"""Rankings of the items by popularity: one over all events, and one for each segment.

A segment is all events with one value of a feature.

Shapes: B queries, I items, N items of a ranking, L items of all segments.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.dataset.jagged import Int64Array, JaggedArray
from recsys_core.errors import StageError
from recsys_core.retrieval.top_items import Candidates, TopItems
from recsys_core.serving.given_features import GivenFeature

NO_SEGMENT = -1


@dataclass(frozen=True)
class Segments:
    """The content of popularity_by.parquet; see segment_counts.py.

    Attributes:
        key: name of the feature, user.<name> or context.<name>.
        value_rows: ascending vocabulary rows of the values of the segments.
        item_rows: item rows of each segment, best first.
        share_L: share of each of these items in the events of the segment.
    """

    key: str
    value_rows: Int64Array
    item_rows: JaggedArray
    share_L: NDArray[np.float32]

    @classmethod
    def read(cls, path: Path, *, key: str, num_items: int) -> Self:
        """Read popularity_by.parquet. Raises StageError if it has items that the model does not have."""
        table = pq.read_table(path)
        item_lists, share_lists = (table[name].combine_chunks() for name in ("item_rows", "shares"))
        item_rows = JaggedArray.from_lengths(np.diff(item_lists.offsets.to_numpy()), item_lists.flatten().to_numpy())
        share_L = share_lists.flatten().to_numpy()
        if len(share_L) != len(item_rows.values_L) or not ((item_rows.values_L >= 0) & (item_rows.values_L < num_items)).all():
            raise StageError(
                f"{path} has {len(item_rows.values_L)} items and {len(share_L)} shares, and its item rows must be from 0 to "
                f"{num_items - 1}; package the model again"
            )
        return cls(key, table["value_row"].to_numpy().astype(np.int64), item_rows, share_L)

    def segments_of(self, given_features: Mapping[str, GivenFeature], *, num_queries: int) -> Int64Array:
        """Return the segment of each query; NO_SEGMENT if the query does not have the feature, or its value has no segment."""
        segment_B = np.full(num_queries, NO_SEGMENT)
        if (feature := given_features.get(self.key)) is None or not len(self.value_rows):
            return segment_B
        given_value_rows = feature.rows.values_L  # one per query that has the feature
        segments = np.minimum(np.searchsorted(self.value_rows, given_value_rows), len(self.value_rows) - 1)
        segment_B[feature.is_given_B] = np.where(self.value_rows[segments] == given_value_rows, segments, NO_SEGMENT)
        return segment_B


@dataclass(frozen=True)
class Popularity:
    """Rankings of the items by popularity: one over all events, and one for each segment.

    Attributes:
        item_row_I: item rows by falling number of events.
        share_I: share of each of these items in all events.
        segments: None if the only ranking is over all events.
    """

    item_row_I: NDArray[np.int32]
    share_I: NDArray[np.float32]
    segments: Segments | None = None

    @property
    def segment_key(self) -> str | None:
        """Name of the feature whose values have rankings of their own."""
        return None if self.segments is None else self.segments.key

    def segments_of(self, given_features: Mapping[str, GivenFeature], *, num_queries: int) -> Int64Array:
        """Return the segment of each query, or NO_SEGMENT."""
        if self.segments is None:
            return np.full(num_queries, NO_SEGMENT)
        return self.segments.segments_of(given_features, num_queries=num_queries)

    def fill(self, top_items: TopItems, query_indices: Int64Array, candidates: Candidates, *, segment_B: Int64Array) -> None:
        """Fill the top items of the queries at `query_indices`. segment_B: segment of each query of the batch."""
        for segment in np.unique(segment_B[query_indices]).tolist():
            segment_query_indices = query_indices[segment_B[query_indices] == segment]
            depth = min(int(top_items.depth_B[segment_query_indices].max()), max(1, candidates.num_items))
            row_N, share_N = self._best_items(segment, candidates.is_allowed_I, depth=depth)
            shape = (len(segment_query_indices), len(row_N))
            top_items.fill(
                segment_query_indices, np.broadcast_to(row_N.astype(np.int64), shape), np.broadcast_to(share_N, shape)
            )

    def _best_items(
        self, segment: int, is_allowed_I: NDArray[np.bool_] | None, *, depth: int
    ) -> tuple[NDArray[np.integer], NDArray[np.float32]]:
        """Return the best `depth` allowed items of a segment and their shares.

        If the segment has fewer items, the most popular items of all users follow, with the share 0.
        """
        row_I, share_I = _allowed_items(self.item_row_I, self.share_I, is_allowed_I)
        if segment == NO_SEGMENT or self.segments is None:
            return row_I[:depth], share_I[:depth]
        item_rows = self.segments.item_rows
        segment_slice = slice(int(item_rows.offset[segment]), int(item_rows.offset[segment + 1]))
        row_N, share_N = _allowed_items(item_rows.values_L[segment_slice], self.segments.share_L[segment_slice], is_allowed_I)
        global_rows = row_I[: depth + len(row_N)]
        global_rows = global_rows[~np.isin(global_rows, row_N)]
        row_N, share_N = np.concatenate([row_N, global_rows]), np.concatenate([share_N, np.zeros(len(global_rows), np.float32)])
        return row_N[:depth], share_N[:depth]


def _allowed_items(
    row_N: NDArray[np.integer], share_N: NDArray[np.float32], is_allowed_I: NDArray[np.bool_] | None
) -> tuple[NDArray[np.integer], NDArray[np.float32]]:
    if is_allowed_I is None:
        return row_N, share_N
    is_allowed_N = is_allowed_I[row_N]
    return row_N[is_allowed_N], share_N[is_allowed_N]
