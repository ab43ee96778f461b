"""The Retriever, which recommends items for user ids from a model package.

Shapes: B queries, I items, D width, N candidates fetched from the index, K recommended items.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import InputError
from recsys_core.manifests import PackageManifest, require_manifest
from recsys_core.retrieval.search import search, search_exhaustively
from recsys_core.serving.contents import PackageContents, read_package
from recsys_core.serving.ids import Id
from recsys_core.serving.package import description_sha256

MAX_BATCH_RESULTS = 1 << 20
"""Largest number of recommended items (B * K) per batch; a larger request is split."""
MAX_BATCH_QUERIES = 1024

History = Sequence[Id] | None
"""Item ids in time order; None for the history that is stored in the package."""


class Retriever:
    """A loaded model package. It has no mutable state, so threads may share it.

    Attributes:
        item_ids, user_ids: maps between ids and table rows.
    """

    def __init__(self, contents: PackageContents) -> None:
        self.package = contents.package
        self._query_tower, self._features = contents.tower, contents.features
        self._index = contents.index
        self.item_ids, self.user_ids = contents.item_ids, contents.user_ids
        self._user_offset, self._event_item = contents.user_offset, contents.event_item
        self._item_by_popularity_I = contents.item_by_popularity_I
        self._popularity_share_I = contents.popularity_share_I

    @classmethod
    def load(cls, folder: Path, *, sha256: str | None = None) -> Self:
        """Load a model package.

        Args:
            folder: folder of the package. Without sha256: folder of a `package` stage, whose manifest has the checksum.
            sha256: expected checksum of package.json.

        Raises:
            StageError: a file is missing or was changed.
        """
        if sha256 is None:
            sha256 = description_sha256(require_manifest(folder, PackageManifest))
            folder = folder / "package"
        return cls(read_package(folder, sha256=sha256))

    def recommend(
        self,
        user_ids: Sequence[Id],
        k: int,
        *,
        histories: Sequence[History] | None = None,
        exclude_stored_history: bool = True,
    ) -> tuple[list[NDArray[Any]], list[NDArray[np.float32]]]:
        """Recommend the k best unseen items for each user, best first; fewer if the user has seen nearly all items.

        The score of an item is the inner product of query and item vector. Users that the model does not know (see
        ModelSpec.is_known) get the most popular items; the score is then the item's share of all events.

        Args:
            user_ids: may contain ids that the model does not have.
            k: number of items.
            histories: one per user. A history replaces the user's stored history; None keeps the stored history. Unknown item
                ids are ignored.
            exclude_stored_history: whether the items of a stored history stay excluded when `histories` replaces it. With
                False, the model can be measured on events that are in the stored histories. A stored history that is not
                replaced is always excluded.

        Returns:
            (item ids, scores), one array per user.

        Raises:
            InputError: k is below 1, an id is invalid, or histories and user_ids have different lengths.
        """
        if k < 1:
            raise InputError(f"k is {k}; it must be at least 1")
        if histories is not None and len(histories) != len(user_ids):
            raise InputError(f"{len(histories)} histories for {len(user_ids)} users; pass one history per user, or none")
        k = min(k, len(self.item_ids))
        batch_size = min(MAX_BATCH_QUERIES, max(1, MAX_BATCH_RESULTS // k))
        user_rows = self.user_ids.rows(user_ids)
        item_ids: list[NDArray[Any]] = []
        scores: list[NDArray[np.float32]] = []
        for batch_start in range(0, len(user_rows), batch_size):
            batch_slice = slice(batch_start, batch_start + batch_size)
            history, excluded_items = self._histories(
                user_rows[batch_slice],
                new_histories=histories and histories[batch_slice],
                exclude_stored_history=exclude_stored_history,
            )
            top_items = self._top_items(user_rows[batch_slice], history=history, excluded_items=excluded_items, k=k)
            for row_K, score_K, num_items in zip(top_items.row_BK, top_items.score_BK, top_items.num_items_B, strict=True):
                item_ids.append(self.item_ids.ids(row_K[:num_items]))
                scores.append(score_K[:num_items])
        return item_ids, scores

    def encode(self, user_row_B: NDArray[np.int64], history: JaggedArray) -> NDArray[np.float32]:
        """Return the query vectors of users with these histories, [B, D].

        Args:
            user_row_B: rows of the users; -1 for an unknown user.
            history: item rows of each user, oldest first.
        """
        query_BD: NDArray[np.float32] = self._query_tower(user_row_B, history, features=self._features).numpy()
        return query_BD

    def is_known(self, user_ids: Sequence[Id]) -> NDArray[np.bool_]:
        """Return whether each user has a row; it may have one without an event. Raises InputError for an invalid id."""
        is_known_B: NDArray[np.bool_] = self.user_ids.rows(user_ids) >= 0
        return is_known_B

    def _histories(
        self, user_row_B: NDArray[np.int64], *, new_histories: Sequence[History] | None, exclude_stored_history: bool
    ) -> tuple[JaggedArray, JaggedArray]:
        """Return the histories for the query tower, and the items to exclude, both as item rows."""
        start_B = np.where(user_row_B >= 0, self._user_offset[user_row_B], 0)
        end_B = np.where(user_row_B >= 0, self._user_offset[user_row_B + 1], 0)
        stored_history = JaggedArray.from_slices(self._event_item, start=start_B, end=end_B)
        num_items = len(self.item_ids)
        if new_histories is None:
            return stored_history, stored_history.distinct(bound=num_items)
        length_B = np.array([0 if history is None else len(history) for history in new_histories], np.int64)
        new_item_rows = self.item_ids.rows([item_id for history in new_histories if history is not None for item_id in history])
        new_history = JaggedArray.from_lengths(length_B, new_item_rows).filter(new_item_rows >= 0)
        is_replaced_B = np.array([history is not None for history in new_histories])
        history = stored_history.replace(new_history, where=is_replaced_B)
        if exclude_stored_history:
            return history, stored_history.union(new_history, bound=num_items)
        return history, history.distinct(bound=num_items)

    def _top_items(
        self, user_row_B: NDArray[np.int64], *, history: JaggedArray, excluded_items: JaggedArray, k: int
    ) -> "_TopItems":
        top_items = _TopItems(excluded_items=excluded_items, k=k, catalogue_size=len(self.item_ids))
        is_known_B = self.package.model.is_known(history_length_B=history.lengths, user_row_B=user_row_B)
        known_indices = np.flatnonzero(is_known_B)
        if len(known_indices):
            query_BD = self.encode(user_row_B[known_indices], history.take(known_indices))
            self._fill_by_index(top_items, known_indices, query_BD)
        unknown_indices = np.flatnonzero(~is_known_B)
        if len(unknown_indices):
            depth = int(top_items.depth_B[unknown_indices].max())
            shape = (len(unknown_indices), depth)
            top_items.fill(
                unknown_indices,
                np.broadcast_to(self._item_by_popularity_I[:depth].astype(np.int64), shape),
                np.broadcast_to(self._popularity_share_I[:depth], shape),
            )
        assert (top_items.num_items_B == top_items.num_requested_B).all()
        return top_items

    def _fill_by_index(self, top_items: "_TopItems", query_indices: NDArray[np.int64], query_BD: NDArray[np.float32]) -> None:
        """Search the index and fill the top items of some queries.

        Queries that need a similar number of candidates are searched together. If an approximate index returns too few items
        for a query, the query is searched again over all vectors.

        Args:
            query_indices: positions of the queries in the batch.
            query_BD: vectors of these queries, in the same order.
        """
        kind = self.package.index
        depth_B = top_items.depth_B[query_indices]
        log_depth_B = np.ceil(np.log2(np.maximum(depth_B, 1))).astype(np.int64)
        for log_depth in np.unique(log_depth_B):
            similar_depth_indices = np.flatnonzero(log_depth_B == log_depth)
            depth = int(depth_B[similar_depth_indices].max())
            score_BN, row_BN = search(self._index, query_BD[similar_depth_indices], kind=kind, depth=depth)
            top_items.fill(query_indices[similar_depth_indices], row_BN, score_BN)
            short_indices = similar_depth_indices[top_items.is_short(query_indices[similar_depth_indices])]
            if len(short_indices):
                score_BN, row_BN = search_exhaustively(self._index, query_BD[short_indices], kind=kind, depth=depth)
                top_items.fill(query_indices[short_indices], row_BN, score_BN)


class _TopItems:
    """The best items that are not excluded, for each query of a batch.

    Attributes:
        num_requested_B: number of items to recommend: the smaller of k and the number of items that are not excluded.
        depth_B: number of candidates to fetch, so that num_requested_B items remain after the exclusion.
        num_items_B: number of items set in row_BK and score_BK.
        row_BK, score_BK: item rows and scores, best first.
    """

    def __init__(self, *, excluded_items: JaggedArray, k: int, catalogue_size: int) -> None:
        self._excluded_items, self._catalogue_size = excluded_items, catalogue_size
        self.num_requested_B = np.minimum(k, catalogue_size - excluded_items.lengths)
        self.depth_B = np.maximum(1, self.num_requested_B + np.where(self.num_requested_B > 0, excluded_items.lengths, 0))
        self.num_items_B = np.zeros(len(excluded_items), np.int64)
        self.row_BK = np.full((len(excluded_items), k), -1, np.int64)
        self.score_BK = np.zeros((len(excluded_items), k), np.float32)

    def is_short(self, query_indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each query has fewer items than requested."""
        return self.num_items_B[query_indices] < self.num_requested_B[query_indices]

    def fill(self, query_indices: NDArray[np.int64], row_BN: NDArray[np.int64], score_BN: NDArray[np.float32]) -> None:
        """Set the items of the queries to the first candidates that are not excluded. Row -1 marks a missing candidate."""
        candidate_key_BN = np.arange(len(query_indices))[:, None] * self._catalogue_size + row_BN
        excluded_keys = self._excluded_items.take(query_indices).pair_keys(bound=self._catalogue_size)
        is_recommended_BN = (row_BN >= 0) & ~np.isin(candidate_key_BN, excluded_keys)
        position_BN = is_recommended_BN.cumsum(axis=1) - 1
        is_recommended_BN &= position_BN < self.num_requested_B[query_indices][:, None]
        query_BN = np.broadcast_to(query_indices[:, None], is_recommended_BN.shape)
        self.row_BK[query_BN[is_recommended_BN], position_BN[is_recommended_BN]] = row_BN[is_recommended_BN]
        self.score_BK[query_BN[is_recommended_BN], position_BN[is_recommended_BN]] = score_BN[is_recommended_BN]
        self.num_items_B[query_indices] = is_recommended_BN.sum(axis=1)
