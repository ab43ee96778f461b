"""Answers to a batch of requests with few searches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from recsys_core.serving.answers import Answer
from recsys_core.serving.requests import Request, answer, answer_similar
from recsys_core.serving.retriever import Retriever


class Query(NamedTuple):
    """A parsed request. is_similar: whether it is a request for similar items, not for recommendations."""

    request: Request
    is_similar: bool


Result = list[Answer] | Exception
"""The answers to the rows of a request, or the exception that prevented them: an InputError, or an exception from a bug."""


@dataclass
class _Group:
    """Queries with the same options, which one search can answer.

    Attributes:
        positions: position of each query in the batch.
    """

    first_query: Query
    queries: list[Query] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


class ServedModel:
    """A retriever that answers batches of requests."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever

    def respond(self, queries: Sequence[Query]) -> list[Result]:
        """Return the result of each query. Queries with the same options share a search."""
        results: list[Result] = [[] for _ in queries]
        for group in _groups(queries):
            for position, result in zip(group.positions, self._respond_together(group.queries), strict=True):
                results[position] = result
        return results

    def warm_up(self) -> None:
        """Answer one request, so that the first real request does not wait until memory-mapped pages and code are loaded."""
        self._retriever.recommend([None], histories=[self._retriever.item_ids.ids(np.arange(1)).tolist()])

    def _respond_together(self, queries: Sequence[Query]) -> list[Result]:
        if len(queries) == 1:
            return [self._respond_alone(queries[0])]
        try:
            answers = iter(
                self._answer(_merge_requests([query.request for query in queries]), is_similar=queries[0].is_similar)
            )
        except Exception:  # from one query, which must not affect the other queries
            return [self._respond_alone(query) for query in queries]
        return [[next(answers) for _ in range(query.request.num_rows)] for query in queries]

    def _respond_alone(self, query: Query) -> Result:
        try:
            return self._answer(query.request, is_similar=query.is_similar)
        except Exception as error:  # the server logs it unless it is an InputError
            return error

    def _answer(self, request: Request, *, is_similar: bool) -> list[Answer]:
        return answer_similar(self._retriever, request) if is_similar else answer(self._retriever, request)


def _groups(queries: Sequence[Query]) -> Iterator[_Group]:
    groups: list[_Group] = []
    for position, query in enumerate(queries):
        group = next((group for group in groups if _can_share_search(group.first_query, query)), None)
        if group is None:
            group = _Group(query)
            groups.append(group)
        group.queries.append(query)
        group.positions.append(position)
    yield from groups


def _can_share_search(query: Query, other_query: Query) -> bool:
    return (query.is_similar, query.request.k, query.request.options) == (
        other_query.is_similar,
        other_query.request.k,
        other_query.request.options,
    )


def _merge_requests(requests: Sequence[Request]) -> Request:
    """Return one request with the rows of all requests. A column that a request does not have is None in its rows."""
    names = dict.fromkeys(name for request in requests for name in request.columns)
    columns: dict[str, list[Any]] = {
        name: [value for request in requests for value in request.columns.get(name) or [None] * request.num_rows]
        for name in names
    }
    return Request(columns, sum(request.num_rows for request in requests), requests[0].k, requests[0].options)
