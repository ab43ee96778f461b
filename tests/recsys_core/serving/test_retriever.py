"""Answers of a retriever, compared with a sort of the whole catalogue by the scores of the float model."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.errors import InputError
from recsys_core.retrieval.compressed import PqFastScan
from recsys_core.retrieval.index import build_index
from recsys_core.retrieval.search import search_exhaustively
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.refresh.small_pipeline import build_pipeline
from tests.recsys_core.serving.conftest import (
    DIM,
    FILTERS_AND_ROWS,
    INDEX_KINDS,
    ITEM_FILES,
    ITEM_IDS,
    NUM_ITEMS,
    NUM_USERS,
    USER_IDS,
    ExportedModel,
    ModelBuilder,
    PackagedModel,
    load_retriever,
    seen_ids_of,
)

SHARDED_KINDS = ("flat", "ivf_sq8", "pq_fastscan", "hnsw")
"""Kinds that are tested with three shards too."""


@pytest.fixture(scope="module", params=[*((kind, 1) for kind in INDEX_KINDS), *((kind, 3) for kind in SHARDED_KINDS)], ids=str)
def model_and_retriever(request: pytest.FixtureRequest, build_packaged_model: ModelBuilder) -> tuple[ExportedModel, Retriever]:
    kind, num_shards = request.param
    exported_model, package = build_packaged_model(index_kind=kind, num_index_shards=num_shards, quantization="int8")
    return exported_model, load_retriever(package)


def test_known_users_get_the_exact_best_unseen_items(flat_model: PackagedModel, retriever: Retriever) -> None:
    exported_model = flat_model.exported_model
    answers = retriever.recommend(USER_IDS, k=10)
    ids, scores = answers.item_ids, answers.scores
    for user in range(NUM_USERS):
        query_vector = exported_model.query_vector(user, exported_model.log[user])
        assert ids[user].tolist() == exported_model.best_ids(query_vector, seen_rows=exported_model.log[user], k=10)
        rows = [ITEM_IDS.index(item_id) for item_id in ids[user]]
        np.testing.assert_allclose(scores[user], exported_model.item_vectors[rows] @ query_vector, rtol=1e-4, atol=1e-5)


def test_an_int8_model_recommends_nearly_the_items_of_the_float_model(
    build_packaged_model: ModelBuilder, retriever: Retriever
) -> None:
    int8_retriever = load_retriever(build_packaged_model(index_kind="flat", quantization="int8").package)
    float_and_int8_ids = zip(
        retriever.recommend(USER_IDS, k=20).item_ids, int8_retriever.recommend(USER_IDS, k=20).item_ids, strict=True
    )
    assert np.mean([len({*float_ids} & {*int8_ids}) / len(float_ids) for float_ids, int8_ids in float_and_int8_ids]) > 0.9


def test_every_index_kind_fills_the_list_without_seen_or_repeated_items(
    model_and_retriever: tuple[ExportedModel, Retriever],
) -> None:
    exported_model, retriever = model_and_retriever
    for k in (1, 20, NUM_ITEMS, NUM_ITEMS + 50):
        answers = retriever.recommend(USER_IDS, k=k)
        for user, (item_ids, scores) in enumerate(zip(answers.item_ids, answers.scores, strict=True)):
            seen_ids = seen_ids_of(exported_model, user)
            assert len(item_ids) == len(scores) == len({*item_ids}) == min(k, NUM_ITEMS - len(seen_ids))
            assert {*item_ids} <= {*ITEM_IDS} - seen_ids
            assert (np.diff(scores) <= 0).all()


def test_a_history_in_the_request_replaces_the_stored_history(flat_model: PackagedModel, retriever: Retriever) -> None:
    exported_model = flat_model.exported_model
    history_rows = [11, 250, 31, 7, 99, 120, 130, 44]  # more than the 6 items that the model reads
    given_history = [ITEM_IDS[row] for row in history_rows]
    item_ids = retriever.recommend([USER_IDS[5], 1], k=8, histories=[["unheard of", *given_history], given_history]).item_ids
    query_vector = exported_model.query_vector(None, history_rows)
    assert item_ids[0].tolist() == exported_model.best_ids(query_vector, seen_rows=[*history_rows, *exported_model.log[5]], k=8)
    assert item_ids[1].tolist() == exported_model.best_ids(query_vector, seen_rows=history_rows, k=8)


def test_without_exclude_stored_history_only_the_given_history_is_excluded(
    flat_model: PackagedModel, retriever: Retriever
) -> None:
    exported_model = flat_model.exported_model
    history_rows = exported_model.train[5]
    histories = [[ITEM_IDS[row] for row in history_rows]]
    (all_ids,) = retriever.recommend([USER_IDS[5]], k=NUM_ITEMS, histories=histories, exclude_stored_history=False).item_ids
    assert {*all_ids} == {*ITEM_IDS} - {*histories[0]}  # the test item is recommended, because only the stored history has it
    (top_ids,) = retriever.recommend([USER_IDS[5]], k=8, histories=histories, exclude_stored_history=False).item_ids
    assert top_ids.tolist() == exported_model.best_ids(
        exported_model.query_vector(None, history_rows), seen_rows=history_rows, k=8
    )


def test_without_a_history_in_the_request_the_stored_history_is_used(retriever: Retriever) -> None:
    item_ids = retriever.recommend(USER_IDS[:2], k=5, histories=[None, [ITEM_IDS[0]]]).item_ids
    (expected_ids,) = retriever.recommend(USER_IDS[:1], k=5).item_ids
    assert item_ids[0].tolist() == expected_ids.tolist()


def test_an_array_of_users_may_have_none(retriever: Retriever) -> None:
    user_ids = [USER_IDS[0], None, USER_IDS[1]]
    assert [*retriever.recommend(np.array(user_ids, object), k=5)] == [*retriever.recommend(user_ids, k=5)]
    assert [*retriever.recommend(np.array(USER_IDS, object), k=5)] == [*retriever.recommend(USER_IDS, k=5)]


@pytest.mark.parametrize(
    "to_sequence",
    [pd.Series, pa.array, lambda values: pa.chunked_array([pa.array(values)])],
    ids=["pandas series", "Arrow array", "chunked Arrow array"],
)
def test_arguments_may_be_series_and_arrow_arrays(retriever: Retriever, to_sequence: Callable[[list[Any]], Any]) -> None:
    user_ids, histories = [USER_IDS[0], None, USER_IDS[1]], [None, [ITEM_IDS[0], "unheard of"], [ITEM_IDS[1]]]
    expected_answers = retriever.recommend(user_ids, histories=histories, exclude=ITEM_IDS[:2])
    user_histories = [None if history is None else to_sequence(history) for history in histories]
    answers = retriever.recommend(to_sequence(user_ids), histories=user_histories, exclude=to_sequence(ITEM_IDS[:2]))
    assert [*answers] == [*expected_answers]
    assert [*retriever.recommend(user_ids, histories=to_sequence(histories), exclude=ITEM_IDS[:2])] == [*expected_answers]
    assert [*retriever.similar(to_sequence(ITEM_IDS[:2]))] == [*retriever.similar(ITEM_IDS[:2])]


def test_an_unknown_user_without_a_known_item_gets_popular_items(flat_model: PackagedModel, retriever: Retriever) -> None:
    exported_model = flat_model.exported_model
    count_I = np.bincount(np.concatenate(exported_model.train), minlength=NUM_ITEMS)
    popular_rows = sorted(range(NUM_ITEMS), key=lambda row: (-count_I[row], ITEM_IDS[row]))[:15]
    answers = retriever.recommend([1, 2, USER_IDS[0]], k=15, histories=[[], ["unheard of"], None])
    ids, scores = answers.item_ids, answers.scores
    for item_ids, item_scores in zip(ids[:2], scores[:2], strict=True):
        assert item_ids.tolist() == [ITEM_IDS[row] for row in popular_rows]
        np.testing.assert_allclose(item_scores, count_I[popular_rows] / count_I.sum(), rtol=1e-6)
    assert not seen_ids_of(exported_model, 0) & {*ids[2]}
    (all_ids,) = retriever.recommend([1], k=10**9).item_ids
    assert sorted(all_ids) == sorted(ITEM_IDS)


def test_a_request_may_replace_the_popularity_weight(build_packaged_model: ModelBuilder) -> None:
    exported_model, package = build_packaged_model(popularity={"kind": "fixed", "weight": 0.5}, history={"pooling": "recency"})
    retriever = load_retriever(package)
    query_vector, seen_rows = exported_model.query_vector(0, exported_model.log[0]), exported_model.log[0]
    assert (len(query_vector), query_vector[-1]) == (DIM + 1, 0.5)  # the last dimension is the weight of the item popularity
    for weight in (None, 0.5, 0, -2.5, 1e4):
        weighted_query_vector = query_vector if weight is None else np.append(query_vector[:-1], np.float32(weight))
        (ids,) = retriever.recommend(USER_IDS[:1], k=10, popularity_weight=weight).item_ids
        assert ids.tolist() == exported_model.best_ids(weighted_query_vector, seen_rows=seen_rows, k=10)
    (answer,) = retriever.recommend(USER_IDS[:1], k=3, popularity_weight=-2.5, with_vectors=True)
    assert answer.query_vector[-1] == -2.5
    np.testing.assert_allclose(answer.scores, np.array(answer.item_vectors) @ answer.query_vector, atol=1e-4)


def test_popularity_affects_similar_items_only_with_a_weight_in_the_request(build_packaged_model: ModelBuilder) -> None:
    exported_model, package = build_packaged_model(popularity={"kind": "learned"})
    retriever = load_retriever(package)
    query_vector = np.append(exported_model.item_vectors[7, :-1], 0)
    assert retriever.similar([ITEM_IDS[7]], k=10).item_ids[0].tolist() == exported_model.best_ids(
        query_vector, seen_rows=[7], k=10
    )
    query_vector[-1] = 3
    weighted_answers = retriever.similar([ITEM_IDS[7]], k=10, popularity_weight=3)
    assert weighted_answers.item_ids[0].tolist() == exported_model.best_ids(query_vector, seen_rows=[7], k=10)


@pytest.mark.parametrize("output_dim", [None, 16], ids=["concatenated", "projected to 16 dimensions"])
def test_a_spectral_block_does_not_change_similar_items(output_dim: int | None, tmp_path: Path) -> None:
    spectral_block = {"dim": 8, "weights": [0.5], "output_dim": output_dim}
    pipelines = [
        build_pipeline(tmp_path / name, model=model, quantization="fp32")
        for name, model in (("without", {}), ("with", {"spectral_block": spectral_block}))
    ]
    expected_answers, answers = (
        Retriever.load(pipeline.package_folder).similar([1000, 1007, 1250], k=5) for pipeline in pipelines
    )
    for expected, answer in zip(expected_answers, answers, strict=True):
        assert answer.item_ids == expected.item_ids
        np.testing.assert_allclose(answer.scores, expected.scores, atol=1e-3)


def test_a_popularity_weight_is_refused_without_a_popularity_term_or_outside_its_limits(
    build_packaged_model: ModelBuilder, retriever: Retriever
) -> None:
    with pytest.raises(InputError, match="popularity_weight is set, but the model has no popularity term"):
        retriever.recommend(USER_IDS[:1], popularity_weight=0.1)
    popularity_retriever = load_retriever(build_packaged_model(popularity={"kind": "learned", "served_weight": 0}).package)
    for weight in (math.inf, math.nan, -10_001):
        with pytest.raises(InputError, match=r"popularity_weight is .*; it must be at most 10000 in absolute value"):
            popularity_retriever.similar(ITEM_IDS[:1], popularity_weight=weight)


def test_is_known_marks_the_users_of_the_log(retriever: Retriever) -> None:
    assert retriever.is_known([USER_IDS[0], 1, USER_IDS[5]]).tolist() == [True, False, True]


def test_a_model_of_user_ids_alone_serves_known_users_and_excludes_the_given_history(
    build_packaged_model: ModelBuilder,
) -> None:
    exported_model, package = build_packaged_model(learn_user_embedding=True, history={"length": 0, "last_item_feature": False})
    retriever = load_retriever(package)
    ids = retriever.recommend([USER_IDS[2], 1], k=6, histories=[[ITEM_IDS[8]], [ITEM_IDS[8]]]).item_ids
    assert ids[0].tolist() == exported_model.best_ids(
        exported_model.query_vector(2, []), seen_rows=[8, *exported_model.log[2]], k=6
    )
    assert ITEM_IDS[8] not in ids[1] and len(ids[1]) == 6


@settings(max_examples=25)
@given(st.lists(st.integers(-3, NUM_USERS - 1), max_size=9), st.integers(1, 40), st.data())
def test_recommendations_do_not_depend_on_other_queries_of_the_batch(
    retriever: Retriever, users: list[int], k: int, data: st.DataObject
) -> None:
    optional_history = st.one_of(st.none(), st.lists(st.sampled_from([*ITEM_IDS[:40], "unheard of"]), max_size=5))
    histories = data.draw(st.lists(optional_history, min_size=len(users), max_size=len(users)))
    user_ids = [USER_IDS[user] if user >= 0 else user for user in users]  # negative ids are unknown
    batch_item_ids = retriever.recommend(user_ids, k=k, histories=histories).item_ids
    for user_id, history, item_ids in zip(user_ids, histories, batch_item_ids, strict=True):
        single_item_ids = retriever.recommend([user_id], k=k, histories=[history]).item_ids
        assert item_ids.tolist() == single_item_ids[0].tolist()


def test_batches_of_a_large_request_do_not_change_its_answers(retriever: Retriever, monkeypatch: pytest.MonkeyPatch) -> None:
    expected_ids = retriever.recommend(USER_IDS, k=7).item_ids
    monkeypatch.setattr("recsys_core.serving.retriever.MAX_BATCH_RESULTS", 3 * 7)  # batches of three users
    ids = retriever.recommend(USER_IDS, k=7).item_ids
    assert [item_ids.tolist() for item_ids in ids] == [item_ids.tolist() for item_ids in expected_ids]


def test_a_request_without_users_is_empty_and_invalid_arguments_are_rejected(retriever: Retriever) -> None:
    assert list(retriever.recommend([], k=3)) == []
    with pytest.raises(InputError, match="k is 0"):
        retriever.recommend([1], k=0)
    with pytest.raises(InputError, match="1 histories for 2 users"):
        retriever.recommend([1, 2], k=1, histories=[[]])


def test_a_request_may_exclude_items_and_may_include_seen_items(
    flat_model: PackagedModel, retriever: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported_model = flat_model.exported_model
    query_vector = exported_model.query_vector(5, exported_model.log[5])
    unseen_ids = exported_model.best_ids(query_vector, seen_rows=exported_model.log[5], k=20)
    excluded_ids = [*unseen_ids[:3], unseen_ids[1], unseen_ids[6], "unheard of"]
    for max_listed_excludes in (1_000, 2):
        monkeypatch.setattr("recsys_core.serving.retriever.MAX_LISTED_EXCLUDES", max_listed_excludes)
        (answer,) = retriever.recommend([USER_IDS[5]], k=5, exclude=excluded_ids)
        assert answer.item_ids == [*unseen_ids[3:6], *unseen_ids[7:9]]
    (answer,) = retriever.recommend([USER_IDS[5]], k=NUM_ITEMS, exclude_seen=False)
    assert answer.item_ids == exported_model.best_ids(query_vector, seen_rows=[], k=NUM_ITEMS)


def test_items_below_the_requested_score_are_left_out(retriever: Retriever) -> None:
    full_answers = retriever.recommend([USER_IDS[5], USER_IDS[6], 1], k=20)
    min_score = full_answers[0].scores[7]
    answers = retriever.recommend([USER_IDS[5], USER_IDS[6], 1], k=20, min_score=min_score)
    assert answers[0].item_ids == full_answers[0].item_ids[:8]
    assert answers[1].item_ids == [
        item_id for item_id, score in zip(full_answers[1].item_ids, full_answers[1].scores, strict=True) if score >= min_score
    ]
    assert answers[2] == full_answers[2] and answers[2].fallback == "popularity"  # not limited by a score


def test_items_that_an_index_never_returns_complete_the_answers(
    flat_model: PackagedModel, retriever: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported_model = flat_model.exported_model
    indexed_vector_ID = exported_model.item_vectors[np.arange(NUM_ITEMS) % 2]  # many items have the lowest possible score
    index_kind = PqFastScan(rescore=0).fitted(*indexed_vector_ID.shape)
    monkeypatch.setattr(retriever, "_index", build_index(index_kind, indexed_vector_ID))
    monkeypatch.setattr(retriever, "_index_kind", index_kind)
    _, row_BN = search_exhaustively(retriever._index, exported_model.item_vectors, kind=index_kind, depth=NUM_ITEMS)
    assert (row_BN < 0).any()
    for item_id, answer in zip(ITEM_IDS, retriever.similar(ITEM_IDS, k=NUM_ITEMS), strict=True):
        assert sorted([item_id, *answer.item_ids]) == sorted(ITEM_IDS)
        assert answer.scores == sorted(answer.scores, reverse=True)
    (answer,) = retriever.similar(ITEM_IDS[:1], k=NUM_ITEMS - 1, exclude=ITEM_IDS[3:9])
    assert sorted(answer.item_ids) == sorted([*ITEM_IDS[1:3], *ITEM_IDS[9:]])


@pytest.mark.parametrize("min_score", [0.0, -0.1])
def test_items_below_the_requested_score_are_left_out_even_if_k_exceeds_the_number_of_unseen_items(
    retriever: Retriever, min_score: float
) -> None:
    (full_answer,) = retriever.recommend([USER_IDS[5]], k=NUM_ITEMS)
    assert len(full_answer.scores) < NUM_ITEMS and full_answer.scores[-1] < min_score
    (answer,) = retriever.recommend([USER_IDS[5]], k=NUM_ITEMS, min_score=min_score)
    assert answer.scores == [score for score in full_answer.scores if score >= min_score]


def test_an_answer_reports_its_fallback_version_space_and_number_of_unknown_items(retriever: Retriever) -> None:
    history = [ITEM_IDS[4], "unheard of", ITEM_IDS[9], "unheard of"]
    histories = [None, history, history, ["?"], history]
    answers = retriever.recommend([USER_IDS[0], 1, None, 1, USER_IDS[0]], k=3, histories=histories)
    assert answers.fallbacks == [None, "history", "history", "popularity", None]
    assert [answer.num_unknown_items for answer in answers] == [0, 2, 2, 1, 2]
    assert {answer.version for answer in answers} == {retriever.version} and len(retriever.version) == 12
    assert {answer.space_id for answer in answers} == {retriever.space_id}
    # Scores may differ in their last bits if the batch has another size.
    (single_answer,) = retriever.recommend(histories=[history], k=3)
    assert answers[1]._replace(scores=single_answer.scores) == answers[2]._replace(scores=single_answer.scores) == single_answer
    assert answers[1].scores == pytest.approx(single_answer.scores, rel=1e-6)
    assert answers[2].scores == pytest.approx(single_answer.scores, rel=1e-6)


@pytest.mark.parametrize("index_kind", ["flat", "hnsw", "ivf_flat", "ivf_sq8"])
def test_the_scores_of_an_answer_are_the_inner_products_of_its_vectors(
    build_packaged_model: ModelBuilder, index_kind: str
) -> None:
    exported_model, package = build_packaged_model(index_kind=index_kind, item_files=ITEM_FILES)
    retriever = load_retriever(package)
    answers = retriever.recommend([USER_IDS[0], 1, USER_IDS[3]], k=4, with_vectors=True)
    for answer in answers:
        rows = [ITEM_IDS.index(item_id) for item_id in answer.item_ids]
        np.testing.assert_allclose(answer.item_vectors, exported_model.item_vectors[rows], atol=1e-6)
        scores = np.array(answer.item_vectors) @ np.array(answer.query_vector)
        if answer.fallback is None:
            np.testing.assert_allclose(scores, answer.scores, atol=0.05 if index_kind == "ivf_sq8" else 1e-5)
    assert retriever.recommend([USER_IDS[0]], k=4)[0].item_vectors is None


@pytest.mark.parametrize("index_kind", ["flat", "hnsw", "ivf_flat"])
def test_similar_items_have_the_largest_inner_products(build_packaged_model: ModelBuilder, index_kind: str) -> None:
    exported_model, package = build_packaged_model(index_kind=index_kind, item_files=ITEM_FILES)
    retriever = load_retriever(package)
    query_rows = [7, 250, 3]
    answers = retriever.similar([*(ITEM_IDS[row] for row in query_rows), "unheard of"], k=5, exclude=[ITEM_IDS[9]])
    for row, answer in zip(query_rows, list(answers)[:3], strict=True):
        if index_kind == "flat":
            assert answer.item_ids == exported_model.best_ids(exported_model.item_vectors[row], seen_rows=[row, 9], k=5)
        assert ITEM_IDS[row] not in answer.item_ids and len(answer.item_ids) == 5 and answer.error is None
    assert answers[3].error == "item_id 'unheard of' is not in the catalogue" and answers[3].item_ids == []
    item_filter, allowed_rows = FILTERS_AND_ROWS[0]
    (answer,) = retriever.similar([ITEM_IDS[7]], k=NUM_ITEMS, filter=item_filter)
    assert {*answer.item_ids} == {ITEM_IDS[row] for row in allowed_rows} - {ITEM_IDS[7]}


def test_an_unknown_option_and_a_request_without_queries_are_rejected(retriever: Retriever) -> None:
    with pytest.raises(InputError, match="unknown option top; there are exclude_seen"):
        retriever.recommend([1], k=3, top=3)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="exclude is the text 'item-000'; pass a list of item ids"):
        retriever.recommend([1], k=3, exclude="item-000")
    with pytest.raises(InputError, match="there are no queries"):
        retriever.recommend(k=3)
