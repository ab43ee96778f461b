"""Pydantic models of request and response bodies, which validate requests against the config and document the API."""

from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError, create_model

from recsys_core.errors import InputError, printable, shown
from recsys_core.http_server.access import RequestError
from recsys_core.http_server.config import ServeConfig
from recsys_core.serving.requests import DEFAULT_K

MAX_ID_CHARACTERS = 1_000
_INT64_LIMITS = Field(ge=-(2**63), lt=2**63)
Id = Annotated[StrictInt, _INT64_LIMITS] | Annotated[StrictStr, Field(max_length=MAX_ID_CHARACTERS)]
RECOMMEND_EXAMPLE = {"rows": [{"user_id": 42}, {"history": [7, 9]}], "params": {"k": 2}}
SIMILAR_EXAMPLE = {"rows": [{"item_id": 7}], "params": {"k": 2}}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class _Row(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Bodies(NamedTuple):
    """Body models of requests to `/recommend` and `/similar`."""

    recommend: type[BaseModel]
    similar: type[BaseModel]


class Prediction(_Body):
    """The items for one row of a request, best first. An invalid row has an error and no items."""

    item_ids: list[int | str] = Field(description="ids of the items, as in the log", examples=[[5, 8]])
    scores: list[float] = Field(
        description="score of each item: the inner product of query and item vector; with the fallback `popularity`, the share "
        "of the item in all events",
        examples=[[0.91, 0.88]],
    )
    version: str = Field(description="number of the version in the registry", examples=["7"])
    space_id: str = Field(description="id of the vector space of the query tower and the items", examples=["3f6c1f0a9b1e4d52"])
    fallback: str | None = Field(
        description="null: the model knows the user, or the request is for similar items; `history` and `features`: the user "
        "is unknown, and the items come from the row; `popularity`: the most popular items, because the model reads nothing of "
        "the row",
        examples=[None],
    )
    num_unknown_items: int = Field(description="number of items of the history that are not in the catalogue", examples=[0])
    error: str | None = Field(description="reason why the row has no items", examples=[None])
    query_vector: list[float] | None = Field(None, description="vector of the query; only with `with_vectors`")
    item_vectors: list[list[float]] | None = Field(None, description="vector of each item; only with `with_vectors`")


class Predictions(_Body):
    """One prediction per row of the request, in the same order, all of the same version."""

    predictions: list[Prediction]


class Problem(_Body):
    """The reason why a request has no answer, in one sentence."""

    error: str = Field(description="the reason", examples=["params.k is 0; it must be greater than or equal to 1"])


class RegistryState(_Body):
    """State of the registry, from which the server reads the version of the champion."""

    answered_at: str = Field(description="time of the last answer (UTC)", examples=["2026-11-25T02:15:00Z"])
    down_since: str | None = Field(description="time since which the registry does not answer; null if it answers")
    problem: str | None = Field(description="why the registry does not answer")


class Readiness(_Body):
    """The served version, and why a newer champion is not served."""

    status: str = Field(description="`ready`", examples=["ready"])
    version: str | None = Field(description="number of the served version", examples=["7"])
    problem: str | None = Field(description="why the champion of the registry is not served; null if it is served")
    registry: RegistryState


def request_bodies(limits: ServeConfig) -> Bodies:
    """Return the models of request bodies with these limits."""
    params_model = _model("Params", _Body, "Options of a request, which apply to all rows.", _param_fields(limits))
    history_type = Annotated[
        list[Id] | None,
        Field(description="item ids in time order, which replace the user's history in the log", max_length=limits.max_history),
    ]
    user_id_type = Annotated[Id | None, Field(description="id of the user, as in the log")]
    recommend_row = _model(
        "RecommendRow",
        _Row,
        "One query. Any other field is a feature of the user or of the context, named like its column.",
        {
            "user_id": (user_id_type, None),
            "history": (history_type, None),
        },
    )
    similar_row = _model("SimilarRow", _Body, "One item.", {"item_id": (Id, Field(description="id of the item"))})
    return Bodies(
        _request_model("RecommendRequest", recommend_row, params_model, limits=limits, example=RECOMMEND_EXAMPLE),
        _request_model("SimilarRequest", similar_row, params_model, limits=limits, example=SIMILAR_EXAMPLE),
    )


def _param_fields(limits: ServeConfig) -> dict[str, Any]:
    """Return the type and the default of each param."""
    exclude_type = Annotated[list[Id] | None, Field(description="ids of items to leave out", max_length=limits.max_excluded)]
    min_score_type = Annotated[StrictFloat | StrictInt | None, Field(description="leave out items with a lower score")]
    popularity_weight_type = Annotated[
        StrictFloat | StrictInt | None,
        Field(description="weight of the popularity of an item in its score, for a model with `model.popularity`"),
    ]
    filter_type = Annotated[
        dict[str, Any] | None,
        Field(
            description="conditions by filter column, which all have to hold; operators: in, ge, gt, le, lt, since",
            examples=[{"genre": {"in": ["rock"]}, "price": {"lt": 20}}],
        ),
    ]
    return {
        "k": (Annotated[StrictInt, Field(ge=1, le=limits.max_k, description="number of items per row")], _default_k(limits)),
        "exclude_seen": (Annotated[StrictBool, Field(description="leave out the items of the histories")], True),
        "exclude_stored_history": (
            Annotated[
                StrictBool, Field(description="leave out the items of the stored history even if the row has another history")
            ],
            True,
        ),
        "exclude": (exclude_type, None),
        "min_score": (min_score_type, None),
        "popularity_weight": (popularity_weight_type, None),
        "filter": (filter_type, None),
        "with_vectors": (Annotated[StrictBool, Field(description="also return query and item vectors")], False),
    }


def _model(name: str, base: type[BaseModel], description: str, fields: dict[str, Any]) -> type[BaseModel]:
    model: type[BaseModel] = create_model(name, __base__=base, __doc__=description, **fields)
    return model


def _request_model(
    name: str, row_model: type[BaseModel], params_model: type[BaseModel], *, limits: ServeConfig, example: dict[str, Any]
) -> type[BaseModel]:
    rows_field = Field(min_length=1, max_length=limits.max_rows, description="one object per query")
    params_field = Field(None, description=f"options; without them, each row gets {_default_k(limits)} items")
    list_type: Any = list
    fields = {"rows": (list_type[row_model], rows_field), "params": (params_model | None, params_field)}
    body_model = _model(name, _Body, "Rows, and options for all of them.", fields)
    body_model.model_config["json_schema_extra"] = {"examples": [example]}
    return body_model


def parse_body(content: bytes, model: type[BaseModel], *, limits: ServeConfig) -> dict[str, Any]:
    """Return the JSON object of a body after its validation. A missing `k` is added.

    Raises:
        RequestError: the body is not JSON. NaN and Infinity are not JSON.
        InputError: the object does not fit the model or exceeds a limit. The message names the field.
    """
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        example = orjson.dumps(RECOMMEND_EXAMPLE).decode()
        raise RequestError(400, f"the body is not JSON ({error}); send an object such as {example}") from None
    try:
        model.model_validate(body)
    except ValidationError as error:
        raise InputError(_first_problem(error)) from None
    body["params"] = {"k": _default_k(limits)} | (body.get("params") or {})
    num_rows, k = len(body["rows"]), body["params"]["k"]
    if num_rows * k > limits.max_results:
        raise InputError(
            f"{num_rows} rows with k = {k} are {num_rows * k} items; at most {limits.max_results} are allowed; send fewer rows"
        )
    validated_body: dict[str, Any] = body
    return validated_body


def _default_k(limits: ServeConfig) -> int:
    return min(DEFAULT_K, limits.max_k)


def _first_problem(error: ValidationError) -> str:
    """Return a sentence about the first problem of a body."""
    problem = error.errors(include_url=False, include_context=False)[0]
    # The names of union members, such as `int` in history.0.int, are not part of the body, but an unknown field may have one.
    *parent_keys, last_key = problem["loc"] or ("",)
    keys = [key for key in parent_keys if key not in _UNION_MEMBERS]
    if problem["type"] == "extra_forbidden" or last_key not in _UNION_MEMBERS:
        keys.append(last_key)
    place = ".".join(map(str, keys))
    json_type = _JSON_TYPE_BY_PROBLEM.get(problem["type"])
    message = f"it must be {json_type}" if json_type else problem["msg"].replace("Input should be", "it must be")
    if problem["type"] == "missing":
        return f"{place} is missing; add it"
    if problem["type"] == "extra_forbidden":
        return f"unknown field {shown(place)}; see the schema at /openapi.json"
    if problem["type"] in ("too_long", "too_short"):
        return f"{place}: {message.replace('List', 'the list').replace(' after validation', '')}"
    value = problem["input"]
    if isinstance(value, bool):
        value_text = "true" if value else "false"
    else:
        value_text = "an object" if isinstance(value, dict) else "an array" if isinstance(value, list) else shown(value)
    return f"{printable(place, max_characters=200) or 'the body'} is {value_text}; {message}"


_JSON_TYPE_BY_PROBLEM = {
    "list_type": "an array",
    "dict_type": "a JSON object",
    "model_type": "a JSON object",
    "model_attributes_type": "a JSON object",
}
_UNION_MEMBERS = ("int", "constrained-int", "str", "constrained-str", "float", "bool", "list", "dict")
