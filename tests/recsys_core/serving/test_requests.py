from typing import Any

import pytest

from recsys_core.errors import InputError
from recsys_core.serving.requests import Request, parse


def test_a_request_without_params_has_the_defaults() -> None:
    assert parse({"inputs": {"user_id": [1, 2]}}) == Request([1, 2], None, k=10, exclude_stored_history=True)
    request = {"inputs": {"user_id": [1], "history": [[3]]}, "params": {"k": 2, "exclude_stored_history": False}}
    assert parse(request) == Request([1], [[3]], k=2, exclude_stored_history=False)


@pytest.mark.parametrize(
    ("request_object", "message"),
    [
        ({}, "the column user_id is missing"),
        ({"inputs": {"user_id": "7"}}, "the column user_id is missing"),
        ({"inputs": {"user_id": [1, 2], "history": [[3]]}}, "history is not a list of 2 histories"),
        ({"inputs": {"user_id": [1]}, "params": {"K": 1, "top": 2}}, "params: unknown K, top"),
        ({"inputs": {"user_id": [1]}, "params": {"k": None}}, "params: k is null"),
        ({"inputs": {"user_id": [1]}, "params": {"k": True}}, "params: k is True; it must be of type int"),
        ({"inputs": {"user_id": [1]}, "params": {"k": 2.5}}, "params: k is 2.5; it must be of type int"),
        ({"inputs": {"user_id": [1]}, "params": {"exclude_stored_history": 1}}, "is 1; it must be of type bool"),
    ],
)
def test_an_invalid_request_is_rejected_with_its_cause(request_object: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(request_object)
