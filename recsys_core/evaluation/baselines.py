"""Rankings without a model: popularity, recent popularity, and nearest neighbours of the pretrained vectors (zero-shot).

Shapes: B queries, E events of a chunk, I items, N items of a block, R pretrained vectors, D width of a vector, L items of all
histories. The vectors of ZeroShot are one number wider than the pretrained vectors.
"""

from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize

from recsys_core.dataset.events import EVENTS_PER_CHUNK, EvaluationSplit, EventStore
from recsys_core.dataset.jagged import Int64Array, JaggedArray, chunk_slices
from recsys_core.dataset.layout import rows_by_falling_count, vocabulary_file
from recsys_core.manifests import SPLITS, InteractionsManifest
from recsys_core.units import DAY_US

NO_VECTOR_SCORE = -4.0
"""Zero-shot score of an item without a vector. It is below -1, the lowest cosine."""
HISTORIES_PER_CHUNK = 1_024
"""Number of histories whose pretrained vectors are in memory at once."""


def popularity_order(count_I: NDArray[Any], *, item_ids: pa.Array) -> NDArray[np.int32]:
    """Return item rows by falling count, int32 [I]. Equal counts are ordered by id: integers by value, strings by code point.

    >>> popularity_order(np.array([2, 5, 2]), item_ids=pa.array([30, 10, 20])).tolist()
    [1, 2, 0]
    """
    rows_in_id_order: NDArray[np.int64] = pc.sort_indices(item_ids).to_numpy().astype(np.int64)
    return rows_in_id_order[rows_by_falling_count(count_I[rows_in_id_order])].astype(np.int32)


def popularity_order_before(
    split: EvaluationSplit, *, store: EventStore, interactions: InteractionsManifest
) -> NDArray[np.int32]:
    """Return item rows by falling number of events before `split`, int32 [I]. This order is the ranking for unknown users."""
    item_ids = pq.read_table(interactions.path(vocabulary_file("item")), columns=["id"])["id"].combine_chunks()
    return popularity_order(store.item_counts_before(split), item_ids=item_ids)


def recent_popularity_order(
    split: EvaluationSplit, *, store: EventStore, days: float, popularity_order_I: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Return item rows by falling number of events in the last `days` before `split`, int32 [I].

    The period ends at the newest event before `split`. Items with equal numbers keep the order of `popularity_order_I`.
    """
    newest_time_us, count_I = 0, np.zeros(store.num_items, np.int64)
    for time_E, _ in _events_before(split, store=store):
        newest_time_us = max(newest_time_us, int(time_E.max(initial=0)))
    for time_E, item_E in _events_before(split, store=store):
        count_I += np.bincount(item_E[time_E > newest_time_us - days * DAY_US], minlength=store.num_items)
    return popularity_order_I[rows_by_falling_count(count_I[popularity_order_I])]


def _events_before(split: EvaluationSplit, *, store: EventStore) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Yield the times and items of the events before `split`, in chunks. The log must have timestamps."""
    for chunk in store.user_chunks(max_events=max(store.num_items, EVENTS_PER_CHUNK)):
        assert chunk.time_E is not None
        is_before_E = chunk.split_E < SPLITS.index(split)
        yield chunk.time_E[is_before_E], chunk.item_E[is_before_E]


def cold_rows(store: EventStore, split: EvaluationSplit) -> NDArray[np.int64]:
    """Return the rows of the items without an event before `split`, ascending."""
    return np.flatnonzero(store.item_counts_before(split) == 0)


class ZeroShot:
    """The zero-shot model. The score is the cosine between an item and the mean of the normalised vectors of a history.

    The inner product of a query vector and an item vector is the score. Both have one more number than a pretrained vector: 1
    in a query vector, and 0 in an item vector. An item without a pretrained vector has NO_VECTOR_SCORE instead of 0, so that
    it is ranked below all other items.

    The pretrained vectors can be memory-mapped: only the rows that a method needs are read.

    Attributes:
        dim: width of a query vector and of an item vector.
    """

    def __init__(self, vectors_RD: NDArray[np.float32], *, vector_row_I: NDArray[Any]) -> None:
        """Keep references to the arrays.

        Args:
            vectors_RD: pretrained vectors.
            vector_row_I: row of each item in vectors_RD; -1 for an item without a vector.
        """
        self._vectors_RD, self._vector_row_I = vectors_RD, vector_row_I
        self.dim = vectors_RD.shape[1] + 1

    @classmethod
    def of(cls, store: EventStore, vectors_RD: NDArray[np.float32]) -> Self:
        """Return the model for the items of a log."""
        vector_row_I = store.vector_rows("item")
        assert vector_row_I is not None  # the ingest requires that items have vectors
        return cls(vectors_RD, vector_row_I=vector_row_I)

    def item_vectors(self, item_rows: slice) -> Tensor:
        """Return the item vectors of a range of items, [N, D]."""
        vector_row_N = np.asarray(self._vector_row_I[item_rows])
        has_vector_N = torch.from_numpy(vector_row_N >= 0)
        item_ND = torch.zeros((len(vector_row_N), self.dim))
        item_ND[has_vector_N, :-1] = self._unit_vectors(vector_row_N[vector_row_N >= 0])
        item_ND[:, -1] = torch.where(has_vector_N, 0.0, NO_VECTOR_SCORE)
        return item_ND

    def query_vectors(self, histories: JaggedArray) -> Tensor:
        """Return the query vectors of these histories of item rows, [B, D].

        If no item of a history has a vector, every item with a vector has the score 0.
        """
        query_BD = torch.ones((len(histories), self.dim))
        for chunk in chunk_slices(len(histories), length=HISTORIES_PER_CHUNK):
            chunk_histories = histories.slice(chunk.start, chunk.stop)
            vector_rows = JaggedArray.from_lengths(chunk_histories.lengths, self._vector_row_I[chunk_histories.values_L])
            vector_rows = vector_rows.filter(vector_rows.values_L >= 0)
            mean_BD = embedding_bag(
                torch.arange(len(vector_rows.values_L)),
                self._unit_vectors(vector_rows.values_L),
                torch.from_numpy(vector_rows.offset),
                mode="mean",
                include_last_offset=True,
            )
            query_BD[chunk, :-1] = normalize(mean_BD, dim=1)
        return query_BD

    def _unit_vectors(self, vector_rows: NDArray[Any]) -> Tensor:
        """Return the normalised pretrained vectors of these rows."""
        return normalize(torch.from_numpy(self._vectors_RD[vector_rows].astype(np.float32)), dim=1)
