"""The Retriever, which recommends items from a model package.

Shapes: B queries, I items, D width, N candidates fetched from the index, K recommended items, L items of all queries, R items
of a block.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import InputError, shown
from recsys_core.manifests import PackageManifest, record_file, require_manifest
from recsys_core.retrieval.search import Selection, decoded_vectors, stored_vectors
from recsys_core.retrieval.shards import ShardVectors
from recsys_core.retrieval.top_items import Candidates, IndexSearch, TopItems
from recsys_core.serving.answers import Recommendations, join_batches
from recsys_core.serving.contents import PackageContents, read_package
from recsys_core.serving.description import DESCRIPTION_NAME, GOLDEN_NAME, description_sha256
from recsys_core.serving.golden import verify_golden
from recsys_core.serving.ids import Id, plain_values
from recsys_core.serving.items import Filter, ItemTable
from recsys_core.serving.queries import History, Queries, QueryReader, SearchOptions, count_queries

MAX_BATCH_RESULTS = 1 << 20
"""Largest number of recommended items (B * K) per batch; a larger request is split."""
MAX_BATCH_QUERIES = 1024
MAX_LISTED_EXCLUDES = 1_000
"""Up to this many items of `exclude` are dropped from the results of the search. If there are more, the search skips them."""
MAX_CACHED_FILTERS = 16
"""Number of filters whose matching items stay in memory for later requests."""


class Retriever:
    """A loaded model package. Threads may share it: its only mutable state is a cache of the last filters.

    Attributes:
        item_ids, user_ids: maps between ids and table rows.
        items: titles and filter columns.
        query_reader: converts the arguments of a request to queries.
        request_features: the feature columns that a request may have.
        version: number of the version in the registry, or the start of the sha256 of package.json if the number is not known.
    """

    def __init__(self, contents: PackageContents, *, version: str) -> None:
        self.package, self.version = contents.package, version
        self._index, self._index_kind, self.items = contents.index, contents.package.index, contents.items
        self.item_ids, self.user_ids = contents.item_ids, contents.users.ids
        self.request_features = contents.request_features
        self.query_reader, self._popularity = QueryReader(contents), contents.popularity
        self._index_vectors: ShardVectors | None = stored_vectors(contents.index)
        if self._index_vectors is None and not contents.items.has_vectors:
            self._index_vectors = decoded_vectors(contents.index)
        # The cache does not refer to the Retriever: in a reference cycle, a replaced model would stay in memory.
        self._select = functools.partial(_select, contents.items, contents.index)
        self._select_json_with_cache = functools.lru_cache(MAX_CACHED_FILTERS)(
            functools.partial(_select_json, contents.items, contents.index)
        )

    @classmethod
    def load(cls, folder: Path | str, *, sha256: str | None = None, version: str | None = None, verify: bool = True) -> Self:
        """Load a model package.

        Args:
            folder: folder of the package, of a `package` stage, or of a downloaded MLflow model.
            sha256: expected checksum of package.json. By default, it is read from the manifest of the stage; without a stage,
                package.json itself is not verified.
            version: number of the version in the registry. The answers contain it.
            verify: whether to compare the answers to the golden queries with the expected answers.

        Raises:
            StageError: a file is missing or was changed, or a golden query has another answer.
        """
        folder = Path(folder)
        if sha256 is None:
            folder, sha256 = _find_package(folder)
        retriever = cls(read_package(folder, sha256=sha256), version=version or sha256[:12])
        if verify:
            verify_golden(retriever, folder / GOLDEN_NAME)
        return retriever

    @property
    def space_id(self) -> str:
        """Id of the vector space of the query and item vectors."""
        return self.package.space_id

    def recommend(
        self,
        user_ids: Sequence[Id | None] | NDArray[Any] | None = None,
        k: int = 10,
        *,
        histories: Sequence[History] | None = None,
        features: Mapping[str, Sequence[Any]] | None = None,
        **options: Unpack[SearchOptions],
    ) -> Recommendations:
        """Recommend the k best items for each query, best first; fewer if fewer items are allowed.

        The score of an item is the inner product of query and item vector. If the model reads nothing that the query has, the
        query gets the most popular items (see FALLBACKS). The score is then the item's share of all events, or of the events of
        the query's segment.

        Sequences may be lists, tuples, arrays with one dimension, pandas Series or pyarrow arrays.

        Args:
            user_ids: one per query. An id may be unknown to the model, or None.
            k: number of items.
            histories: one per query. A history replaces the user's stored history; None keeps the stored history. Unknown item
                ids are ignored.
            features: feature values by column (see RequestFeatures), one per query; None for a query without the feature. They
                replace the stored features of a user.
            options: see SearchOptions.

        Raises:
            InputError: an argument or an id is invalid, or the arguments have different lengths.
        """
        user_ids = plain_values(user_ids)
        histories = None if histories is None else [plain_values(history) for history in plain_values(histories)]
        features = {name: plain_values(values) for name, values in (features or {}).items()}
        checked_options = self.query_reader.checked_options(k, options)
        num_queries = count_queries(user_ids, histories, features)
        k = min(k, len(self.item_ids))
        user_rows = self.query_reader.user_rows(user_ids, num_queries)
        given_features = self.request_features.encode(features, num_rows=num_queries) if features else {}
        candidates = self._candidates(checked_options)
        batches = []
        for batch_slice in _batch_slices(num_queries, k=k):
            row_indices = np.arange(num_queries)[batch_slice]
            queries = self.query_reader.read(
                user_rows[batch_slice],
                histories=None if histories is None else histories[batch_slice],
                given_features={key: feature.take(row_indices) for key, feature in given_features.items()},
                options=checked_options,
            )
            batches.append(self._recommend_batch(queries, candidates, k=k, options=checked_options))
        return join_batches(batches) if batches else self._no_recommendations()

    def similar(self, item_ids: Sequence[Id] | NDArray[Any], k: int = 10, **options: Unpack[SearchOptions]) -> Recommendations:
        """Return for each item the k other items whose vectors have the largest inner products with its vector.

        The popularity of an item counts only with the option `popularity_weight`. `exclude_seen` has no effect. An item that is
        not in the catalogue has an error in the result.

        Raises:
            InputError: an argument or an id is invalid.
        """
        item_ids = plain_values(item_ids)
        checked_options = self.query_reader.checked_options(k, options)
        k = min(k, len(self.item_ids))
        item_rows = self.item_ids.rows(item_ids)
        candidates = self._candidates(checked_options)
        batches = []
        for batch_slice in _batch_slices(len(item_rows), k=k):
            row_B = item_rows[batch_slice]
            is_known_B = row_B >= 0
            query_BD = np.zeros((len(row_B), self.package.model.config.output_dim), np.float32)
            query_BD[is_known_B] = self.item_vectors(row_B[is_known_B])
            if self.query_reader.tower.block is not None:
                query_BD = query_BD @ self.query_reader.tower.block.similar_map.numpy()
            if self.package.model.config.has_popularity:
                query_BD[:, -1] = checked_options["popularity_weight"] or 0.0  # replaces the popularity of the item
            zero_B, query_item_rows = np.zeros(len(row_B), np.int64), JaggedArray.from_lengths(is_known_B, row_B[is_known_B])
            queries = Queries(is_known_B, query_BD, query_item_rows, zero_B, zero_B.astype(np.int8), zero_B)
            batches.append(self._recommend_batch(queries, candidates, k=k, options=checked_options, uses_popularity=False))
        errors = {
            int(query): f"item_id {shown(item_ids[int(query)])} is not in the catalogue"
            for query in np.flatnonzero(item_rows < 0)
        }
        return join_batches(batches, errors=errors) if batches else self._no_recommendations()

    def item_vectors(self, item_row_L: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors of items, [L, D]."""
        return self.items.vectors(item_row_L) if self._index_vectors is None else self._index_vectors.take(item_row_L)

    def item_batches(self, max_rows: int) -> Iterator[pa.Table]:
        """Return all columns of the items with their vectors (`vector`, float32), in blocks of at most `max_rows` rows."""
        start = 0
        for items in self.items.batches(max_rows):
            vector_RD = self.item_vectors(np.arange(start, start + len(items)))
            vectors = pa.FixedSizeListArray.from_arrays(pa.array(vector_RD.reshape(-1)), vector_RD.shape[1])
            yield items.append_column("vector", vectors)
            start += len(items)

    def is_known(self, user_ids: Sequence[Id]) -> NDArray[np.bool_]:
        """Return whether each user has a row, which a user without events may have too. Raises InputError for an invalid id."""
        is_known_B: NDArray[np.bool_] = self.query_reader.user_rows(user_ids, len(user_ids)) >= 0
        return is_known_B

    def segment_values(self, num_values: int) -> tuple[str, list[Id]] | None:
        """Return the request column of the segments and the values of the first segments; None if there are no segments."""
        segments = self._popularity.segments
        if segments is None:
            return None
        return self.request_features.values_of(segments.key, segments.value_rows[:num_values])

    def _candidates(self, options: SearchOptions) -> Candidates:
        """Return the items that a request allows. Raises InputError for an invalid filter or id."""
        num_items, is_allowed_I, selection = len(self.item_ids), None, None
        if options["filter"]:
            is_allowed_I, selection = self._cached_selection(options["filter"])
        excluded_rows = self.item_ids.rows(options["exclude"]) if len(options["exclude"]) else np.zeros(0, np.int64)
        excluded_rows = np.unique(excluded_rows[excluded_rows >= 0])
        if len(excluded_rows) > MAX_LISTED_EXCLUDES:
            is_allowed_I = np.ones(num_items, np.bool_) if is_allowed_I is None else is_allowed_I.copy()
            is_allowed_I[excluded_rows] = False
            excluded_rows, selection = excluded_rows[:0], Selection(self._index, is_allowed_I)
        if is_allowed_I is None or selection is None:
            return Candidates(num_items, None, None, excluded_rows)
        return Candidates(selection.num_items, is_allowed_I, selection, excluded_rows[is_allowed_I[excluded_rows]])

    def _cached_selection(self, item_filter: Filter) -> tuple[NDArray[np.bool_], Selection]:
        """Return the items that satisfy a filter. The last filters are cached, because requests often repeat a filter."""
        try:
            try:
                filter_json = json.dumps(item_filter)
            except (TypeError, ValueError):  # e.g. a datetime
                return self._select(item_filter)
            return self._select_json_with_cache(filter_json)
        except RecursionError:  # json.dumps and json.loads allow different numbers of levels
            raise InputError("filter: has too many levels; write conditions by column") from None

    def _recommend_batch(
        self, queries: Queries, candidates: Candidates, *, k: int, options: SearchOptions, uses_popularity: bool = True
    ) -> Recommendations:
        """Return the recommendations of a batch.

        uses_popularity: whether queries that the model does not rank get the most popular items; otherwise they get no item.
        """
        num_items = len(self.item_ids)
        excluded_items = candidates.excluded_from(queries.excluded_items, bound=num_items)
        top_items = TopItems(excluded_items=excluded_items, k=k, num_candidates=candidates.num_items, bound=num_items)
        model_indices = np.flatnonzero(queries.is_ranked_by_model_B)
        popularity_indices = np.flatnonzero(~queries.is_ranked_by_model_B)
        if len(model_indices):
            search = IndexSearch(self._index, self._index_kind, candidates)
            search.fill(top_items, model_indices, queries.query_BD[model_indices])
            top_items.complete(
                model_indices,
                is_allowed_I=candidates.is_allowed_I,
                score_items=lambda query, item_rows: self.item_vectors(item_rows) @ queries.query_BD[query],
            )
        if options["min_score"] is not None:
            top_items.drop_below(options["min_score"], model_indices)
        if len(popularity_indices) and uses_popularity:
            self._popularity.fill(top_items, popularity_indices, candidates, segment_B=queries.segment_B)
        is_item_BK = top_items.is_item_BK
        item_row_L = top_items.row_BK[is_item_BK]
        return Recommendations(
            item_id_L=self.item_ids.ids(item_row_L),
            score_L=top_items.score_BK[is_item_BK],
            offset=np.concatenate([[0], np.cumsum(top_items.num_items_B)]),
            fallback_code_B=queries.fallback_code_B,
            num_unknown_items_B=queries.num_unknown_items_B,
            version=self.version,
            space_id=self.space_id,
            query_BD=queries.query_BD if options["with_vectors"] else None,
            item_vector_LD=self.item_vectors(item_row_L) if options["with_vectors"] else None,
        )

    def _no_recommendations(self) -> Recommendations:
        """Return the result of a request without queries."""
        return Recommendations(
            item_id_L=self.item_ids.ids(np.zeros(0, np.int64)),
            score_L=np.zeros(0, np.float32),
            offset=np.zeros(1, np.int64),
            fallback_code_B=np.zeros(0, np.int8),
            num_unknown_items_B=np.zeros(0, np.int64),
            version=self.version,
            space_id=self.space_id,
        )


def _find_package(folder: Path) -> tuple[Path, str]:
    """Return the folder of the package and the sha256 of its package.json."""
    for package_folder in (folder, folder / "artifacts" / "package"):
        if (description_path := package_folder / DESCRIPTION_NAME).is_file():
            return package_folder, record_file(description_path).sha256
    # The files of the package are verified when they are read.
    return folder / "package", description_sha256(require_manifest(folder, PackageManifest, verify=False))


def _select(items: ItemTable, index: Any, item_filter: Filter) -> tuple[NDArray[np.bool_], Selection]:
    is_allowed_I = items.matching(item_filter)
    return is_allowed_I, Selection(index, is_allowed_I)


def _select_json(items: ItemTable, index: Any, filter_json: str) -> tuple[NDArray[np.bool_], Selection]:
    return _select(items, index, json.loads(filter_json))


def _batch_slices(num_queries: int, *, k: int) -> list[slice]:
    queries_per_batch = min(MAX_BATCH_QUERIES, max(1, MAX_BATCH_RESULTS // k))
    return [slice(start, min(num_queries, start + queries_per_batch)) for start in range(0, num_queries, queries_per_batch)]
