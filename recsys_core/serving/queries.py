"""Conversion of a request to queries: options, query vectors, and the items that each query must not get.

Shapes: B queries, D width.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.errors import InputError, shown
from recsys_core.serving.answers import FALLBACKS
from recsys_core.serving.contents import PackageContents
from recsys_core.serving.given_features import GivenFeature
from recsys_core.serving.ids import Id, is_list, plain_values
from recsys_core.serving.items import Filter

MAX_POPULARITY_WEIGHT = 1e4

History = Sequence[Id] | None
"""Item ids in time order; None for the history that is stored in the package."""


class SearchOptions(TypedDict, total=False):
    """Options of `Retriever.recommend` and `Retriever.similar`.

    Attributes:
        exclude_seen: leave out the items of the histories (default True).
        exclude_stored_history: whether `exclude_seen` also leaves out the items of a stored history that the request replaces
            (default True). False is for measuring a model on events that are in the stored histories.
        exclude: ids of items that are left out. Unknown ids are ignored.
        min_score: leave out items with a lower score. It does not apply to the most popular items, whose scores are shares.
        popularity_weight: weight of an item's popularity in its score, for a model with a popularity term. By default, it is
            the trained weight for recommendations, and 0 for similar items.
        filter: conditions on filter columns; see recsys_core.serving.items.
        with_vectors: also return query vectors and item vectors.
    """

    exclude_seen: bool
    exclude_stored_history: bool
    exclude: Sequence[Id]
    min_score: float | None
    popularity_weight: float | None
    filter: Filter | None
    with_vectors: bool


DEFAULT_OPTIONS: SearchOptions = {
    "exclude_seen": True,
    "exclude_stored_history": True,
    "exclude": (),
    "min_score": None,
    "popularity_weight": None,
    "filter": None,
    "with_vectors": False,
}


class Queries(NamedTuple):
    """Queries of one batch.

    Attributes:
        is_ranked_by_model_B: whether the model ranks the items of a query; otherwise they are ranked by popularity.
        query_BD: query vectors; zeros for queries whose items are ranked by popularity.
        excluded_items: distinct rows of the items that each query must not get.
        segment_B: segment whose most popular items a query gets if its items are ranked by popularity.
        fallback_code_B, num_unknown_items_B: see Recommendations.
    """

    is_ranked_by_model_B: NDArray[np.bool_]
    query_BD: NDArray[np.float32]
    excluded_items: JaggedArray
    segment_B: NDArray[np.int64]
    fallback_code_B: NDArray[np.int8]
    num_unknown_items_B: NDArray[np.int64]


class QueryReader:
    """Converts the arguments of a request to queries.

    Attributes:
        tower: the query tower.
    """

    def __init__(self, contents: PackageContents) -> None:
        self.tower, self._package, self._users = contents.tower, contents.package, contents.users
        self._item_ids, self._popularity = contents.item_ids, contents.popularity

    def checked_options(self, k: int, options: SearchOptions) -> SearchOptions:
        """Return the options with the defaults of missing options. Raises InputError for an unknown or invalid option."""
        if unknown_options := options.keys() - DEFAULT_OPTIONS.keys():
            raise InputError(f"unknown option {', '.join(sorted(unknown_options))}; there are {', '.join(DEFAULT_OPTIONS)}")
        if k < 1:
            raise InputError(f"k is {k}; it must be at least 1")
        popularity_weight = options.get("popularity_weight")
        if popularity_weight is not None and not self._package.model.config.has_popularity:
            raise InputError("popularity_weight is set, but the model has no popularity term; train it with model.popularity")
        if popularity_weight is not None and not abs(popularity_weight) <= MAX_POPULARITY_WEIGHT:
            raise InputError(
                f"popularity_weight is {popularity_weight}; it must be at most {MAX_POPULARITY_WEIGHT:g} in absolute value"
            )
        excluded_ids = plain_values(options.get("exclude", ()))
        if isinstance(excluded_ids, str):  # its characters would be unknown ids, which are ignored
            raise InputError(f"exclude is the text {shown(excluded_ids)}; pass a list of item ids")
        return {**DEFAULT_OPTIONS, **options, "exclude": excluded_ids}

    def user_rows(self, user_ids: Sequence[Id | None] | NDArray[Any] | None, num_queries: int) -> NDArray[np.int64]:
        """Return the row of each user; -1 for an unknown user and for None."""
        if user_ids is None or self._package.users == "none":
            return np.full(num_queries, -1, np.int64)
        if isinstance(user_ids, np.ndarray) and user_ids.dtype == object:
            user_ids = user_ids.tolist()  # which may have None, unlike an array of numbers
        if isinstance(user_ids, np.ndarray) or None not in user_ids:
            return self._users.ids.rows(user_ids)  # type: ignore[arg-type]  # no element is None
        user_rows = np.full(num_queries, -1, np.int64)
        user_rows[[user_id is not None for user_id in user_ids]] = self._users.ids.rows(
            [user_id for user_id in user_ids if user_id is not None]
        )
        return user_rows

    def read(
        self,
        user_row_B: NDArray[np.int64],
        *,
        histories: Sequence[History] | None,
        given_features: Mapping[str, GivenFeature],
        options: SearchOptions,
    ) -> Queries:
        """Return the queries of a batch."""
        history, excluded_items, num_unknown_items_B = self._histories(
            user_row_B, new_histories=histories, exclude_stored_history=options["exclude_stored_history"]
        )
        if not options["exclude_seen"]:
            excluded_items = JaggedArray.empty(len(user_row_B))
        model = self._package.model
        is_ranked_by_model_B = model.is_known(history_length_B=history.lengths, user_row_B=user_row_B, has_context=False)
        for key, feature in given_features.items():
            if key != self._popularity.segment_key:
                is_ranked_by_model_B = is_ranked_by_model_B | (feature.rows.lengths > 0)  # the model reads no empty list
        query_BD = np.zeros((len(user_row_B), model.config.output_dim), np.float32)
        model_indices = np.flatnonzero(is_ranked_by_model_B)
        if len(model_indices) == len(user_row_B):
            query_BD = self.encode(user_row_B, history, given_features=given_features)
        elif len(model_indices):
            model_features = {key: feature.take(model_indices) for key, feature in given_features.items()}
            query_BD[model_indices] = self.encode(
                user_row_B[model_indices], history.take(model_indices), given_features=model_features
            )
        if options["popularity_weight"] is not None:
            query_BD[model_indices, -1] = options["popularity_weight"]
        has_history_B = (history.lengths > 0) & (model.served_history_length > 0)
        unknown_user_code_B = np.where(has_history_B, FALLBACKS.index("history"), FALLBACKS.index("features"))
        needs_no_fallback_B = (user_row_B >= 0) | (self._package.users == "none")
        model_code_B = np.where(needs_no_fallback_B, FALLBACKS.index(None), unknown_user_code_B)
        fallback_code_B = np.where(is_ranked_by_model_B, model_code_B, FALLBACKS.index("popularity")).astype(np.int8)
        segment_B = self._popularity.segments_of(given_features, num_queries=len(user_row_B))
        return Queries(is_ranked_by_model_B, query_BD, excluded_items, segment_B, fallback_code_B, num_unknown_items_B)

    def _histories(
        self, user_row_B: NDArray[np.int64], *, new_histories: Sequence[History] | None, exclude_stored_history: bool
    ) -> tuple[JaggedArray, JaggedArray, NDArray[np.int64]]:
        """Return the history, the seen items and the number of unknown items of each query."""
        stored_history = self._users.histories(user_row_B)
        num_items = len(self._item_ids)
        if new_histories is None:
            return stored_history, stored_history.distinct(bound=num_items), np.zeros(len(user_row_B), np.int64)
        for new_items in new_histories:
            if new_items is not None and not is_list(new_items):
                raise InputError(
                    f"history {shown(new_items)} is of type {type(new_items).__name__}; pass a list of item ids, an array with "
                    "one dimension, a pandas Series or a pyarrow array"
                )
        length_B = np.array([0 if history is None else len(history) for history in new_histories], np.int64)
        new_item_rows = self._item_ids.rows(
            [item_id for history in new_histories if history is not None for item_id in history]
        )
        new_history = JaggedArray.from_lengths(length_B, new_item_rows).filter(new_item_rows >= 0)
        is_replaced_B = np.array([history is not None for history in new_histories])
        history = stored_history.replace(new_history, where=is_replaced_B)
        num_unknown_items_B = length_B - new_history.lengths
        if exclude_stored_history:
            return history, stored_history.union(new_history, bound=num_items), num_unknown_items_B
        return history, history.distinct(bound=num_items), num_unknown_items_B

    def encode(
        self, user_row_B: NDArray[np.int64], history: JaggedArray, *, given_features: Mapping[str, GivenFeature] | None = None
    ) -> NDArray[np.float32]:
        """Return the query vectors of users with these histories, [B, D].

        Args:
            user_row_B: rows of the users; -1 for an unknown user.
            history: item rows of each user, oldest first.
            given_features: features from a request by key; they replace stored features.
        """
        query_BD: NDArray[np.float32] = self.tower(
            user_row_B, history, features=self._users.features, given_features=given_features
        ).numpy()
        return query_BD


def count_queries(
    user_ids: Sequence[Id | None] | NDArray[Any] | None,
    histories: Sequence[History] | None,
    features: Mapping[str, Sequence[Any]] | None,
) -> int:
    """Return the number of queries. Raises InputError if users and histories differ in number, or if all arguments are None."""
    if histories is not None and user_ids is not None and len(histories) != len(user_ids):
        raise InputError(f"{len(histories)} histories for {len(user_ids)} users; pass one history per user, or none")
    columns = [column for column in (user_ids, histories, *(features or {}).values()) if column is not None]
    if not columns:
        raise InputError("there are no queries; pass user_ids, histories or features")
    return len(columns[0])
