"""Checks of a refreshed package: the golden queries of its parent, and the recall of its index.

Shapes: B queries, I items, D width of a vector, L items of all histories.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recsys_core.config import Frozen
from recsys_core.refresh.changes import Changes
from recsys_core.refresh.config import RefreshConfig
from recsys_core.refresh.package import read_item_vectors, refreshed_vectors
from recsys_core.retrieval.index import build_index
from recsys_core.retrieval.kinds import Flat
from recsys_core.retrieval.measure import MeasuredQueries
from recsys_core.seeds import REFRESH_QUERIES_SEED
from recsys_core.serving.answers import Answer
from recsys_core.serving.contents import PackageContents
from recsys_core.serving.description import GOLDEN_NAME
from recsys_core.serving.golden import GoldenQueries, golden_vectors
from recsys_core.serving.requests import respond
from recsys_core.serving.retriever import Retriever

MAX_QUERIES = 1_000
"""Largest number of users, and of items, whose vectors are searched to measure the recall."""
RECALL_K = 100
NUM_STANDARD_ERRORS = 2
"""The mean recall of the new items may be below the limit by this many standard errors, because the recall of a few items
depends on chance."""
MAX_VECTOR_DIFFERENCE = 1e-5
"""Largest allowed difference of any component of a golden query's vector before and after the refresh."""


class Check(Frozen):
    """A measured value of a refreshed package, and the value that it must reach.

    Attributes:
        metric: name of the value in MLflow.
        name: name of the value in messages.
    """

    metric: str
    name: str
    value: float
    limit: float

    @property
    def is_passed(self) -> bool:
        """Whether the value reaches the limit."""
        return self.value >= self.limit

    def __str__(self) -> str:
        return f"{self.name}: {self.value:.4g} ({self.limit:.4g} or more are required)"


def check_package(
    parent: PackageContents,
    contents: PackageContents,
    changes: Changes,
    *,
    parent_folder: Path,
    config: RefreshConfig,
) -> tuple[Check, ...]:
    """Compare a refreshed package with its parent.

    Args:
        parent, contents: the parent package in `parent_folder`, and the refreshed package.
        changes: the differences between the items of the two packages.
    """
    parent_retriever, retriever = Retriever(parent, version=""), Retriever(contents, version="")
    golden_queries = GoldenQueries.model_validate_json((parent_folder / GOLDEN_NAME).read_bytes())
    checks = list(
        _golden_checks(golden_queries, parent_retriever, retriever, parent, changes, min_overlap=config.min_golden_overlap)
    )
    all_rows = np.arange(parent.package.model.num_items)
    parent_recall_by_kind = _recall_by_kind(parent_retriever, parent, read_item_vectors(parent, all_rows), all_rows)
    new_rows = np.arange(len(changes.kept_row_I), contents.package.model.num_items)
    searched_rows = new_rows if len(new_rows) else np.arange(contents.package.model.num_items)
    for query_kind, recall_B in _recall_by_kind(retriever, contents, refreshed_vectors(parent, changes), searched_rows).items():
        parent_recall_B = parent_recall_by_kind[query_kind]
        limit = float(parent_recall_B.mean()) - config.max_recall_drop
        if query_kind == "items":
            limit -= NUM_STANDARD_ERRORS * float(parent_recall_B.std()) / math.sqrt(len(recall_B))
        name = f"recall@{RECALL_K} of the index for the vectors of {query_kind}"
        metric, recall = f"index_recall_{query_kind}", float(recall_B.mean())
        checks.append(Check(metric=metric, name=name, value=recall, limit=max(0.0, limit)))
    return tuple(checks)


def _golden_checks(
    golden_queries: GoldenQueries,
    parent_retriever: Retriever,
    retriever: Retriever,
    parent: PackageContents,
    changes: Changes,
    *,
    min_overlap: float,
) -> Iterator[Check]:
    """Yield the checks of the parent's golden queries.

    A golden query is skipped if a removed item is in its request, in its user's history or in its expected answer. New items
    are excluded from the answers, so both packages give the same answers, apart from the errors of an approximate index.

    The query vector of a request for similar items is the vector of an item. It is not compared if the package has only
    compressed item vectors, because the refresh compresses them again.
    """
    has_exact_item_vectors = parent.items.has_vectors or parent.package.index.has_exact_vectors
    removed_ids = {*changes.removed_ids.to_pylist()}
    users_of_removed_items = (
        _users_of_removed_items(golden_queries, parent_retriever, parent, changes) if removed_ids else set()
    )
    answer_overlaps, has_equal_vector = [], []
    for golden_request in golden_queries.requests:
        if "filter" in golden_request.request["params"] and len(changes.changed_row_I):
            continue  # other items may satisfy the filter now
        answers_before = _answers(parent_retriever, golden_request.request)
        answers_after = _answers(retriever, golden_request.request, excluded_ids=changes.new_ids)
        compared_rows = zip(
            _ids_of_rows(golden_request.request), golden_request.answers, answers_before, answers_after, strict=True
        )
        for (user_id, item_ids), expected_answer, answer_before, answer_after in compared_rows:
            if user_id in users_of_removed_items or removed_ids & {*item_ids, *expected_answer.item_ids}:
                continue
            answer_overlaps.append(
                len({*expected_answer.item_ids} & {*answer_after.item_ids}) / max(1, len(expected_answer.item_ids))
            )
            if has_exact_item_vectors or "inputs" not in golden_request.request:
                has_equal_vector.append(_vector_difference(answer_before, answer_after) <= MAX_VECTOR_DIFFERENCE)
    yield Check(metric="golden_queries", name="number of golden queries whose items stay", value=len(answer_overlaps), limit=1)
    yield Check(
        metric="golden_equal_vectors",
        name="share of golden queries with an equal vector",
        value=float(np.mean(has_equal_vector or [False])),
        limit=1,
    )
    yield Check(
        metric="golden_overlap",
        name="overlap of the answers to golden queries",
        value=float(np.mean(answer_overlaps or [0])),
        limit=min_overlap,
    )


