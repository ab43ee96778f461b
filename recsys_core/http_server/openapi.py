"""The OpenAPI document of the server."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from recsys_core.http_server.api import Bodies, Predictions, Problem, Readiness
from recsys_core.http_server.config import TOKEN_VARIABLE

_REFERENCE = "#/components/schemas/{model}"
_REASON_BY_STATUS = {
    400: "The body is not JSON.",
    401: "The token is missing or wrong.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    422: "A field or a param is invalid, or all rows are invalid.",
    500: "The server has a bug.",
    503: "Too many requests wait.",
    504: "There was no answer in time.",
}
_DESCRIPTION = (
    "Recommendations of the champion of a nightjar registry. A request has one row per user or item. "
    "An invalid row gets a prediction with an `error`. If all rows are invalid, the status is 422."
)


def route_documentation(
    body: type[BaseModel] | None, summary: str, *, content_type: str = "application/json"
) -> dict[str, Any]:
    """Return the keyword arguments that document a route. body: model of the body of a POST request; None for a GET request."""
    arguments: dict[str, Any] = {"summary": summary, "response_class": Response}
    if body is None:
        answer = {"description": "The answer.", "content": {content_type: {}}}
        return arguments | {"responses": {200: answer}}
    error_responses = {
        status: {"description": reason, "content": {"application/json": {"schema": _reference(Problem)}}}
        for status, reason in _REASON_BY_STATUS.items()
    }
    answer = {"description": "One prediction per row.", "content": {"application/json": {"schema": _reference(Predictions)}}}
    request_body = {"required": True, "content": {"application/json": {"schema": _reference(body)}}}
    return arguments | {
        "responses": {200: answer, **error_responses},
        "openapi_extra": {"requestBody": request_body, "security": [{"token": []}, {}]},
    }


def openapi_schema(app: FastAPI, bodies: Bodies) -> dict[str, Any]:
    """Return the OpenAPI document with the schemas of all bodies."""
    schema = get_openapi(title=app.title, version=app.version, description=_DESCRIPTION, routes=app.routes)
    models: list[type[BaseModel]] = [*bodies, Predictions, Problem, Readiness]
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    components = schema.setdefault("components", {})
    components["schemas"] = definitions["$defs"]
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": f"needed if the server has {TOKEN_VARIABLE}"}
    }
    return schema


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}
