"""Requests for recommendations and their answers, without MLflow and HTTP.

A request is {"inputs": {column: [value of each row]}, "params": {...}}, or {"rows": [{column: value}], "params": {...}}.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys_core.errors import InputError, shown
from recsys_core.serving.answers import Answer, Recommendations
from recsys_core.serving.description import ITEM_COLUMN, QUERY_COLUMNS
from recsys_core.serving.ids import Id, is_list, is_missing

if TYPE_CHECKING:
    from recsys_core.serving.queries import SearchOptions
    from recsys_core.serving.retriever import Retriever

_TYPES_BY_PARAM: dict[str, tuple[type, ...]] = {
    "k": (int,),
    "exclude_seen": (bool,),
    "exclude_stored_history": (bool,),
    "exclude": (list, tuple, np.ndarray),
    "min_score": (int, float),
    "popularity_weight": (int, float),
    "filter": (Mapping, str),
    "with_vectors": (bool,),
}
DEFAULT_K = 10
PARAMS = tuple(_TYPES_BY_PARAM)
"""Names of the params that a request can have."""
_NULLABLE_PARAMS = ("exclude", "min_score", "popularity_weight", "filter")
"""Params that may be null."""


def respond(retriever: "Retriever", request: Mapping[str, Any]) -> list[Answer]:
    """Parse and answer a request: for similar items if it has the column item_id, for recommendations otherwise.

    Raises:
        InputError: the request is invalid, so no row can be answered.
    """
    parsed_request = parse(request)
    if ITEM_COLUMN in parsed_request.columns:
        return answer_similar(retriever, _require_only_item_ids(parsed_request))
    return answer(retriever, parsed_request)


class Request(NamedTuple):
    """A request for recommendations, with one row per query.

    Attributes:
        columns: values of each row by column: user_id, history and features. An invalid value is reported in the answer of its
            row.
        k, options: see Retriever.recommend.
    """

    columns: dict[str, list[Any]]
    num_rows: int
    k: int
    options: "SearchOptions"


def parse(request: Mapping[str, Any]) -> Request:
    """Parse a request with params, and the columns user_id (id or null), history (list of item ids or null) and features.

    A history lists item ids in time order and replaces the user's history from the log. If it is null, the history from the log
    is used. A row without user_id, history and features gets the most popular items.

    Raises:
        InputError: a column or a param is missing, unknown or invalid, so no row can be answered.
    """
    k, options = _parse_params(request.get("params"))
    columns, num_rows = _parse_columns(request)
    return Request(columns, num_rows, k, options)


def parse_similar(request: Mapping[str, Any]) -> Request:
    """Parse a request for similar items, with the column item_id and params. Raises InputError if the request is invalid."""
    return _require_only_item_ids(parse(request))


def _require_only_item_ids(request: Request) -> Request:
    if request.columns.keys() != {ITEM_COLUMN}:
        raise InputError(f"a request for similar items has only the column item_id, not {sorted(request.columns)}")
    return request


def _parse_columns(request: Mapping[str, Any]) -> tuple[dict[str, list[Any]], int]:
    rows, inputs = request.get("rows"), request.get("inputs")
    if (rows is None) == (inputs is None):
        raise InputError("a request has either inputs (a list of values for each column) or rows (a list of objects)")
    if rows is not None:
        if not isinstance(rows, Sequence) or isinstance(rows, str) or not all(isinstance(row, Mapping) for row in rows):
            raise InputError("rows is not a list of objects; pass one object with user_id, history or features per row")
        column_names = dict.fromkeys(str(name) for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in column_names}, len(rows)
    if not isinstance(inputs, Mapping) or not inputs:
        raise InputError("inputs: there is no column; pass user_id or history, a list with one value per row")
    for name, values in inputs.items():
        if not isinstance(values, list):
            raise InputError(f"inputs: {name} is of type {type(values).__name__}; pass a list with one value per row")
    num_rows = max(len(values) for values in inputs.values())
    for name, values in inputs.items():
        if len(values) != num_rows:
            raise InputError(f"inputs: {name} has {len(values)} values, but another column has {num_rows}; pass one per row")
    return {str(name): values for name, values in inputs.items()}, num_rows


def _parse_params(params: Any) -> "tuple[int, SearchOptions]":
    """Return k, and the options that the request sets."""
    if params is None:
        return DEFAULT_K, {}
    if not isinstance(params, Mapping):
        raise InputError(f"params is of type {type(params).__name__}; pass an object")
    if unknown_params := [str(name) for name in params if name not in PARAMS]:
        raise InputError(f"params: unknown {', '.join(unknown_params)}; the model has {list(PARAMS)}")
    options: dict[str, Any] = {}
    for name, value in params.items():
        if value is None and name not in _NULLABLE_PARAMS:
            raise InputError(f"params: {name} is null; set a value, or leave it out")
        if value is not None:
            options[name] = _parse_param(name, value)
    k = options.pop("k", DEFAULT_K)
    return k, options  # type: ignore[return-value]  # the types have been checked


def _parse_param(name: str, value: Any) -> Any:
    allowed_types = _TYPES_BY_PARAM[name]
    if isinstance(value, bool) != (allowed_types == (bool,)) or not isinstance(value, allowed_types):
        expected_type = " or ".join(allowed_type.__name__ for allowed_type in allowed_types)
        raise InputError(f"params: {name} is {shown(value)}; it must be of type {expected_type}")
    if isinstance(value, float) and math.isnan(value):
        raise InputError(f"params: {name} is NaN; pass a number")
    if name == "filter" and isinstance(value, str):
        try:
            value = json.loads(value) if value else {}
        except ValueError as error:
            raise InputError(f"params: filter is not a JSON object ({error})") from None
        if not isinstance(value, dict):
            raise InputError(f"params: filter is {shown(value)}; it must be a JSON object")
    return value


def answer(retriever: "Retriever", request: Request) -> list[Answer]:
    """Return one answer per row. A row with an invalid value gets an error; all other rows get recommendations.

    Raises:
        InputError: a param is invalid, or a column is unknown.
    """
    features = {name: values for name, values in request.columns.items() if name not in QUERY_COLUMNS}
    retriever.request_features.require_known(features)
    user_ids, user_errors = _parse_user_ids(retriever, request)
    histories, history_errors = _parse_histories(retriever, request)
    errors = dict(retriever.request_features.invalid_rows(features, num_rows=request.num_rows)) if features else {}
    errors |= history_errors | user_errors
    valid_rows = [row for row in range(request.num_rows) if row not in errors] if errors else range(request.num_rows)

    def at_valid_rows(values: Sequence[Any]) -> Sequence[Any]:
        return [values[row] for row in valid_rows] if errors else values

    recommendations = retriever.recommend(
        at_valid_rows([None] * request.num_rows if user_ids is None else user_ids),
        request.k,
        histories=None if histories is None else at_valid_rows(histories),
        features={name: at_valid_rows(values) for name, values in features.items()},
        **request.options,
    )
    return _with_errors(recommendations, errors, num_rows=request.num_rows)


def answer_similar(retriever: "Retriever", request: Request) -> list[Answer]:
    """Return the similar items of each item of a request. An invalid or unknown item id gets an error.

    Raises:
        InputError: a param is invalid.
    """
    item_ids = request.columns[ITEM_COLUMN]
    errors = _id_errors(retriever.item_ids.parse, item_ids)
    errors |= {row: f"{ITEM_COLUMN} is missing" for row, item_id in enumerate(item_ids) if item_id is None}
    valid_ids = [item_id for row, item_id in enumerate(item_ids) if row not in errors]
    return _with_errors(retriever.similar(valid_ids, request.k, **request.options), errors, num_rows=request.num_rows)


def _with_errors(recommendations: Recommendations, errors: Mapping[int, str], *, num_rows: int) -> list[Answer]:
    """Return the error or the recommendations of each row. `recommendations` has only the valid rows, in order."""
    if not errors:
        return list(recommendations)
    valid_answers = iter(recommendations)
    version, space_id = recommendations.version, recommendations.space_id
    return [
        Answer([], [], version, space_id, error=errors[row]) if row in errors else next(valid_answers)
        for row in range(num_rows)
    ]


def _parse_user_ids(retriever: "Retriever", request: Request) -> tuple[list[Any] | None, dict[int, str]]:
    """Return the user ids, with None for a missing id, and the errors by row.

    The ids are None if the request has no user ids, or if the package stores no users.
    """
    raw_ids = request.columns.get("user_id")
    if raw_ids is None or retriever.package.users == "none":
        return None, {}
    user_ids = [None if is_missing(raw_id) else raw_id for raw_id in raw_ids]
    return user_ids, _id_errors(retriever.user_ids.parse, user_ids)


def _parse_histories(retriever: "Retriever", request: Request) -> tuple[list[list[Id] | None] | None, dict[int, str]]:
    """Return the histories, with None for a missing history, and the errors by row."""
    raw_histories = request.columns.get("history")
    if raw_histories is None:
        return None, {}
    histories: list[Any] = [None if is_missing(raw_history) else raw_history for raw_history in raw_histories]
    errors = {
        row: f"history is of type {type(history).__name__}; pass a list of item ids, or leave it out"
        for row, history in enumerate(histories)
        if history is not None and not is_list(history)
    }
    histories = [None if row in errors else history for row, history in enumerate(histories)]
    try:
        retriever.item_ids.parse([item_id for history in histories if history is not None for item_id in history])
    except InputError:
        for row, history in enumerate(histories):
            try:
                retriever.item_ids.parse([] if history is None else history)
            except InputError as error:
                errors[row] = f"history: {error}"
    return histories, errors


def _id_errors(parse_ids: Any, values: Sequence[Any]) -> dict[int, str]:
    """Return the error of each value that is neither None nor a valid id, by its index in `values`."""
    try:
        parse_ids([value for value in values if value is not None])
    except InputError:
        errors = {}
        for index, value in enumerate(values):
            try:
                parse_ids([value] if value is not None else [])
            except InputError as error:
                errors[index] = str(error)
        return errors
    return {}