def _answers(retriever: Retriever, request: Mapping[str, Any], *, excluded_ids: pa.Array | None = None) -> list[Answer]:
    params = request["params"]
    all_excluded_ids = [*params.get("exclude", ()), *(() if excluded_ids is None else excluded_ids.to_pylist())]
    return respond(retriever, {**request, "params": {**params, "exclude": all_excluded_ids, "with_vectors": True}})


def _ids_of_rows(request: Mapping[str, Any]) -> list[tuple[Any, list[Any]]]:
    """Return the user id, or None, and the item ids of each row of a golden request."""
    if "inputs" in request:
        return [(None, [item_id]) for item_id in request["inputs"]["item_id"]]
    excluded = request["params"].get("exclude", [])
    return [(row.get("user_id"), [*row.get("history", ()), *excluded]) for row in request["rows"]]


def _users_of_removed_items(
    golden_queries: GoldenQueries, parent_retriever: Retriever, parent: PackageContents, changes: Changes
) -> set[Any]:
    """Return the users of golden queries whose stored history has a removed item."""
    user_ids = [user_id for golden_request in golden_queries.requests for user_id, _ in _ids_of_rows(golden_request.request)]
    user_ids = [user_id for user_id in user_ids if user_id is not None]
    if not user_ids or parent.package.users == "none":
        return set()
    is_kept_I = np.zeros(parent.package.model.num_items, np.bool_)
    is_kept_I[changes.kept_row_I] = True
    histories = parent.users.histories(parent_retriever.user_ids.rows(user_ids))
    return {user_ids[user_index] for user_index in np.unique(histories.list_index_L[~is_kept_I[histories.values_L]]).tolist()}


def _vector_difference(answer_before: Answer, answer_after: Answer) -> float:
    return float(np.abs(np.array(answer_before.query_vector or 0.0) - np.array(answer_after.query_vector or 0.0)).max())


def _recall_by_kind(
    retriever: Retriever, contents: PackageContents, item_vector_ID: NDArray[np.float32], searched_rows: NDArray[np.int64]
) -> dict[str, NDArray[np.float64]]:
    """Return the recall of the index against an exact search for query vectors (`users`) and item vectors (`items`), [B].

    searched_rows: rows of the items whose vectors are searched. If there are more than MAX_QUERIES, a sample is searched.
    """
    exact_index = build_index(Flat(), item_vector_ID)
    recall_by_kind: dict[str, NDArray[np.float64]] = {}
    for query_kind, query_BD in (
        ("users", _user_queries(retriever)),
        ("items", item_vector_ID[_sample_rows(searched_rows)]),
    ):
        if len(query_BD):
            measured_queries = MeasuredQueries.with_exact_results(
                query_BD, exact_index=exact_index, item_vector_ID=item_vector_ID, depth=min(RECALL_K, len(item_vector_ID))
            )
            recall_by_kind[query_kind], _ = measured_queries.recall_and_latency(contents.index, contents.package.index)
    return recall_by_kind


def _user_queries(retriever: Retriever) -> NDArray[np.float32]:
    """Return the query vectors of stored users, or of the golden queries if no users are stored, [B, D]."""
    if not len(retriever.user_ids):
        return golden_vectors(retriever)
    user_ids = retriever.user_ids.ids(_sample_rows(np.arange(len(retriever.user_ids))))
    query_BD = retriever.recommend(user_ids, k=1, with_vectors=True).query_BD
    assert query_BD is not None  # with_vectors
    return query_BD[np.abs(query_BD).any(axis=1)]


def _sample_rows(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return up to MAX_QUERIES of the rows, drawn with a fixed seed."""
    return np.random.default_rng(REFRESH_QUERIES_SEED).permutation(rows)[:MAX_QUERIES]
