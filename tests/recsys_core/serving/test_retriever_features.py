"""Features that a request has, and features of the users that a package has."""

import math
from typing import Any

import pytest

from recsys_core.errors import InputError
from tests.recsys_core.serving.conftest import (
    CONTEXT_FEATURES,
    ITEM_IDS,
    USER_FEATURES,
    USER_IDS,
    ModelBuilder,
    load_retriever,
)


def test_features_of_known_users_are_read_from_the_package(build_packaged_model: ModelBuilder) -> None:
    exported_model, package = build_packaged_model(features=(*USER_FEATURES, *CONTEXT_FEATURES))
    retriever = load_retriever(package)
    for user, item_ids in enumerate(retriever.recommend(USER_IDS, k=6).item_ids):
        assert item_ids.tolist() == exported_model.best_ids(
            exported_model.query_vector(user, exported_model.log[user]), seen_rows=exported_model.log[user], k=6
        )
    history_rows = [11, 250, 31]
    histories = [[ITEM_IDS[row] for row in history_rows]] * 2
    ids_for_known_user, ids_for_unknown_user = retriever.recommend([USER_IDS[5], 1], k=6, histories=histories).item_ids
    seen_rows = [*history_rows, *exported_model.log[5]]
    assert ids_for_known_user.tolist() == exported_model.best_ids(
        exported_model.query_vector(5, history_rows), seen_rows=seen_rows, k=6
    )
    assert ids_for_unknown_user.tolist() == exported_model.best_ids(
        exported_model.query_vector(None, history_rows), seen_rows=history_rows, k=6
    )
    # If the history of the request is empty, the query_vector vector depends only on the features of the user.
    (ids_for_known_user,) = retriever.recommend([USER_IDS[5]], k=6, histories=[[]]).item_ids
    assert ids_for_known_user.tolist() == exported_model.best_ids(
        exported_model.query_vector(5, []), seen_rows=exported_model.log[5], k=6
    )
    assert not any((package.folder / "package").glob("context.*.row.npy"))


def test_features_of_a_request_are_encoded_as_in_the_ingest(build_packaged_model: ModelBuilder) -> None:
    exported_model, package = build_packaged_model(features=(*USER_FEATURES, *CONTEXT_FEATURES))
    retriever = load_retriever(package)
    assert retriever.request_features.columns == [
        *("user.single", "list", "weighted_list", "weights", "user.number", "context.single", "context.number")
    ]
    answers = retriever.recommend(
        [USER_IDS[5], 1, USER_IDS[6], 1],
        k=6,
        features={
            "context.single": ["context.single 3", "context.single 2", None, None],
            "context.number": [0.5, None, None, None],
            "weighted_list": [None, ["user.weighted_list 4", "unheard of"], None, None],
            "weights": [None, [2.0, 1.0], None, None],
            "user.single": [None, None, "user.single 2", None],
        },
    )
    log = exported_model.log
    query_vectors = [
        exported_model.query_vector(5, log[5], given_features={"context.single": ([3], None), "context.number": ([1], [0.5])}),
        exported_model.query_vector(
            None, [], given_features={"context.single": ([2], None), "user.weighted_list": ([4, 0], [2.0, 1.0])}
        ),
        exported_model.query_vector(6, log[6], given_features={"user.single": ([2], None)}),
    ]
    for answer, query_vector, seen_rows in zip(list(answers)[:3], query_vectors, (log[5], [], log[6]), strict=True):
        assert answer.item_ids == exported_model.best_ids(query_vector, seen_rows=seen_rows, k=6)
    assert answers.fallbacks == [None, "features", None, "popularity"]


def test_a_request_whose_only_feature_is_an_empty_list_gets_the_most_popular_items(build_packaged_model: ModelBuilder) -> None:
    exported_model, package = build_packaged_model(features=(*USER_FEATURES, *CONTEXT_FEATURES))
    retriever = load_retriever(package)
    answer_to_empty_list, popular_answer = retriever.recommend([1, 1], k=6, features={"list": [[], None]})
    assert answer_to_empty_list == popular_answer and popular_answer.fallback == "popularity"
    # For a known user, an empty list replaces the stored list.
    (answer,) = retriever.recommend([USER_IDS[5]], k=6, features={"list": [[]]})
    query_vector = exported_model.query_vector(5, exported_model.log[5], given_features={"user.list": ([], None)})
    assert answer.item_ids == exported_model.best_ids(query_vector, seen_rows=exported_model.log[5], k=6)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"context.number": [math.nan]}, "context.number: nan is not a finite number"),
        ({"context.number": ["3"]}, "context.number: '3' is not a finite number"),
        ({"context.number": [True]}, "context.number: True is not a finite number"),
        ({"context.single": [3]}, "context.single: value 3 is not a string"),
        ({"list": ["a"]}, "list: 'a' is not a list"),
        ({"weighted_list": [["a"]]}, "'weights' does not have one weight for each value of 'weighted_list'"),
        ({"weighted_list": [["a"]], "weights": [[-1.0]]}, "'weights' has a weight that is negative or too large"),
        ({"device": ["ios"]}, r"unknown column \['device'\]; the model has \['user_id', 'history', 'user.single'"),
        ({"list": [None, None]}, "column 'list' has 2 values for 1 rows"),
    ],
)
def test_an_error_about_an_invalid_feature_names_its_column(
    build_packaged_model: ModelBuilder, features: dict[str, list[Any]], message: str
) -> None:
    _, package = build_packaged_model(features=(*USER_FEATURES, *CONTEXT_FEATURES))
    with pytest.raises(InputError, match=message):
        load_retriever(package).recommend([1], k=3, features=features)
