"""FastAPI application: recommendations, similar items, health, readiness and metrics, and their OpenAPI document."""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import recsys_core
from recsys_core.errors import InputError
from recsys_core.http_server import metrics
from recsys_core.http_server.access import RequestError, read_body, require_token
from recsys_core.http_server.api import (
    Bodies,
    Predictions,
    Problem,
    Readiness,
    RegistryState,
    parse_body,
    request_bodies,
)
from recsys_core.http_server.batching import Batcher, ParsedRequest, QueueFullError
from recsys_core.http_server.config import TOKEN_VARIABLE, ServeConfig
from recsys_core.http_server.follower import ReleaseFollower
from recsys_core.http_server.release import Champion, WorkerState
from recsys_core.serving.requests import parse, parse_similar

LOG = logging.getLogger("nightjar.serve")
JSON = "application/json"
_REFERENCE_TEMPLATE = "#/components/schemas/{model}"
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
_API_DESCRIPTION = (
    "Recommendations of the champion of a nightjar registry. A request has one row per user or item. "
    "An invalid row gets a prediction with an `error`. If all rows are invalid, the status is 422."
)


class _Predictor:
    """Answers requests to `/recommend`, `/similar` and `/metrics`.

    Args:
        token: token that requests must contain; None if no token is needed.
    """

    def __init__(self, batcher: Batcher, *, limits: ServeConfig, token: str | None) -> None:
        self._batcher, self._limits, self._token = batcher, limits, token

    async def answer(self, request: Request, *, body_model: type[BaseModel], is_similar: bool) -> Response:
        """Return the predictions for a request, or raise RequestError, InputError, QueueFullError or TimeoutError."""
        require_token(request, self._token)
        body = parse_body(await read_body(request, self._limits), body_model, limits=self._limits)
        parsed_request = parse_similar(body) if is_similar else parse(body)
        result = await self._batcher.submit(ParsedRequest(parsed_request, is_similar))
        if isinstance(result, Exception):
            raise result
        if all(answer.error is not None for answer in result):
            raise InputError(f"rows.0: {result[0].error}")
        for answer in result:
            origin = "error" if answer.error is not None else answer.fallback or "none"
            metrics.PREDICTIONS.labels(answer.version, origin).inc()
        with_vectors = bool(parsed_request.options.get("with_vectors"))
        predictions = [answer.to_dict(with_vectors=with_vectors) for answer in result]
        return Response(orjson.dumps({"predictions": predictions}), media_type=JSON)

    async def metrics_text(self, request: Request) -> Response:
        """Return the metrics."""
        require_token(request, self._token)
        return Response(metrics.as_text(), media_type=metrics.CONTENT_TYPE)


