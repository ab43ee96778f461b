"""Batches of concurrent requests: shared searches, a bounded queue, timeouts, and errors that affect one request."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import orjson
import pytest

from recsys_core.errors import InputError
from recsys_core.http_server.batching import Batcher, ParsedRequest, QueueFullError, Result, ServedModel
from recsys_core.http_server.config import ServeConfig
from recsys_core.serving.answers import Answer
from recsys_core.serving.requests import parse
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.serving.conftest import USER_IDS


def request_of(user_id: object, k: int = 3) -> ParsedRequest:
    return ParsedRequest(parse({"rows": [{"user_id": user_id}], "params": {"k": k}}), is_similar=False)


class BlockedModel:
    """A model that stores the size of each batch, and answers when `may_answer` is set."""

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []
        self.has_begun, self.may_answer = threading.Event(), threading.Event()

    def respond(self, queries: Sequence[ParsedRequest]) -> list[Result]:
        self.batch_sizes.append(len(queries))
        self.has_begun.set()
        assert self.may_answer.wait(30)
        return [[Answer([], [], "1", "s")] for _ in queries]


def run_with_batcher(use_batcher: Callable[[Batcher, BlockedModel], object], **settings: object) -> BlockedModel:
    """Run the coroutine function `use_batcher` with a started batcher. Return the model with its batch sizes."""
    model = BlockedModel()

    async def main() -> None:
        batcher = Batcher(model.respond, limits=ServeConfig.model_validate(settings), observe=lambda num_rows: None)
        batcher.start()
        try:
            await use_batcher(batcher, model)  # type: ignore[misc]
        finally:
            model.may_answer.set()
            await batcher.stop()

    asyncio.run(main())
    return model


async def wait_until_begun(model: BlockedModel) -> None:
    """Wait until the model has received its first batch."""
    await asyncio.to_thread(model.has_begun.wait, 30)


def test_requests_that_arrive_during_a_search_share_the_next_search() -> None:
    async def use_batcher(batcher: Batcher, model: BlockedModel) -> None:
        first_task = asyncio.create_task(batcher.submit(request_of(1)))
        await wait_until_begun(model)
        later_tasks = [asyncio.create_task(batcher.submit(request_of(user_id))) for user_id in range(5)]
        await asyncio.sleep(0)
        model.may_answer.set()
        await asyncio.gather(first_task, *later_tasks)

    assert run_with_batcher(use_batcher, max_batch_rows=4).batch_sizes == [1, 4, 1]


def test_a_request_is_refused_if_the_queue_is_full() -> None:
    async def use_batcher(batcher: Batcher, model: BlockedModel) -> None:
        tasks = [asyncio.create_task(batcher.submit(request_of(1)))]
        await wait_until_begun(model)
        tasks += [asyncio.create_task(batcher.submit(request_of(2))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await batcher.submit(request_of(3))
        model.may_answer.set()
        await asyncio.gather(*tasks)

    run_with_batcher(use_batcher, max_queued_requests=2)


def test_a_request_that_times_out_in_the_queue_is_not_searched_later() -> None:
    async def use_batcher(batcher: Batcher, model: BlockedModel) -> None:
        first_task = asyncio.create_task(batcher.submit(request_of(1)))
        await wait_until_begun(model)
        with pytest.raises(TimeoutError):
            await batcher.submit(request_of(2))
        model.may_answer.set()
        with pytest.raises(TimeoutError):
            await first_task
        await batcher.submit(request_of(3))

    assert run_with_batcher(use_batcher, timeout_s=0.2).batch_sizes == [1, 1]  # without query 2


def test_each_request_of_a_batch_has_the_same_answer_as_alone(retriever: Retriever) -> None:
    requests = [request_of(USER_IDS[0]), request_of(USER_IDS[1], k=5), request_of(USER_IDS[2]), request_of("x")]
    results = ServedModel(retriever).respond(requests)
    for user_id, k, answers in zip(USER_IDS, (3, 5, 3), results, strict=False):
        assert not isinstance(answers, Exception)
        assert answers[0].item_ids == retriever.recommend([user_id], k)[0].item_ids
    (invalid_answer,) = results[3]  # type: ignore[misc]
    assert invalid_answer.error is not None and "'x'" in invalid_answer.error


def test_a_request_that_fails_does_not_fail_the_other_requests_of_its_batch(retriever: Retriever) -> None:
    request_with_unknown_column = ParsedRequest(
        parse({"rows": [{"user_id": USER_IDS[0], "colour": "red"}], "params": {"k": 3}}), is_similar=False
    )
    answers, error = ServedModel(retriever).respond([request_of(USER_IDS[0]), request_with_unknown_column])
    assert isinstance(answers, list) and answers[0].error is None
    assert isinstance(error, InputError) and "colour" in str(error)


def request_with_filter(item_filter: object) -> ParsedRequest:
    body = {"rows": [{"user_id": USER_IDS[0]}], "params": {"k": 3, "filter": item_filter}}
    return ParsedRequest(parse(body), is_similar=False)


@pytest.mark.parametrize(("valid_value", "invalid_value", "column"), [(True, 1, "is_new"), (1, True, "stock")])
def test_filters_by_one_and_by_true_do_not_share_a_search(
    retriever: Retriever, valid_value: object, invalid_value: object, column: str
) -> None:
    requests = [request_with_filter({column: value}) for value in (valid_value, invalid_value)]
    answers, error = ServedModel(retriever).respond(requests)
    assert isinstance(answers, list) and len(answers[0].item_ids) == 3
    assert isinstance(error, InputError) and f"{column!r}" in str(error)


def test_filters_with_too_many_levels_do_not_fail_other_requests_of_the_batch(retriever: Retriever) -> None:
    deep_filters = [orjson.loads('{"genre": ' + "[" * 1_000 + "]" * 1_000 + "}") for _ in range(2)]
    requests = [request_of(USER_IDS[0]), *map(request_with_filter, deep_filters)]
    answers, *errors = ServedModel(retriever).respond(requests)
    assert isinstance(answers, list) and len(answers[0].item_ids) == 3
    assert [type(error) for error in errors] == [InputError, InputError]
