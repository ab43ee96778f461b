"""Batches of concurrent requests. One thread answers a batch, while the event loop reads the next requests.

While a search is in progress, new requests wait in a bounded queue. The next search answers them all, up to a number of
rows, so batches grow with the load.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from recsys_core.http_server.config import ServeConfig
from recsys_core.http_server.served_model import Query, Result


class QueueFullError(Exception):
    """The queue has no room for another request."""


@dataclass(eq=False)
class _WaitingQuery:
    """A query in the queue, and the future that receives its result."""

    query: Query
    result: asyncio.Future[Result]


class Batcher:
    """Queue of requests, and the thread that answers them.

    Args:
        respond: function that answers a batch. The thread calls it. The result of a request without an answer is an exception.
        observe: function that is called with the number of rows of each batch.
    """

    def __init__(
        self, respond: Callable[[Sequence[Query]], list[Result]], *, limits: ServeConfig, observe: Callable[[int], None]
    ) -> None:
        self._respond, self._limits, self._observe = respond, limits, observe
        self._queue: deque[_WaitingQuery] = deque()
        self._arrival_event = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="retriever")
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def start(self) -> None:
        """Start to answer requests."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop, and cancel the requests that still wait."""
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        for waiting_query in self._queue:
            waiting_query.result.cancel()
        self._thread.shutdown(wait=True)

    async def submit(self, query: Query) -> Result:
        """Wait for the result of a query.

        Raises:
            QueueFullError: too many requests wait.
            TimeoutError: the result does not arrive within `timeout_s`.
        """
        if len(self._queue) >= self._limits.max_queued_requests:
            raise QueueFullError
        waiting_query = _WaitingQuery(query, asyncio.get_running_loop().create_future())
        self._queue.append(waiting_query)
        self._arrival_event.set()
        return await asyncio.wait_for(waiting_query.result, self._limits.timeout_s)

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

    async def _answer(self, batch: Sequence[_WaitingQuery], loop: asyncio.AbstractEventLoop) -> None:
        self._observe(sum(waiting_query.query.request.num_rows for waiting_query in batch))
        try:
            results = await loop.run_in_executor(self._thread, self._respond, [waiting_query.query for waiting_query in batch])
        except Exception as error:  # a bug; only the requests of this batch fail
            for waiting_query in batch:
                if not waiting_query.result.done():
                    waiting_query.result.set_exception(error)
            return
        for waiting_query, result in zip(batch, results, strict=True):
            if not waiting_query.result.done():  # otherwise the request has timed out
                waiting_query.result.set_result(result)

    def _num_waiting_rows(self) -> int:
        return sum(waiting_query.query.request.num_rows for waiting_query in self._queue)

    def _next_batch(self) -> list[_WaitingQuery]:
        """Remove the next batch from the queue, and drop requests that have timed out."""
        batch: list[_WaitingQuery] = []
        num_rows = 0
        while self._queue:
            num_rows += self._queue[0].query.request.num_rows
            if batch and num_rows > self._limits.max_batch_rows:
                break
            waiting_query = self._queue.popleft()
            if waiting_query.result.done():
                num_rows -= waiting_query.query.request.num_rows
            else:
                batch.append(waiting_query)
        return batch
