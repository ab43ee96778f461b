"""Requests for recommendations and their answers, without MLflow and HTTP."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys_core.errors import InputError, shown
from recsys_core.serving.ids import Id, is_missing

if TYPE_CHECKING:
    from recsys_core.serving.retriever import Retriever

_DEFAULT_PARAMS: dict[str, Any] = {"k": 10, "exclude_stored_history": True}


class Request(NamedTuple):
    """A request for recommendations, with one row per user.

    Attributes:
        user_ids: the value of each row; an invalid value is reported in the answer of its row.
        histories: the value of each row; None if no row has a history.
        k, exclude_stored_history: see Retriever.recommend.
    """

    user_ids: list[Any]
    histories: list[Any] | None
    k: int
    exclude_stored_history: bool


class Answer(NamedTuple):
    """Recommended items and scores for one row of a request, best first. An invalid row has an error and no items."""

    item_ids: list[Id]
    scores: list[float]
    error: str | None


def parse(request: Mapping[str, Any]) -> Request:
    """Parse a request of the form {"inputs": {"user_id": [...], "history": [...]}, "params": {"k": 10}}.

    `history` and `params` are optional. A history lists item ids in time order and replaces the user's history in the log. If
    it is null, the history in the log is used.

    Raises:
        InputError: a column or a param is missing, unknown or invalid, so no row can be answered.
    """
    inputs, params = request.get("inputs"), request.get("params") or {}
    if not isinstance(inputs, Mapping) or not isinstance(inputs.get("user_id"), list):
        raise InputError("inputs: the column user_id is missing; pass a list with one user id per row")
    user_ids, histories = inputs["user_id"], inputs.get("history")
    if histories is not None and (not isinstance(histories, list) or len(histories) != len(user_ids)):
        raise InputError(
            f"inputs: history is not a list of {len(user_ids)} histories, one per user; use null for a user without one"
        )
    if unknown_params := [str(name) for name in params if name not in _DEFAULT_PARAMS]:
        raise InputError(f"params: unknown {', '.join(unknown_params)}; the model has {list(_DEFAULT_PARAMS)}")
    for name, value in params.items():
        if value is None:
            raise InputError(f"params: {name} is null; set a value, or leave it out")
        if isinstance(value, bool) != isinstance(_DEFAULT_PARAMS[name], bool) or not isinstance(value, int):
            expected_type = type(_DEFAULT_PARAMS[name]).__name__
            raise InputError(f"params: {name} is {shown(value)}; it must be of type {expected_type}")
    return Request(user_ids, histories, **_DEFAULT_PARAMS | dict(params))


def answer(retriever: "Retriever", request: Request) -> list[Answer]:
    """Return one answer per row. A row with an invalid value gets an error, and the other rows are served.

    Raises:
        InputError: k is below 1.
    """
    histories = [None] * len(request.user_ids) if request.histories is None else request.histories
    valid_users, valid_histories = [], []
    errors: dict[int, str] = {}
    for row, (user_id, history) in enumerate(zip(request.user_ids, histories, strict=True)):
        try:
            retriever.user_ids.parse([user_id])
            valid_histories.append(_parse_history(retriever, history))
            valid_users.append(user_id)
        except InputError as error:
            errors[row] = str(error)
    item_ids, scores = retriever.recommend(
        valid_users,
        request.k,
        histories=None if request.histories is None else valid_histories,
        exclude_stored_history=request.exclude_stored_history,
    )
    valid_answers = (Answer(ids_K.tolist(), score_K.tolist(), None) for ids_K, score_K in zip(item_ids, scores, strict=True))
    return [Answer([], [], errors[row]) if row in errors else next(valid_answers) for row in range(len(request.user_ids))]


def _parse_history(retriever: "Retriever", history: Any) -> list[Id] | None:
    if is_missing(history):
        return None
    if not isinstance(history, list | tuple | np.ndarray):
        raise InputError(f"history is of type {type(history).__name__}; pass a list of item ids, or leave it out")
    try:
        retriever.item_ids.parse(history)
    except InputError as error:
        raise InputError(f"history: {error}") from None
    return list(history)
