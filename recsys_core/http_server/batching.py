"""Batches of concurrent requests. One thread answers a batch with few searches, while the event loop reads the next requests.

While a batch is answered, new requests of one or more rows wait in a bounded queue. The next batch has as many of these
requests as fit into `max_batch_rows` rows, but at least one. Batches therefore grow with the load.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson

from recsys_core.http_server.config import ServeConfig
from recsys_core.serving.answers import Answer
from recsys_core.serving.requests import Request, answer, answer_similar
from recsys_core.serving.retriever import Retriever


class ParsedRequest(NamedTuple):
    """A parsed request. is_similar: whether it is a request for similar items, not for recommendations."""

    request: Request
    is_similar: bool


Result = list[Answer] | Exception
"""The answers to the rows of a request, or the exception that prevented them. An exception other than InputError is a bug."""


class QueueFullError(Exception):
    """The queue has no room for another request."""


@dataclass(eq=False)
class _WaitingRequest:
    """A request in the queue, and the future that receives its result."""

    parsed_request: ParsedRequest
    result_future: asyncio.Future[Result]


class Batcher:
    """Queue of requests, and the thread that answers them.

    Args:
        respond: function that the thread calls to answer a batch. It returns one result per request.
        observe: function that is called with the number of rows of each batch.
    """

    def __init__(
        self, respond: Callable[[Sequence[ParsedRequest]], list[Result]], *, limits: ServeConfig, observe: Callable[[int], None]
    ) -> None:
        self._respond, self._limits, self._observe = respond, limits, observe
        self._queue: deque[_WaitingRequest] = deque()
        self._arrival_event = asyncio.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="retriever")
        self._run_task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def start(self) -> None:
        """Start to answer requests."""
        self._run_task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop, and cancel the requests that still wait."""
        assert self._run_task is not None
        self._run_task.cancel()
        with suppress(asyncio.CancelledError):
            await self._run_task
        for waiting_request in self._queue:
            waiting_request.result_future.cancel()
        self._executor.shutdown(wait=True)

    async def submit(self, request: ParsedRequest) -> Result:
        """Wait for the result of a request.

        Raises:
            QueueFullError: too many requests wait.
            TimeoutError: the result does not arrive within `timeout_s`.
        """
        if len(self._queue) >= self._limits.max_queued_requests:
            raise QueueFullError
        waiting_request = _WaitingRequest(request, asyncio.get_running_loop().create_future())
        self._queue.append(waiting_request)
        self._arrival_event.set()
        return await asyncio.wait_for(waiting_request.result_future, self._limits.timeout_s)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrival_event.wait()
            if self._limits.max_wait_ms and self._num_waiting_rows() < self._limits.max_batch_rows:
                await asyncio.sleep(self._limits.max_wait_ms / 1000)
            batch = self._next_batch()
            if not self._queue:
                self._arrival_event.clear()
            if batch:
                await self._answer(batch, loop)

    async def _answer(self, batch: Sequence[_WaitingRequest], loop: asyncio.AbstractEventLoop) -> None:
        self._observe(sum(waiting_request.parsed_request.request.num_rows for waiting_request in batch))
        try:
            results = await loop.run_in_executor(
                self._executor, self._respond, [waiting_request.parsed_request for waiting_request in batch]
            )
        except Exception as error:  # a bug; only the requests of this batch fail
            for waiting_request in batch:
                if not waiting_request.result_future.done():
                    waiting_request.result_future.set_exception(error)
            return
        for waiting_request, result in zip(batch, results, strict=True):
            if not waiting_request.result_future.done():  # otherwise the request has timed out
                waiting_request.result_future.set_result(result)

    def _num_waiting_rows(self) -> int:
        return sum(waiting_request.parsed_request.request.num_rows for waiting_request in self._queue)

    def _next_batch(self) -> list[_WaitingRequest]:
        """Remove the next batch from the queue, and drop requests that have timed out."""
        batch: list[_WaitingRequest] = []
        num_rows = 0
        while self._queue:
            num_rows += self._queue[0].parsed_request.request.num_rows
            if batch and num_rows > self._limits.max_batch_rows:
                break
            waiting_request = self._queue.popleft()
            if waiting_request.result_future.done():
                num_rows -= waiting_request.parsed_request.request.num_rows
            else:
                batch.append(waiting_request)
        return batch


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
                    _merge_requests([parsed_request.request for parsed_request in parsed_requests]),
                    is_similar=parsed_requests[0].is_similar,
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
    column_names = dict.fromkeys(column for request in requests for column in request.columns)
    columns: dict[str, list[Any]] = {
        column: [value for request in requests for value in request.columns.get(column) or [None] * request.num_rows]
        for column in column_names
    }
    return Request(columns, sum(request.num_rows for request in requests), requests[0].k, requests[0].options)
