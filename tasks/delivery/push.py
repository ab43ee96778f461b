"""Push of a version to a vector store: a new collection, checks, a switched alias.

1. Load the items into a new collection, whose name has the version and the space_id.
2. Check the number of items and, for the golden queries, the best 10 items of the store against an exact search.
3. Switch the alias in one step. Readers use the alias, so they never see a collection that is incomplete.
4. Delete older collections, except the collection that the alias named before.

Shapes: B queries, D width of the vectors, K best items, R items of a block.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recsys_core.errors import StageError, redacted, shown
from recsys_core.serving.golden import golden_vectors
from recsys_core.serving.retriever import Retriever
from tasks.delivery.config import AnyStore
from tasks.delivery.vector_store import VectorStore, store_errors
from tasks.progress.reporting import LOG, show_bar

K = 10
SCORE_TOLERANCE = 1e-5
"""Largest difference of two scores that count as equal. For scores above 1, it is a relative difference."""


@dataclass(frozen=True)
class PushResult:
    """The collection that the alias of a store names after a push.

    Attributes:
        overlap: share of the exact best 10 items that the store returned for the golden queries.
        num_loaded: number of items that this push loaded; 0 if the store had the collection.
    """

    location: str
    alias: str
    collection: str
    num_items: int
    overlap: float
    num_loaded: int

    def __str__(self) -> str:
        items_text = (
            f"{self.num_loaded:,} items loaded" if self.num_loaded else f"{self.num_items:,} items, which the store already had"
        )
        return f"{self.location}: alias {self.alias} names {self.collection} ({items_text}, overlap {100 * self.overlap:.1f} %)"


def push(retriever: Retriever, settings: AnyStore, *, model_name: str) -> PushResult:
    """Load the items of `retriever` into a store, unless the store has them, and switch the alias to their collection.

    Raises:
        InputError: the library of the store is not installed, or the store cannot have one of the columns.
        StageError: the store does not work, or it returned other items than an exact search. The message names the collection
            of the alias, and a fix.
    """
    alias = settings.alias or model_name.replace("-", "_")
    collection = f"{alias}_v{retriever.version}_{retriever.space_id}"
    aliased_collection: str | None = None
    try:
        with store_errors(settings.location), settings.connect() as store:
            aliased_collection = store.aliased_collection(alias)
            collection_load = _CollectionLoad(store, settings, retriever, collection)
            num_loaded, overlap = collection_load.ensure_complete(is_aliased=aliased_collection == collection)
            if aliased_collection != collection:
                store.switch(alias, collection)
                former_collection, aliased_collection = aliased_collection, collection
                _drop_older_collections(store, alias, kept_collections={collection, former_collection})
    except StageError as error:
        raise StageError(
            f"{error}; the alias {alias} names {aliased_collection or 'no collection'}. Remove the cause, and repeat the push "
            "with `nightjar push`"
        ) from error
    return PushResult(settings.location, alias, collection, len(retriever.item_ids), overlap, num_loaded)


def _drop_older_collections(store: VectorStore, alias: str, *, kept_collections: set[str | None]) -> None:
    name_pattern = re.compile(rf"{re.escape(alias)}_v[0-9a-f]+_[0-9a-f]{{16}}")
    for collection in store.collections():
        if name_pattern.fullmatch(collection) and collection not in kept_collections:
            store.drop(collection)


@dataclass(frozen=True)
class _CollectionLoad:
    """Load of a version's items into a collection of a store."""

    store: VectorStore
    settings: AnyStore
    retriever: Retriever
    collection: str

    def ensure_complete(self, *, is_aliased: bool) -> tuple[int, float]:
        """Load the collection, unless it is complete. Return the number of loaded items and the overlap.

        An incomplete collection of an interrupted push is loaded again, unless the alias names it (`is_aliased`).
        """
        if self.collection in self.store.collections():
            try:
                self._require_all_items()
                if not is_aliased:  # an interrupted push may have added all items, but built no index
                    self.store.finish(self.collection)
                return 0, self._measure_overlap()
            except StageError as error:
                if is_aliased:
                    raise StageError(
                        f"{error}; the alias names this collection, so it is not loaded again: push another version, or delete "
                        "the collection"
                    ) from error
                LOG.info("%s; the collection is loaded again", error)
                self.store.drop(self.collection)
        num_loaded = self._add_items()
        self._require_all_items()
        return num_loaded, self._measure_overlap()

    def _add_items(self) -> int:
        num_items, num_loaded = len(self.retriever.item_ids), 0
        for items in self.retriever.item_batches(self.store.batch_rows):
            if not num_loaded:
                self.store.create(self.collection, items.schema.remove_metadata())
            self.store.add(self.collection, items.replace_schema_metadata())
            num_loaded += len(items)
            note = f"{self.settings.kind}: {num_loaded:,} of {num_items:,} items"
            show_bar("push", num_done=num_loaded, num_total=num_items, note=note)
        self.store.finish(self.collection)
        return num_loaded

    @property
    def _collection_text(self) -> str:
        """Store and collection, for messages."""
        return f"{self.settings.location}: the collection {self.collection}"

    def _require_all_items(self) -> None:
        """Raise StageError if the collection has another number of items than the version."""
        num_items, num_stored_items = len(self.retriever.item_ids), self.store.count(self.collection)
        if num_stored_items != num_items:
            raise StageError(f"{self._collection_text} has {num_stored_items:,} items, but the version has {num_items:,}")

    def _measure_overlap(self) -> float:
        """Return the overlap; raise StageError if the overlap is too small."""
        query_BD = golden_vectors(self.retriever)
        k = min(K, len(self.retriever.item_ids))
        exact_score_BK = exact_top_scores(self.retriever, query_BD, k=k)
        num_correct = 0
        for query_index, item_ids in enumerate(self.store.search(self.collection, query_BD, k)):
            lowest_score = float(exact_score_BK[query_index, -1])
            num_correct += self._count_correct(item_ids, query_BD[query_index], lowest_score)
        overlap = num_correct / max(1, k * len(query_BD))
        min_overlap = 1.0 if self.settings.is_exact else self.settings.min_overlap
        if overlap < min_overlap and len(query_BD):
            raise StageError(
                f"{self._collection_text} returns {100 * overlap:.1f} % of the exact best {k} items for {len(query_BD)} golden "
                f"queries, but {100 * min_overlap:.1f} % are required"
            )
        return overlap

    def _count_correct(self, item_ids: list[int | str], query_D: NDArray[np.float32], lowest_score: float) -> int:
        """Return the number of different items whose exact score is at least `lowest_score`."""
        item_rows = self.retriever.item_ids.rows(item_ids)
        if (item_rows < 0).any():
            unknown_id = item_ids[int((item_rows < 0).argmax())]
            raise StageError(f"{self._collection_text} returns the item {shown(unknown_id)}, which is not in the version")
        score_K = self.retriever.item_vectors(np.unique(item_rows)) @ query_D
        return int((score_K >= lowest_score - SCORE_TOLERANCE * max(1.0, abs(lowest_score))).sum())


