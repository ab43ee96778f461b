"""Answers to a batch of requests with few searches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from recsys_core.serving.answers import Answer
from recsys_core.serving.requests import Request, answer, answer_similar
from recsys_core.serving.retriever import Retriever


class ParsedRequest(NamedTuple):
    """A parsed request. is_similar: whether it is a request for similar items, not for recommendations."""

    request: Request
    is_similar: bool


Result = list[Answer] | Exception
"""The answers to the rows of a request, or the exception that prevented them: an InputError, or an exception from a bug."""


class ServedModel:
    """A retriever that answers batches of requests."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever

    def respond(self, parsed_requests: Sequence[ParsedRequest]) -> list[Result]:
        """Return the result of each request. Requests with the same options share a search."""
        results: list[Result] = [[] for _ in parsed_requests]
        positions_by_key: dict[object, list[int]] = {}
        for position, parsed_request in enumerate(parsed_requests):
            positions_by_key.setdefault(_group_key(parsed_request, position), []).append(position)
        for positions in positions_by_key.values():
            group_results = self._respond_together([parsed_requests[position] for position in positions])
            for position, result in zip(positions, group_results, strict=True):
                results[position] = result
        return results

    def warm_up(self) -> None:
        """Answer one request, so that the first real request does not wait until memory-mapped pages and code are loaded."""
        self._retriever.recommend([None], histories=[self._retriever.item_ids.ids(np.arange(1)).tolist()])

    def _respond_together(self, parsed_requests: Sequence[ParsedRequest]) -> list[Result]:
        if len(parsed_requests) == 1:
            return [self._respond_alone(parsed_requests[0])]
        try:
            answers = iter(
                self._answer(
                    _merge_requests([parsed.request for parsed in parsed_requests]), is_similar=parsed_requests[0].is_similar
                )
            )
        except Exception:  # from one request, which must not affect the other requests
            return [self._respond_alone(parsed_request) for parsed_request in parsed_requests]
        return [[next(answers) for _ in range(parsed_request.request.num_rows)] for parsed_request in parsed_requests]

    def _respond_alone(self, parsed_request: ParsedRequest) -> Result:
        try:
            return self._answer(parsed_request.request, is_similar=parsed_request.is_similar)
        except Exception as error:  # the server logs it unless it is an InputError
            return error

    def _answer(self, request: Request, *, is_similar: bool) -> list[Answer]:
        return answer_similar(self._retriever, request) if is_similar else answer(self._retriever, request)


def _group_key(parsed_request: ParsedRequest, position: int) -> object:
    """Return a value that is equal for requests that one search can answer.

    The options are compared as JSON, because 1 equals True in Python, but is another value in a filter.
    """
    is_similar, request = parsed_request.is_similar, parsed_request.request
    try:
        return is_similar, request.k, orjson.dumps(request.options, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # e.g. a filter with too many levels, which is rejected when the request is answered
        return position


def _merge_requests(requests: Sequence[Request]) -> Request:
    """Return one request with the rows of all requests. A column that a request does not have is None in its rows."""
    names = dict.fromkeys(name for request in requests for name in request.columns)
    columns: dict[str, list[Any]] = {
        name: [value for request in requests for value in request.columns.get(name) or [None] * request.num_rows]
        for name in names
    }
    return Request(columns, sum(request.num_rows for request in requests), requests[0].k, requests[0].options)