def create_app(follower: ReleaseFollower, *, limits: ServeConfig, token: str | None) -> FastAPI:
    """Return the application, which answers with the model of `follower`. token: see _Predictor."""
    batcher = Batcher(follower.respond, limits=limits, observe=metrics.BATCH_ROWS.observe)
    predictor, bodies = _Predictor(batcher, limits=limits, token=token), request_bodies(limits)

    @asynccontextmanager
    async def run_batcher(_: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await batcher.stop()

    app = FastAPI(title="nightjar", version=recsys_core.__version__, lifespan=run_batcher, docs_url=None, redoc_url=None)

    @app.post("/recommend", **_post_documentation("Recommend items to users, or for histories.", body=bodies.recommend))
    async def recommend(request: Request) -> Response:
        pending_response = predictor.answer(request, body_model=bodies.recommend, is_similar=False)
        return await _measured_response(pending_response, path="/recommend")

    @app.post("/similar", **_post_documentation("Return the items that are most similar to an item.", body=bodies.similar))
    async def similar(request: Request) -> Response:
        pending_response = predictor.answer(request, body_model=bodies.similar, is_similar=True)
        return await _measured_response(pending_response, path="/similar")

    @app.get("/healthz", **_route_documentation("Return whether the process answers."))
    async def healthz() -> Response:
        return Response(b'{"status":"ok"}', media_type=JSON)

    summary = "Return which version is served, and why a newer champion is not served."

    @app.get("/readyz", **_route_documentation(summary, schema=_reference(Readiness)))
    async def readyz() -> Response:
        assert follower.champion is not None  # the server starts after the first version is loaded
        return Response(readiness(follower.state, follower.champion).model_dump_json(), media_type=JSON)

    summary = "Return the metrics in Prometheus' text format."

    @app.get("/metrics", **_route_documentation(summary, content_type="text/plain", error_statuses=(401, 500)))
    async def prometheus_metrics(request: Request) -> Response:
        return await _measured_response(predictor.metrics_text(request), path="/metrics")

    @app.exception_handler(HTTPException)
    async def answer_http_exception(_: Request, error: HTTPException) -> Response:
        return _problem_response(
            error.status_code, f"{error.detail}; the paths and methods are in /openapi.json", error.headers
        )

    app.openapi = lambda: _openapi_schema(app, bodies)  # type: ignore[method-assign]
    return app


async def _measured_response(pending_response: Awaitable[Response], *, path: str) -> Response:
    """Await a response and record its metrics. Any exception becomes a response with a status and a sentence."""
    start_s = time.perf_counter()
    response = await _response_or_problem(pending_response, path=path)
    metrics.REQUESTS.labels(path, str(response.status_code)).inc()
    metrics.REQUEST_SECONDS.labels(path).observe(time.perf_counter() - start_s)
    return response


async def _response_or_problem(pending_response: Awaitable[Response], *, path: str) -> Response:
    try:
        return await pending_response
    except RequestError as error:
        return _problem_response(error.status, str(error), error.headers)
    except InputError as error:
        return _problem_response(422, str(error))
    except QueueFullError:
        return _problem_response(503, "too many requests wait; send the request again later", {"Retry-After": "1"})
    except TimeoutError:
        return _problem_response(504, "there was no answer in time; send the request again, or one with fewer rows")
    except Exception:  # a bug
        LOG.exception("%s: a request has no answer", path)
        return _problem_response(500, "the server could not answer; the reason is in its log")


def _problem_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps({"error": message}), status, headers=dict(headers or {}), media_type=JSON)


def readiness(state: WorkerState, champion: Champion) -> Readiness:
    """Return the served version, why a newer champion is not served, and whether the registry answers."""
    down_since = champion.registry_down_since
    registry = RegistryState(
        answered_at=_time_text(champion.registry_answered_at),
        down_since=None if down_since is None else _time_text(down_since),
        problem=champion.registry_problem,
    )
    problem = champion.problem or state.problem
    return Readiness(status="ready", version=state.version, problem=problem, registry=registry)


def _time_text(timestamp_s: float) -> str:
    return f"{datetime.fromtimestamp(timestamp_s, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _post_documentation(summary: str, *, body: type[BaseModel]) -> dict[str, Any]:
    """Return the keyword arguments that document a route for POST requests with predictions. body: model of the body."""
    documentation = _route_documentation(summary, schema=_reference(Predictions), error_statuses=_REASON_BY_STATUS)
    request_body = {"required": True, "content": {JSON: {"schema": _reference(body)}}}
    return documentation | {"openapi_extra": documentation["openapi_extra"] | {"requestBody": request_body}}


def _route_documentation(
    summary: str, *, schema: Mapping[str, str] | None = None, content_type: str = JSON, error_statuses: Iterable[int] = ()
) -> dict[str, Any]:
    """Return the keyword arguments that document a route.

    Args:
        schema: schema of a successful answer; None: not documented.
        content_type: content type of a successful answer.
        error_statuses: statuses of the errors. A route with status 401 needs the token.
    """
    problem_content = {JSON: {"schema": _reference(Problem)}}
    responses: dict[int, dict[str, Any]] = {
        200: {"description": "The answer.", "content": {content_type: {"schema": schema} if schema else {}}}
    }
    responses |= {status: {"description": _REASON_BY_STATUS[status], "content": problem_content} for status in error_statuses}
    operation: dict[str, Any] = {"security": [{"token": []}, {}]} if 401 in responses else {}
    return {"summary": summary, "response_class": Response, "responses": responses, "openapi_extra": operation}


def _openapi_schema(app: FastAPI, bodies: Bodies) -> dict[str, Any]:
    """Return the OpenAPI document with the schemas of all bodies."""
    schema = get_openapi(title=app.title, version=app.version, description=_API_DESCRIPTION, routes=app.routes)
    models: list[type[BaseModel]] = [*bodies, Predictions, Problem, Readiness]
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE_TEMPLATE)
    components = schema.setdefault("components", {})
    components["schemas"] = definitions["$defs"]
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": f"needed if the server has {TOKEN_VARIABLE}"}
    }
    return schema


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE_TEMPLATE.format(model=model.__name__)}
