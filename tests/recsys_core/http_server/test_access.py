"""Tokens of the environment, and bodies that do not arrive as a whole: too slow, too large, or interrupted."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import Request

from recsys_core.errors import InputError
from recsys_core.http_server.access import RequestError, read_body, token_from_environment
from recsys_core.http_server.config import TOKEN_VARIABLE, ServeConfig


def chunk(content: bytes, *, is_last: bool = False) -> dict[str, Any]:
    """Return the ASGI message with a part of a body."""
    return {"type": "http.request", "body": content, "more_body": not is_last}


def read_messages(messages: Sequence[dict[str, Any]], **limits: object) -> bytes:
    """Read the body of a request without a content length. After `messages`, no further message arrives."""
    remaining_messages = list(messages)

    async def receive() -> dict[str, Any]:
        if not remaining_messages:
            await asyncio.Event().wait()
        return remaining_messages.pop(0)

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
    return asyncio.run(read_body(Request(scope, receive), ServeConfig.model_validate(limits)))


def test_the_chunks_of_a_body_are_joined() -> None:
    assert read_messages([chunk(b'{"rows":'), chunk(b" []}", is_last=True)]) == b'{"rows": []}'
    messages_of_largest_body = [chunk(b"x" * 600), chunk(b"x" * 424, is_last=True)]
    assert read_messages(messages_of_largest_body, max_body_bytes=1_024) == b"x" * 1_024


@pytest.mark.parametrize(
    ("token", "is_valid"), [("x" * 16, True), ("x" * 15, False), ("x" * 8 + " " + "x" * 8, False), ("é" * 16, False)]
)
def test_a_token_has_at_least_16_ascii_characters_without_blanks(
    monkeypatch: pytest.MonkeyPatch, token: str, is_valid: bool
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    if is_valid:
        assert token_from_environment() == token
    else:
        with pytest.raises(InputError, match="must have at least 16 ASCII characters without blanks"):
            token_from_environment()
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert token_from_environment() is None


@pytest.mark.parametrize(
    ("messages", "limits", "status", "message"),
    [
        ([chunk(b"{")], {"timeout_s": 0.05}, 408, "the body did not arrive within 0.05 s; send it faster"),
        ([chunk(b"x" * 600)] * 2, {"max_body_bytes": 1_024}, 413, "the body is larger than 1,024 bytes; send fewer rows"),
        ([chunk(b"{"), {"type": "http.disconnect"}], {}, 400, "the connection was closed before the end of the body"),
    ],
    ids=["slow", "large", "interrupted"],
)
def test_a_body_that_does_not_arrive_as_a_whole_is_rejected(
    messages: list[dict[str, Any]], limits: dict[str, object], status: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as rejection:
        read_messages(messages, **limits)
    assert rejection.value.status == status
