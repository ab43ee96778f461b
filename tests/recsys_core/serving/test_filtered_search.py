"""Filters of a request: the answers of every index kind, and errors."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from recsys_core.errors import InputError
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.serving.conftest import (
    FILTERS_AND_ROWS,
    INDEX_KINDS,
    ITEM_FILES,
    ITEM_IDS,
    NUM_ITEMS,
    NUM_USERS,
    SINCE_TIMES,
    USER_IDS,
    ExportedModel,
    ModelBuilder,
    load_retriever,
    seen_ids_of,
)

UNKNOWN_USER_ID = 1


@pytest.fixture(scope="module", params=INDEX_KINDS)
def model_and_filtering_retriever(
    request: pytest.FixtureRequest, build_packaged_model: ModelBuilder
) -> tuple[ExportedModel, Retriever]:
    exported_model, package = build_packaged_model(index_kind=request.param, item_files=ITEM_FILES)
    return exported_model, load_retriever(package)


@pytest.mark.parametrize(("item_filter", "allowed_rows"), FILTERS_AND_ROWS)
@pytest.mark.parametrize("max_exact_items", [0, 10_000], ids=["search in the index", "exact search"])
def test_a_filtered_answer_has_as_many_unseen_items_as_the_filter_allows(
    model_and_filtering_retriever: tuple[ExportedModel, Retriever],
    item_filter: dict[str, Any],
    allowed_rows: list[int],
    max_exact_items: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recsys_core.retrieval.search.MAX_EXACT_ITEMS", max_exact_items)
    exported_model, retriever = model_and_filtering_retriever
    allowed_ids = {ITEM_IDS[row] for row in allowed_rows}
    for k in (5, NUM_ITEMS):
        answers = retriever.recommend([*USER_IDS, UNKNOWN_USER_ID], k=k, filter=item_filter)
        for user, answer in enumerate(answers):
            allowed_unseen_ids = allowed_ids - (seen_ids_of(exported_model, user) if user < NUM_USERS else set())
            assert len(answer.item_ids) == len({*answer.item_ids}) == min(k, len(allowed_unseen_ids))
            assert {*answer.item_ids} <= allowed_unseen_ids
        assert answers[-1].fallback == "popularity"
        if retriever.package.index_kind == "flat":
            for user in range(NUM_USERS):
                query_vector = exported_model.query_vector(user, exported_model.log[user])
                assert answers[user].item_ids == exported_model.best_ids(
                    query_vector, seen_rows=exported_model.log[user], k=k, allowed_rows=allowed_rows
                )


def test_threads_that_share_a_retriever_get_the_answers_of_one_thread(
    model_and_filtering_retriever: tuple[ExportedModel, Retriever], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recsys_core.retrieval.search.MAX_EXACT_ITEMS", 0)  # so that filters are applied in the index
    _, retriever = model_and_filtering_retriever

    def recommend(item_filter: dict[str, Any]) -> list[tuple[list[Any], Any]]:
        answers = retriever.recommend(USER_IDS, k=20, filter=item_filter, with_vectors=True)
        return [(answer.item_ids, answer.item_vectors) for answer in answers]

    item_filters = [item_filter for item_filter, _ in FILTERS_AND_ROWS] * 5
    expected_answers = [recommend(item_filter) for item_filter in item_filters]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(recommend, item_filters)) == expected_answers


def test_a_cached_filter_does_not_keep_the_exclusions_of_a_request(
    model_and_filtering_retriever: tuple[ExportedModel, Retriever], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recsys_core.serving.retriever.MAX_LISTED_EXCLUDES", 2)
    _, retriever = model_and_filtering_retriever
    item_filter = {"stock": [5]}
    (whole_answer,) = retriever.recommend([UNKNOWN_USER_ID], k=NUM_ITEMS, filter=item_filter)
    (shorter_answer,) = retriever.recommend(
        [UNKNOWN_USER_ID], k=NUM_ITEMS, filter=item_filter, exclude=whole_answer.item_ids[:5]
    )
    assert shorter_answer.item_ids == whole_answer.item_ids[5:]
    assert retriever.recommend([UNKNOWN_USER_ID], k=NUM_ITEMS, filter=item_filter)[0] == whole_answer


def test_a_filter_may_compare_with_a_datetime(model_and_filtering_retriever: tuple[ExportedModel, Retriever]) -> None:
    _, retriever = model_and_filtering_retriever
    (answer,) = retriever.recommend([UNKNOWN_USER_ID], k=NUM_ITEMS, filter={"since": {"lt": SINCE_TIMES[9]}})
    assert {*answer.item_ids} == {*ITEM_IDS[:9]}


@pytest.mark.parametrize(
    ("item_filter", "message"),
    [
        ({"colour": "red"}, r"unknown column 'colour'; the model has \['genre', 'price', 'stock', 'is_new', 'since'\]"),
        ({"price": {"between": [1, 2]}}, "column 'price' has the unknown operator 'between'; use in, ge, gt, le, lt, since"),
        ({"price": {"ge": "10"}}, "'10' is no value of column 'price'; pass a number between"),
        ({"price": {"lt": 10**400}}, "1000.* is no value of column 'price'; pass a number between"),
        ({"stock": [-math.inf]}, "-inf is no value of column 'stock'; pass a number between"),
        ({"price": {"ge": math.nan}}, "nan is no value of column 'price'"),
        ({"stock": {"in": 3}}, "column 'stock': `in` has 3; pass a list of values"),
        ({"stock": {"in": np.array(3)}}, r"column 'stock': `in` has array\(3\); pass a list of values"),
        ({"stock": {"ge": 10**30}}, "is no value of column 'stock'"),
        ({"genre": {"ge": "a"}}, "column 'genre' has no order"),
        ({"genre": [1]}, "1 is no value of column 'genre'; pass a string"),
        ({"is_new": [1]}, "1 is no value of column 'is_new'; pass true or false"),
        ({"since": {"since": "yesterday"}}, "'yesterday' is no value of column 'since'; pass a time"),
        ({"price": {"since": 3}}, "column 'price' has no times"),
    ],
)
def test_an_error_about_an_invalid_filter_names_its_column(
    build_packaged_model: ModelBuilder, item_filter: dict[str, Any], message: str
) -> None:
    retriever = load_retriever(build_packaged_model(item_files=ITEM_FILES).package)
    with pytest.raises(InputError, match=message):
        retriever.recommend([UNKNOWN_USER_ID], k=3, filter=item_filter)
