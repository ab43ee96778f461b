"""Batches of concurrent requests. One thread answers a batch, while the event loop reads the next requests.

While a batch is answered, new requests wait in a bounded queue. The next batch has as many of these requests as fit into
`max_batch_rows` rows, but at least one. A request can have several rows. Batches therefore grow with the load.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from recsys_core.http_server.config import ServeConfig
from recsys_core.http_server.served_model import ParsedRequest, Result


class QueueFullError(Exception):
    """The queue has no room for another request."""


@dataclass(eq=False)
class _WaitingRequest:
    """A request in the queue, and the future that receives its result."""

    parsed: ParsedRequest
    result: asyncio.Future[Result]


class Batcher:
    """Queue of requests, and the thread that answers them.

    Args:
        respond: function that answers a batch. The thread calls it. It returns one result per request: the
            answers, or an exception object.
        observe: function that is called with the number of rows of each batch.
    """

    def __init__(
        self, respond: Callable[[Sequence[ParsedRequest]], list[Result]], *, limits: ServeConfig, observe: Callable[[int], None]
    ) -> None:
        self._respond, self._limits, self._observe = respond, limits, observe
        self._queue: deque[_WaitingRequest] = deque()
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
        for waiting_request in self._queue:
            waiting_request.result.cancel()
        self._thread.shutdown(wait=True)

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
        return await asyncio.wait_for(waiting_request.result, self._limits.timeout_s)

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
        self._observe(sum(waiting_request.parsed.request.num_rows for waiting_request in batch))
        try:
            results = await loop.run_in_executor(
                self._thread, self._respond, [waiting_request.parsed for waiting_request in batch]
            )
        except Exception as error:  # a bug; only the requests of this batch fail
            for waiting_request in batch:
                if not waiting_request.result.done():
                    waiting_request.result.set_exception(error)
            return
        for waiting_request, result in zip(batch, results, strict=True):
            if not waiting_request.result.done():  # otherwise the request has timed out
                waiting_request.result.set_result(result)

    def _num_waiting_rows(self) -> int:
        return sum(waiting_request.parsed.request.num_rows for waiting_request in self._queue)

    def _next_batch(self) -> list[_WaitingRequest]:
        """Remove the next batch from the queue, and drop requests that have timed out."""
        batch: list[_WaitingRequest] = []
        num_rows = 0
        while self._queue:
            num_rows += self._queue[0].parsed.request.num_rows
            if batch and num_rows > self._limits.max_batch_rows:
                break
            waiting_request = self._queue.popleft()
            if waiting_request.result.done():
                num_rows -= waiting_request.parsed.request.num_rows
            else:
                batch.append(waiting_request)
        return batch
