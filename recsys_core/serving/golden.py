"""Golden queries: requests that a package stores with the expected answers. Loading the package repeats and compares them.

They detect errors that checksums do not detect: a query tower and an index of different versions, ids in another order, or a
version of a library that computes other scores.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recsys_core.config import Frozen
from recsys_core.errors import NightjarError, StageError, shown
from recsys_core.seeds import GOLDEN_QUERIES_SEED
from recsys_core.serving.answers import Answer
from recsys_core.serving.ids import Id, IdMap
from recsys_core.serving.requests import respond

if TYPE_CHECKING:
    from recsys_core.serving.retriever import Retriever

NUM_QUERIES = 8
"""Number of queries of each kind."""
K = 10
"""Number of items per answer."""
MAX_SCORE_DIFFERENCE = 1e-3
"""Largest difference of two scores, relative to the largest score of the answer. Processors round differently."""


class GoldenAnswer(Frozen):
    """The expected answer to one row of a request."""

    item_ids: tuple[Id, ...]
    scores: tuple[float, ...]
    fallback: str | None


class GoldenRequest(Frozen):
    """A request, in the form of recsys_core.serving.requests, and the expected answers to its rows."""

    request: dict[str, Any]
    answers: tuple[GoldenAnswer, ...]


class GoldenQueries(Frozen):
    """golden.json: requests of every kind that the package answers."""

    space_id: str
    requests: tuple[GoldenRequest, ...]


def write_golden(retriever: "Retriever", path: Path) -> None:
    """Write requests of every kind that the package answers, with the answers of `retriever`.

    The histories consist of random items, so that no user's history is written.
    """
    requests = _requests(retriever)
    golden_requests = tuple(
        GoldenRequest(
            request=request,
            answers=tuple(
                GoldenAnswer(item_ids=tuple(answer.item_ids), scores=tuple(answer.scores), fallback=answer.fallback)
                for answer in respond(retriever, request)
            ),
        )
        for request in requests
    )
    path.write_text(GoldenQueries(space_id=retriever.space_id, requests=golden_requests).model_dump_json(indent=1))


def verify_golden(retriever: "Retriever", path: Path) -> None:
    """Answer the golden queries of a package; raise StageError if an answer differs from the expected answer."""
    try:
        golden_queries = GoldenQueries.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StageError(f"{path}: cannot be read ({type(error).__name__}: {error}); package the model again") from error
    if golden_queries.space_id != retriever.space_id:
        raise StageError(
            f"{path}: the queries are of the space_id {golden_queries.space_id}, but the package has {retriever.space_id}; "
            "package the model again"
        )
    for golden_request in golden_queries.requests:
        try:
            answers = respond(retriever, golden_request.request)
        except NightjarError as error:
            raise StageError(f"{path}: the request {shown(golden_request.request)} is rejected: {error}") from error
        for row, (answer, expected_answer) in enumerate(zip(answers, golden_request.answers, strict=True)):
            if (problem := _difference_text(answer, expected_answer)) is not None:
                raise StageError(
                    f"{path}: row {row} of the request {shown(golden_request.request)}: {problem}; the query tower, the index "
                    "and the ids are of different versions, or a library computes other scores; package the model again, or "
                    "install the versions in its requirements.txt"
                )


def golden_vectors(retriever: "Retriever") -> NDArray[np.float32]:
    """Return the query vectors of the golden queries that the model ranks, [number of queries, D]."""
    vectors = [
        answer.query_vector
        for request in _requests(retriever)
        for answer in respond(retriever, request | {"params": {"k": 1, "with_vectors": True}})
        if answer.fallback != "popularity"
    ]
    return np.array(vectors, np.float32).reshape(-1, retriever.package.dim)


def _difference_text(answer: Answer, expected_answer: GoldenAnswer) -> str | None:
    """Describe how an answer differs from the expected answer; None if only items with nearly equal scores change places."""
    if (
        answer.error is not None
        or answer.fallback != expected_answer.fallback
        or len(answer.item_ids) != len(expected_answer.item_ids)
    ):
        actual_text = answer.error or f"{len(answer.item_ids)} items from {answer.fallback or 'the model'}"
        expected_text = f"{len(expected_answer.item_ids)} items from {expected_answer.fallback or 'the model'}"
        return f"the answer has {actual_text}, but {expected_text} are expected"
    if not expected_answer.scores:
        return None
    tolerance = MAX_SCORE_DIFFERENCE * max(abs(score) for score in expected_answer.scores)
    score_by_id = dict(zip(answer.item_ids, answer.scores, strict=True))
    for item_id, expected_score in zip(expected_answer.item_ids, expected_answer.scores, strict=True):
        # A missing item is allowed if an item with nearly the same score has replaced it at the end of the answer.
        actual_score = score_by_id.get(item_id, answer.scores[-1])
        if not abs(actual_score - expected_score) <= tolerance:
            actual_text = f"the score {actual_score:g}" if item_id in score_by_id else "no place in the answer"
            return f"item {shown(item_id)} has {actual_text}, but the score {expected_score:g} is expected"
    return None


def _requests(retriever: "Retriever") -> list[dict[str, Any]]:
    """Return one request of each kind that the package answers."""
    params, num_items = {"k": K}, len(retriever.item_ids)
    item_rows = np.random.default_rng(GOLDEN_QUERIES_SEED).permutation(num_items)[: NUM_QUERIES * NUM_QUERIES]
    item_ids = retriever.item_ids.ids(item_rows).tolist()
    # History i has 2 i + 1 items, which are in no other history. In a small catalogue, the last histories are empty.
    history_rows = [{"history": item_ids[index**2 : (index + 1) ** 2]} for index in range(NUM_QUERIES)]
    requests: list[dict[str, Any]] = [
        {"rows": [*history_rows, {"history": []}, {}], "params": params},
        {"inputs": {"item_id": _spread_ids(retriever.item_ids)}, "params": params},
        {"rows": history_rows, "params": params | {"exclude": item_ids[:K], "exclude_seen": False}},
    ]
    if len(retriever.user_ids):
        user_ids = _spread_ids(retriever.user_ids)
        requests.append({"rows": [{"user_id": user_id} for user_id in user_ids], "params": params})
    if (segment_values := retriever.segment_values(NUM_QUERIES)) is not None:
        segment_column, values = segment_values
        requests.append({"rows": [{segment_column: value} for value in values], "params": params})
    for column in retriever.items.filter_columns[:1]:
        frequent_value = retriever.items.most_frequent(column)
        if frequent_value is not None:
            requests.append({"rows": [*history_rows, {}], "params": params | {"filter": {column: {"in": [frequent_value]}}}})
    return requests


def _spread_ids(ids: IdMap) -> Sequence[Id]:
    """Return at most NUM_QUERIES ids at equal distances, from the first id to the last."""
    rows = np.unique(np.linspace(0, len(ids) - 1, NUM_QUERIES).astype(np.int64))
    spread_ids: list[Id] = ids.ids(rows).tolist()
    return spread_ids