def exact_top_scores(retriever: Retriever, query_BD: NDArray[np.float32], *, k: int) -> NDArray[np.float32]:
    """Return the k largest inner products of each query with all items, in falling order, [B, K]."""
    top_score_BK = np.zeros((len(query_BD), 0), np.float32)
    num_items, max_block_rows = len(retriever.item_ids), 1 << 14
    for first_row in range(0, num_items, max_block_rows):
        vector_RD = retriever.item_vectors(np.arange(first_row, min(num_items, first_row + max_block_rows)))
        top_score_BK = -np.sort(-np.concatenate([top_score_BK, query_BD @ vector_RD.T], axis=1), axis=1)[:, :k]
    return top_score_BK


def push_to_all(retriever: Retriever, stores: tuple[AnyStore, ...], *, model_name: str) -> tuple[list[PushResult], list[str]]:
    """Push to each store, even if another store failed. Return the results, and one sentence for each store that failed."""
    results, alarms = [], []
    for settings in stores:
        try:
            result = push(retriever, settings, model_name=model_name)
        except Exception as error:  # a library may raise any error when it is imported or opened
            problem = str(error) if isinstance(error, StageError | ValueError) else f"{type(error).__name__}: {error}"
            alarms.append(redacted(f"version {retriever.version} was not pushed: {problem}"))
        else:
            results.append(result)
    return results, alarms
