"""Requests in the formats of MLflow, their answers, and the errors of invalid requests."""

import math
from typing import Any

import numpy as np
import pytest

from recsys_core.errors import InputError
from recsys_core.serving.queries import DEFAULT_OPTIONS
from recsys_core.serving.requests import PARAMS, Request, parse, respond
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.serving.conftest import CONTEXT_FEATURES, ITEM_FILES, ITEM_IDS, USER_FEATURES, USER_IDS, ModelBuilder


@pytest.fixture(scope="module")
def retriever(build_packaged_model: ModelBuilder) -> Retriever:
    _, package = build_packaged_model(features=(*USER_FEATURES, *CONTEXT_FEATURES), item_files=ITEM_FILES)
    return Retriever.load(package.folder)


def test_a_request_has_columns_or_rows() -> None:
    assert parse({"inputs": {"user_id": [1, 2]}}) == Request({"user_id": [1, 2]}, 2, k=10, options={})
    request_with_columns = {"inputs": {"user_id": [1], "history": [[3]]}, "params": {"k": 2, "exclude_stored_history": False}}
    assert parse(request_with_columns) == Request(
        {"user_id": [1], "history": [[3]]}, 1, k=2, options={"exclude_stored_history": False}
    )
    request_with_rows = {
        "rows": [{"user_id": 1}, {"history": [3]}, {}],
        "params": {"filter": '{"price": {"lt": 3}}', "min_score": None},
    }
    columns = {"user_id": [1, None, None], "history": [None, [3], None]}
    assert parse(request_with_rows) == Request(columns, 3, k=10, options={"filter": {"price": {"lt": 3}}})
    assert set(PARAMS) == {"k", *DEFAULT_OPTIONS}


@pytest.mark.parametrize(
    ("request_object", "message"),
    [
        ({}, "a request has either inputs"),
        ({"inputs": {"user_id": [1]}, "rows": [{"user_id": 1}]}, "a request has either inputs"),
        ({"inputs": {}}, "there is no column"),
        ({"rows": "abc"}, "rows is not a list of objects"),
        ({"rows": [1]}, "rows is not a list of objects"),
        ({"inputs": {"user_id": "7"}}, "user_id is of type str; pass a list"),
        ({"inputs": {"user_id": [1, 2], "history": [[3]]}}, "history has 1 values, but another column has 2"),
        ({"inputs": {"user_id": [1]}, "params": [1]}, "params is of type list"),
        ({"inputs": {"user_id": [1]}, "params": {"K": 1, "top": 2}}, "params: unknown K, top; the model has"),
        ({"inputs": {"user_id": [1]}, "params": {"k": None}}, "params: k is null"),
        ({"inputs": {"user_id": [1]}, "params": {"k": True}}, "params: k is True; it must be of type int"),
        ({"inputs": {"user_id": [1]}, "params": {"k": 2.5}}, "params: k is 2.5; it must be of type int"),
        ({"inputs": {"user_id": [1]}, "params": {"exclude_stored_history": 1}}, "is 1; it must be of type bool"),
        ({"inputs": {"user_id": [1]}, "params": {"exclude": "a"}}, "exclude is 'a'; it must be of type list"),
        ({"inputs": {"user_id": [1]}, "params": {"min_score": math.nan}}, "min_score is NaN"),
        ({"inputs": {"user_id": [1]}, "params": {"filter": "{"}}, "filter is not a JSON object"),
        ({"inputs": {"user_id": [1]}, "params": {"filter": "[]"}}, r"filter is \[\]; it must be a JSON object"),
    ],
)
def test_the_error_of_an_invalid_request_names_the_cause(request_object: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(request_object)


def test_an_invalid_row_gets_an_error_and_the_other_rows_get_their_answers(retriever: Retriever) -> None:
    rows = [
        {"user_id": USER_IDS[0], "context.number": 0.5},
        {"user_id": "x"},
        {"user_id": 1, "history": "item"},
        {"user_id": 1, "history": [ITEM_IDS[0], None]},
        {"user_id": 1, "history": np.zeros((2, 2))},
        {"user_id": 1, "context.number": math.nan},
        {"user_id": 1, "weighted_list": ["a"], "weights": [1.0]},
        {"user_id": None},
        {"history": [ITEM_IDS[0], "unheard of"]},
    ]
    answers = respond(retriever, {"rows": rows, "params": {"k": 3}})
    assert [answer.error for answer in answers] == [
        None,
        "user_id 'x' is not an integer, but the model was trained on integer ids",
        "history is of type str; pass a list of item ids, or leave it out",
        "history: item_id is missing",
        "history is of type ndarray; pass a list of item ids, or leave it out",
        "context.number: nan is not a finite number",
        None,
        None,
        None,
    ]
    assert [len(answer.item_ids) for answer in answers] == [0 if answer.error else 3 for answer in answers]
    assert [answer.fallback for answer in answers[6:]] == ["features", "popularity", "history"]
    for row, answer in zip(rows, answers, strict=True):
        (single_answer,) = respond(retriever, {"rows": [row], "params": {"k": 3}})
        assert single_answer._replace(scores=[]) == answer._replace(scores=[])
        np.testing.assert_allclose(single_answer.scores, answer.scores, rtol=1e-5)


def test_similar_items_are_requested_by_the_column_item_id(retriever: Retriever) -> None:
    item_ids = [ITEM_IDS[5], "unheard of", 7, None, math.nan]
    answer_to_known_id, answer_to_unknown_id, answer_to_invalid_id, *answers_to_missing_ids = respond(
        retriever, {"inputs": {"item_id": item_ids}, "params": {"k": 4, "filter": {"stock": [0, 1]}}}
    )
    assert answer_to_known_id == retriever.similar([ITEM_IDS[5]], k=4, filter={"stock": [0, 1]})[0]
    assert answer_to_unknown_id.error == "item_id 'unheard of' is not in the catalogue"
    assert answer_to_invalid_id.error == "item_id 7 is not a string, but the model was trained on string ids"
    assert [answer.error for answer in answers_to_missing_ids] == ["item_id is missing"] * 2
    rows = [{"item_id": item_id} for item_id in item_ids]
    row_answers = respond(retriever, {"rows": rows, "params": {"k": 4, "filter": {"stock": [0, 1]}}})
    assert row_answers == [answer_to_known_id, answer_to_unknown_id, answer_to_invalid_id, *answers_to_missing_ids]


@pytest.mark.parametrize(
    "request_object",
    [
        {"inputs": {"item_id": [ITEM_IDS[5]], "user_id": [1]}},
        {"rows": [{"item_id": ITEM_IDS[5]}, {"user_id": 1}]},
    ],
    ids=["columns", "rows"],
)
def test_a_request_with_item_ids_and_another_column_is_rejected(retriever: Retriever, request_object: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"has only the column item_id, not \['item_id', 'user_id'\]"):
        respond(retriever, request_object)


@pytest.mark.parametrize(
    ("request_object", "message"),
    [
        ({"inputs": {"user_id": [1], "device": ["ios"]}}, "unknown column"),
        ({"inputs": {"user_id": [1]}, "params": {"k": 0}}, "k is 0; it must be at least 1"),
        ({"inputs": {"user_id": [1]}, "params": {"exclude": [3]}}, "item_id 3 is not a string"),
        ({"inputs": {"user_id": [1]}, "params": {"filter": {"colour": "red"}}}, "unknown column 'colour'"),
    ],
)
def test_a_request_whose_columns_or_params_are_invalid_is_rejected(
    retriever: Retriever, request_object: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        respond(retriever, request_object)
