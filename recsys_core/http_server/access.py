"""Checks of a request before its body is parsed: token, content type and size."""

import hmac
import os
from asyncio import timeout
from collections.abc import Mapping

from starlette.requests import ClientDisconnect, Request

from recsys_core.errors import InputError
from recsys_core.http_server.config import TOKEN_VARIABLE, ServeConfig

MIN_TOKEN_CHARACTERS = 16


class RequestError(Exception):
    """The HTTP status of a request that gets no answer, and the reason in one sentence."""

    def __init__(self, status: int, message: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})


def token_from_environment() -> str | None:
    """Return the token that requests must contain; None if NIGHTJAR_SERVE_TOKEN is not set.

    Raises:
        InputError: the token is too short, or has characters that a header cannot contain.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        return None
    if len(token) < MIN_TOKEN_CHARACTERS or not all("!" <= character <= "~" for character in token):
        raise InputError(
            f"{TOKEN_VARIABLE} must have at least {MIN_TOKEN_CHARACTERS} ASCII characters without blanks; create one with "
            "`openssl rand -hex 32`, or remove the variable if requests need no token"
        )
    return token


def require_token(request: Request, token: str | None) -> None:
    """Raise RequestError unless the request has the token."""
    if token is None:
        return
    authorization = request.headers.get("authorization", "").encode()
    if not hmac.compare_digest(authorization, f"Bearer {token}".encode()):
        message = "the header Authorization does not contain the right token; send `Authorization: Bearer TOKEN`"
        raise RequestError(401, message, headers={"WWW-Authenticate": "Bearer"})


async def read_body(request: Request, limits: ServeConfig) -> bytes:
    """Return the body of a request.

    Raises:
        RequestError: the body is not declared as JSON, is too large, or does not arrive in time.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError(415, f"the content type is {content_type[:80]!r}; send application/json")
    declared_bytes = request.headers.get("content-length", "")
    if declared_bytes.isdecimal() and int(declared_bytes) > limits.max_body_bytes:
        raise _too_large_error(limits)
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with timeout(limits.timeout_s):
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > limits.max_body_bytes:
                    raise _too_large_error(limits)
                chunks.append(chunk)
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {limits.timeout_s:g} s; send it faster") from None
    except ClientDisconnect:
        raise RequestError(400, "the connection was closed before the end of the body") from None
    return b"".join(chunks)


def _too_large_error(limits: ServeConfig) -> RequestError:
    message = f"the body is larger than {limits.max_body_bytes:,} bytes; send fewer rows per request"
    return RequestError(413, message, headers={"Connection": "close"})
