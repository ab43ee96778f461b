import math
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.errors import InputError
from recsys_core.manifests import PackageManifest
from recsys_core.serving.description import description_sha256
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.refresh.small_pipeline import build_pipeline
from tests.recsys_core.serving.conftest import (
    CONTEXT_FEATURES,
    ITEM_FILES,
    ITEM_IDS,
    NUM_ITEMS,
    NUM_USERS,
    TIMES,
    USER_FEATURES,
    USER_IDS,
    Build,
    ExportedModel,
)

KINDS = ("flat", "ivf_flat", "ivf_sq8", "ivf_pq", "opq_pq", "pq_fastscan", "hnsw")
IN_SHARDS = ("flat", "ivf_sq8", "pq_fastscan", "hnsw")
"""Kinds that are tested with several shards too."""


@pytest.fixture(scope="module")
def flat(build: Build) -> tuple[ExportedModel, PackageManifest]:
    return build(index="flat")


@pytest.fixture(scope="module")
def retriever(flat: tuple[ExportedModel, PackageManifest]) -> Retriever:
    return load(flat[1])


@pytest.fixture(scope="module", params=[*((kind, 1) for kind in KINDS), *((kind, 3) for kind in IN_SHARDS)], ids=str)
def any_retriever(request: pytest.FixtureRequest, build: Build) -> tuple[ExportedModel, Retriever]:
    kind, num_shards = request.param
    exported_model, package = build(index=kind, index_shards=num_shards, quantization="int8")
    return exported_model, load(package)


def load(package: PackageManifest) -> Retriever:
    return Retriever.load(package.folder / "package", sha256=description_sha256(package))


def _seen(exported_model: ExportedModel, user: int) -> set[str]:
    return {ITEM_IDS[row] for row in exported_model.log[user]}


def test_known_users_get_the_exact_best_unseen_items(flat, retriever: Retriever) -> None:
    exported_model, _ = flat
    recommendations = retriever.recommend(USER_IDS, k=10)
    ids, scores = recommendations.item_ids, recommendations.scores
    for user in range(NUM_USERS):
        query = exported_model.query(user, exported_model.log[user])
        assert ids[user].tolist() == exported_model.best(query, seen=exported_model.log[user], k=10)
        rows = [ITEM_IDS.index(item) for item in ids[user]]
        np.testing.assert_allclose(scores[user], exported_model.item_vectors[rows] @ query, rtol=1e-4, atol=1e-5)


def test_a_package_loads_without_the_compiler_of_torch(flat) -> None:
    code = (
        "import sys; from pathlib import Path; from recsys_core.serving.retriever import Retriever; "
        f"Retriever.load(Path({str(flat[1].folder)!r})); print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.split() == ["True", "False"]


def test_int8_agrees_with_float_on_most_of_the_top(build: Build, flat, retriever: Retriever) -> None:
    small = load(build(index="flat", quantization="int8")[1])
    pairs = zip(retriever.recommend(USER_IDS, k=20).item_ids, small.recommend(USER_IDS, k=20).item_ids, strict=True)
    assert np.mean([len({*a} & {*b}) / len(a) for a, b in pairs]) > 0.9


def test_every_index_kind_fills_the_list_without_seen_or_repeated_items(any_retriever: tuple[ExportedModel, Retriever]) -> None:
    exported_model, retriever = any_retriever
    for k in (1, 20, NUM_ITEMS, NUM_ITEMS + 50):
        recommendations = retriever.recommend(USER_IDS, k=k)
        ids, scores = recommendations.item_ids, recommendations.scores
        for user, (item_ids, score) in enumerate(zip(ids, scores, strict=True)):
            seen = _seen(exported_model, user)
            assert len(item_ids) == len(score) == len({*item_ids}) == min(k, NUM_ITEMS - len(seen))
            assert not seen & {*item_ids} and {*item_ids} <= {*ITEM_IDS}
            assert (np.diff(score) <= 0).all()


def test_a_user_who_has_seen_nearly_all_items_gets_the_others(any_retriever: tuple[ExportedModel, Retriever]) -> None:
    exported_model, retriever = any_retriever
    assert {*retriever.recommend([USER_IDS[3]], k=5).item_ids[0]} == {*ITEM_IDS} - _seen(exported_model, 3)


def test_a_given_history_replaces_the_stored_one(flat, retriever: Retriever) -> None:
    exported_model, _ = flat
    rows = [11, 250, 31, 7, 99, 120, 130, 44]  # longer than a history
    given_history = [ITEM_IDS[row] for row in rows]
    ids = retriever.recommend([USER_IDS[5], 1], k=8, histories=[["unheard of", *given_history], given_history]).item_ids
    query = exported_model.query(None, rows)
    assert ids[0].tolist() == exported_model.best(query, seen=[*rows, *exported_model.log[5]], k=8)
    assert ids[1].tolist() == exported_model.best(query, seen=rows, k=8)


def test_without_exclude_stored_history_only_the_given_history_is_excluded(flat, retriever: Retriever) -> None:
    exported_model, _ = flat
    rows = exported_model.train[5]
    histories = [[ITEM_IDS[row] for row in rows]]
    (ids,) = retriever.recommend([USER_IDS[5]], k=NUM_ITEMS, histories=histories, exclude_stored_history=False).item_ids
    assert {*ids} == {*ITEM_IDS} - {*histories[0]}  # the user's test item may come back
    (best,) = retriever.recommend([USER_IDS[5]], k=8, histories=histories, exclude_stored_history=False).item_ids
    assert best.tolist() == exported_model.best(exported_model.query(None, rows), seen=rows, k=8)


def test_a_history_of_none_keeps_the_stored_one(retriever: Retriever) -> None:
    mixed = retriever.recommend(USER_IDS[:2], k=5, histories=[None, [ITEM_IDS[0]]]).item_ids
    alone = retriever.recommend(USER_IDS[:1], k=5).item_ids
    assert mixed[0].tolist() == alone[0].tolist()


def test_an_unknown_user_without_a_known_item_gets_popular_items(flat, retriever: Retriever) -> None:
    exported_model, _ = flat
    count = np.bincount(np.concatenate(exported_model.train), minlength=NUM_ITEMS)
    popular = sorted(range(NUM_ITEMS), key=lambda row: (-count[row], ITEM_IDS[row]))
    recommendations = retriever.recommend([1, 2, USER_IDS[0]], k=15, histories=[[], ["unheard of"], None])
    ids, scores = recommendations.item_ids, recommendations.scores
    for answer, score in zip(ids[:2], scores[:2], strict=True):
        assert answer.tolist() == [ITEM_IDS[row] for row in popular[:15]]
        np.testing.assert_allclose(score, count[popular[:15]] / count.sum(), rtol=1e-6)
    assert not _seen(exported_model, 0) & {*ids[2]}
    everything = retriever.recommend([1], k=10**9).item_ids
    assert sorted(everything[0]) == sorted(ITEM_IDS)


def test_a_request_may_replace_the_weight_of_the_popularity(build: Build) -> None:
    exported_model, package = build(popularity={"kind": "fixed", "weight": 0.5}, history={"pooling": "recency"})
    retriever = load(package)
    query, seen = exported_model.query(0, exported_model.log[0]), exported_model.log[0]
    assert (len(query), query[-1]) == (17, 0.5)
    for weight in (None, 0.5, 0, -2.5, 1e4):
        expected = query if weight is None else np.append(query[:-1], np.float32(weight))
        (ids,) = retriever.recommend(USER_IDS[:1], k=10, popularity_weight=weight).item_ids
        assert ids.tolist() == exported_model.best(expected, seen=seen, k=10)
    (answer,) = retriever.recommend(USER_IDS[:1], k=3, popularity_weight=-2.5, with_vectors=True)
    assert answer.query_vector[-1] == -2.5
    np.testing.assert_allclose(answer.scores, np.array(answer.item_vectors) @ answer.query_vector, atol=1e-4)


def test_similar_items_are_not_the_popular_ones(build: Build) -> None:
    exported_model, package = build(popularity={"kind": "learned"})
    retriever = load(package)
    query = np.append(exported_model.item_vectors[7, :-1], 0)
    assert retriever.similar([ITEM_IDS[7]], k=10).item_ids[0].tolist() == exported_model.best(query, seen=[7], k=10)
    query[-1] = 3
    with_weight = retriever.similar([ITEM_IDS[7]], k=10, popularity_weight=3)
    assert with_weight.item_ids[0].tolist() == exported_model.best(query, seen=[7], k=10)


@pytest.mark.parametrize("output_dim", [None, 16], ids=["concatenated", "reduced to all numbers"])
def test_similar_items_are_compared_without_the_spectral_block(output_dim: int | None, tmp_path: Path) -> None:
    block = {"dim": 8, "weights": [0.5], "output_dim": output_dim}
    pipelines = [
        build_pipeline(tmp_path / name, model=model, quantization="fp32")
        for name, model in (("without", {}), ("with", {"spectral_block": block}))
    ]
    without, with_block = (Retriever.load(pipeline.package_folder).similar([1000, 1007, 1250], k=5) for pipeline in pipelines)
    for expected, answer in zip(without, with_block, strict=True):
        assert answer.item_ids == expected.item_ids
        np.testing.assert_allclose(answer.scores, expected.scores, atol=1e-3)


def test_a_weight_is_refused_without_a_term_or_outside_of_its_limits(build: Build, retriever: Retriever) -> None:
    with pytest.raises(InputError, match="popularity_weight is set, but the model has no popularity term"):
        retriever.recommend(USER_IDS[:1], popularity_weight=0.1)
    with_term = load(build(popularity={"kind": "learned", "served_weight": 0})[1])
    for weight in (math.inf, math.nan, -10_001):
        with pytest.raises(InputError, match=r"popularity_weight is .*; it must be at most 10000 in absolute value"):
            with_term.similar(ITEM_IDS[:1], popularity_weight=weight)


def test_is_known_marks_the_users_of_the_log(retriever: Retriever) -> None:
    assert retriever.is_known([USER_IDS[0], 1, USER_IDS[5]]).tolist() == [True, False, True]


def test_a_model_of_user_ids_alone_serves_known_users_and_excludes_given_items(build: Build) -> None:
    exported_model, package = build(learn_user_embedding=True, history={"length": 0, "last_item_feature": False})
    retriever = load(package)
    ids = retriever.recommend([USER_IDS[2], 1], k=6, histories=[[ITEM_IDS[8]], [ITEM_IDS[8]]]).item_ids
    assert ids[0].tolist() == exported_model.best(exported_model.query(2, []), seen=[8, *exported_model.log[2]], k=6)
    assert ITEM_IDS[8] not in ids[1] and len(ids[1]) == 6


def test_features_of_known_users_are_read_from_the_package(build: Build) -> None:
    exported_model, package = build(features=(*USER_FEATURES, *CONTEXT_FEATURES))
    retriever = load(package)
    ids = retriever.recommend(USER_IDS, k=6).item_ids
    for user, item_ids in enumerate(ids):
        assert item_ids.tolist() == exported_model.best(
            exported_model.query(user, exported_model.log[user]), seen=exported_model.log[user], k=6
        )
    rows = [11, 250, 31]
    histories = [[ITEM_IDS[row] for row in rows]] * 2
    (known_result, unknown_result) = retriever.recommend([USER_IDS[5], 1], k=6, histories=histories).item_ids
    seen_rows = [*rows, *exported_model.log[5]]
    assert known_result.tolist() == exported_model.best(exported_model.query(5, rows), seen=seen_rows, k=6)
    assert unknown_result.tolist() == exported_model.best(exported_model.query(None, rows), seen=rows, k=6)
    # Without a history, the query of a known user has only its features.
    (known_result,) = retriever.recommend([USER_IDS[5]], k=6, histories=[[]]).item_ids
    assert known_result.tolist() == exported_model.best(exported_model.query(5, []), seen=exported_model.log[5], k=6)
    assert not [path.name for path in (package.folder / "package").glob("context.*.row.npy")]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(-3, NUM_USERS - 1), max_size=9), st.integers(1, 40), st.data())
def test_recommendations_do_not_depend_on_the_rest_of_the_batch(
    retriever: Retriever, users: list[int], k: int, data: st.DataObject
) -> None:
    choice = st.one_of(st.none(), st.lists(st.sampled_from([*ITEM_IDS[:40], "unheard of"]), max_size=5))
    histories = data.draw(st.lists(choice, min_size=len(users), max_size=len(users)))
    user_ids = [USER_IDS[user] if user >= 0 else user for user in users]
    batch_answers = retriever.recommend(user_ids, k=k, histories=histories).item_ids
    for user, history, answer in zip(user_ids, histories, batch_answers, strict=True):
        single_answer = retriever.recommend([user], k=k, histories=[history]).item_ids
        assert answer.tolist() == single_answer[0].tolist()


def test_a_large_request_is_split_into_batches(retriever: Retriever, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = retriever.recommend(USER_IDS, k=7).item_ids
    monkeypatch.setattr("recsys_core.serving.retriever.MAX_BATCH_RESULTS", 21)
    parts = retriever.recommend(USER_IDS, k=7).item_ids
    assert [answer.tolist() for answer in whole] == [answer.tolist() for answer in parts]


def test_invalid_arguments_are_rejected(retriever: Retriever) -> None:
    assert list(retriever.recommend([], k=3)) == []
    with pytest.raises(InputError, match="k is 0"):
        retriever.recommend([1], k=0)
    with pytest.raises(InputError, match="1 histories for 2 users"):
        retriever.recommend([1, 2], k=1, histories=[[]])


def test_the_folder_of_the_stage_loads_without_a_checksum(flat, retriever: Retriever) -> None:
    loaded = Retriever.load(flat[1].folder)
    assert (
        loaded.recommend(USER_IDS[:1], k=5).item_ids[0].tolist() == retriever.recommend(USER_IDS[:1], k=5).item_ids[0].tolist()
    )


def test_a_moved_package_loads_without_other_files(flat, retriever: Retriever, tmp_path: Path) -> None:
    shutil.copytree(flat[1].folder / "package", tmp_path / "elsewhere")
    moved = Retriever.load(tmp_path / "elsewhere", sha256=description_sha256(flat[1]))
    assert (
        moved.recommend(USER_IDS[:1], k=5).item_ids[0].tolist() == retriever.recommend(USER_IDS[:1], k=5).item_ids[0].tolist()
    )


def test_features_of_a_request_are_encoded_as_in_the_ingest(build: Build) -> None:
    exported_model, package = build(features=(*USER_FEATURES, *CONTEXT_FEATURES))
    retriever = load(package)
    assert retriever.request_features.columns == [
        *("user.single", "list", "weighted_list", "weights", "user.number", "context.single", "context.number")
    ]
    ids = retriever.recommend(
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
    history = {5: exported_model.log[5], 6: exported_model.log[6]}
    queries = [
        exported_model.query(5, history[5], given={"context.single": ([3], None), "context.number": ([1], [0.5])}),
        exported_model.query(None, [], given={"context.single": ([2], None), "user.weighted_list": ([4, 0], [2.0, 1.0])}),
        exported_model.query(6, history[6], given={"user.single": ([2], None)}),
    ]
    for answer, query, seen in zip(ids, queries, (history[5], [], history[6]), strict=False):
        assert answer.item_ids == exported_model.best(query, seen=seen, k=6)
    assert ids.fallbacks == [None, "features", None, "popularity"]


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
def test_invalid_features_are_rejected_by_name(build: Build, features: dict[str, list[Any]], message: str) -> None:
    _, package = build(features=(*USER_FEATURES, *CONTEXT_FEATURES))
    with pytest.raises(InputError, match=message):
        load(package).recommend([1], k=3, features=features)


@pytest.fixture(scope="module", params=KINDS)
def filtered(request: pytest.FixtureRequest, build: Build) -> tuple[ExportedModel, Retriever]:
    exported_model, package = build(index=request.param, item_files=ITEM_FILES)
    return exported_model, load(package)


IN_TABLE = range(NUM_ITEMS - 10)
FILTERS: list[tuple[dict[str, Any], list[int]]] = [
    ({"genre": {"in": ["rock", "jazz"]}}, [row for row in IN_TABLE if row % 3 == 0]),
    ({"genre": "pop", "price": {"ge": 10, "lt": 12.5}}, [row for row in IN_TABLE if row % 3 == 1 and row % 50 in (10, 11, 12)]),
    ({"stock": [2, 3]}, [row for row in IN_TABLE if row % 7 in (2, 3)]),
    ({"is_new": True, "stock": {"gt": 4, "le": 5}}, [row for row in IN_TABLE if row % 2 == 0 and row % 7 == 5]),
    ({"since": {"since": "2026-10-01T02:00:00+02:00"}}, [row for row in IN_TABLE if TIMES[row] >= datetime(2026, 10, 1)]),
    ({"price": {"gt": 1000}}, []),
]


@pytest.mark.parametrize(("item_filter", "allowed"), FILTERS)
@pytest.mark.parametrize("max_exact", [0, 10_000])
def test_a_filter_is_applied_inside_the_search(
    filtered: tuple[ExportedModel, Retriever],
    item_filter: dict[str, Any],
    allowed: list[int],
    max_exact: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recsys_core.retrieval.search.MAX_EXACT_ITEMS", max_exact)
    exported_model, retriever = filtered
    allowed_ids = {ITEM_IDS[row] for row in allowed}
    for k in (5, NUM_ITEMS):
        answers = retriever.recommend([*USER_IDS, 1], k=k, filter=item_filter)
        for user, answer in enumerate(answers):
            seen = _seen(exported_model, user) if user < NUM_USERS else set()
            assert len(answer.item_ids) == len({*answer.item_ids}) == min(k, len(allowed_ids - seen))
            assert {*answer.item_ids} <= allowed_ids - seen
        assert answers[-1].fallback == "popularity"
        if retriever.package.index_kind == "flat":
            for user in range(NUM_USERS):
                query = exported_model.query(user, exported_model.log[user])
                assert answers[user].item_ids == exported_model.best(query, seen=exported_model.log[user], k=k, allowed=allowed)


def test_a_remembered_filter_does_not_keep_the_exclusions_of_a_request(
    filtered: tuple[ExportedModel, Retriever], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recsys_core.serving.retriever.MAX_LISTED_EXCLUDES", 2)
    _, retriever = filtered
    item_filter = {"stock": [5]}
    (first,) = retriever.recommend([1], k=NUM_ITEMS, filter=item_filter)
    (fewer,) = retriever.recommend([1], k=NUM_ITEMS, filter=item_filter, exclude=first.item_ids[:5])
    assert fewer.item_ids == first.item_ids[5:]
    assert retriever.recommend([1], k=NUM_ITEMS, filter=item_filter)[0] == first
    (times,) = retriever.recommend([1], k=NUM_ITEMS, filter={"since": {"lt": TIMES[9]}})
    assert {*times.item_ids} == {*ITEM_IDS[:9]}


@pytest.mark.parametrize(
    ("item_filter", "message"),
    [
        ({"colour": "red"}, r"unknown column 'colour'; the model has \['genre', 'price', 'stock', 'is_new', 'since'\]"),
        ({"price": {"between": [1, 2]}}, "column 'price' has the unknown operator 'between'; use in, ge, gt, le, lt, since"),
        ({"price": {"ge": "10"}}, "'10' is no value of column 'price'; pass a finite number"),
        ({"price": {"ge": math.nan}}, "nan is no value of column 'price'"),
        ({"stock": {"in": 3}}, "'stock' in 3: pass a list of values"),
        ({"stock": {"ge": 10**30}}, "is no value of column 'stock'"),
        ({"genre": {"ge": "a"}}, "column 'genre' has no order"),
        ({"genre": [1]}, "1 is no value of column 'genre'; pass a string"),
        ({"is_new": [1]}, "1 is no value of column 'is_new'; pass true or false"),
        ({"since": {"since": "yesterday"}}, "'yesterday' is no value of column 'since'; pass a time"),
        ({"price": {"since": 3}}, "column 'price' has no times"),
    ],
)
def test_an_invalid_filter_is_rejected_by_column(build: Build, item_filter: dict[str, Any], message: str) -> None:
    retriever = load(build(item_files=ITEM_FILES)[1])
    with pytest.raises(InputError, match=message):
        retriever.recommend([1], k=3, filter=item_filter)


def test_excluded_items_are_left_out_and_seen_items_come_back_on_request(
    flat, retriever: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported_model, _ = flat
    query = exported_model.query(5, exported_model.log[5])
    best = exported_model.best(query, seen=exported_model.log[5], k=20)
    for max_listed in (1_000, 2):
        monkeypatch.setattr("recsys_core.serving.retriever.MAX_LISTED_EXCLUDES", max_listed)
        answer = retriever.recommend([USER_IDS[5]], k=5, exclude=[*best[:3], best[1], best[6], "unheard of"])[0]
        assert answer.item_ids == [*best[3:6], *best[7:9]]
    again = retriever.recommend([USER_IDS[5]], k=NUM_ITEMS, exclude_seen=False)[0]
    assert again.item_ids == exported_model.best(query, seen=[], k=NUM_ITEMS)


def test_items_below_the_smallest_score_are_left_out(retriever: Retriever) -> None:
    whole = retriever.recommend([USER_IDS[5], USER_IDS[6], 1], k=20)
    limit = whole[0].scores[7]
    answers = retriever.recommend([USER_IDS[5], USER_IDS[6], 1], k=20, min_score=limit)
    assert answers[0].item_ids == whole[0].item_ids[:8]
    assert answers[1].item_ids == [
        item for item, score in zip(whole[1].item_ids, whole[1].scores, strict=True) if score >= limit
    ]
    assert answers[2] == whole[2] and answers[2].fallback == "popularity"


def test_an_answer_has_its_origin_and_the_number_of_unknown_items(retriever: Retriever) -> None:
    history = [ITEM_IDS[4], "unheard of", ITEM_IDS[9], "unheard of"]
    histories = [None, history, history, ["?"], history]
    answers = retriever.recommend([USER_IDS[0], 1, None, 1, USER_IDS[0]], k=3, histories=histories)
    assert answers.fallbacks == [None, "history", "history", "popularity", None]
    assert [answer.num_unknown_items for answer in answers] == [0, 2, 2, 1, 2]
    assert {answer.version for answer in answers} == {retriever.version} and len(retriever.version) == 12
    assert {answer.space_id for answer in answers} == {retriever.space_id}
    (single_answer,) = retriever.recommend(histories=[history], k=3)
    assert answers[1]._replace(scores=single_answer.scores) == answers[2]._replace(scores=single_answer.scores) == single_answer
    # A matrix product of another batch size may differ in its last bits.
    assert answers[1].scores == pytest.approx(single_answer.scores, rel=1e-6)
    assert answers[2].scores == pytest.approx(single_answer.scores, rel=1e-6)


@pytest.mark.parametrize("index", ["flat", "hnsw", "ivf_flat", "ivf_sq8"])
def test_vectors_of_an_answer_give_its_scores(build: Build, index: str) -> None:
    exported_model, package = build(index=index, item_files=ITEM_FILES)
    retriever = load(package)
    answers = retriever.recommend([USER_IDS[0], 1, USER_IDS[3]], k=4, with_vectors=True)
    for answer in answers:
        rows = [ITEM_IDS.index(item_id) for item_id in answer.item_ids]
        np.testing.assert_allclose(answer.item_vectors, exported_model.item_vectors[rows], atol=1e-6)
        scores = np.array(answer.item_vectors) @ np.array(answer.query_vector)
        if answer.fallback is None:
            np.testing.assert_allclose(scores, answer.scores, atol=0.05 if index == "ivf_sq8" else 1e-5)
    assert retriever.recommend([USER_IDS[0]], k=4)[0].item_vectors is None


@pytest.mark.parametrize("index", ["flat", "hnsw", "ivf_flat"])
def test_similar_items_have_the_largest_inner_products(build: Build, index: str) -> None:
    exported_model, package = build(index=index, item_files=ITEM_FILES)
    retriever = load(package)
    rows = [7, 250, 3]
    answers = retriever.similar([*(ITEM_IDS[row] for row in rows), "unheard of"], k=5, exclude=[ITEM_IDS[9]])
    for row, answer in zip(rows, answers, strict=False):
        if index == "flat":
            assert answer.item_ids == exported_model.best(exported_model.item_vectors[row], seen=[row, 9], k=5)
        assert ITEM_IDS[row] not in answer.item_ids and len(answer.item_ids) == 5 and answer.error is None
    assert answers[3].error == "item_id 'unheard of' is not in the catalogue" and answers[3].item_ids == []
    allowed = FILTERS[0][1]
    (answer,) = retriever.similar([ITEM_IDS[7]], k=NUM_ITEMS, filter=FILTERS[0][0])
    assert {*answer.item_ids} == {ITEM_IDS[row] for row in allowed} - {ITEM_IDS[7]}


def test_titles_of_items_are_read_from_the_package(build: Build) -> None:
    items = load(build(item_files=ITEM_FILES)[1]).items
    assert items.titles(np.array([4, 3, 0])) == ["title 4", None, "title 0"]


def test_unknown_options_are_rejected(retriever: Retriever) -> None:
    with pytest.raises(InputError, match="unknown option top; there are exclude_seen"):
        retriever.recommend([1], k=3, top=3)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="there are no queries"):
        retriever.recommend(k=3)


def test_a_package_without_users_answers_from_the_history_of_the_request(build: Build) -> None:
    exported_model, package = build(users="none", features=(*USER_FEATURES, *CONTEXT_FEATURES))
    names = {path.name for path in (package.folder / "package").iterdir()}
    assert not {"users.arrow", "users.sha256"} & names
    retriever = Retriever.load(package.folder)
    rows = [11, 250, 31]
    history = [ITEM_IDS[row] for row in rows]
    answers = retriever.recommend(
        [USER_IDS[5], "any", None, USER_IDS[5]],
        k=6,
        histories=[history, history, None, history],
        features={"user.single": [None, None, None, "user.single 2"]},
    )
    assert answers.fallbacks == [None, None, "popularity", None]
    best = exported_model.best(exported_model.query(None, rows), seen=rows, k=6)
    assert answers[0].item_ids == answers[1].item_ids == best
    assert answers[3].item_ids == exported_model.best(
        exported_model.query(None, rows, given={"user.single": ([2], None)}), seen=rows, k=6
    )


def test_the_description_of_a_package_has_its_data_and_its_metrics(flat, retriever: Retriever) -> None:
    exported_model, _ = flat
    package = retriever.package
    assert (package.dim, package.max_k, package.users, package.fallbacks) == (
        16,
        NUM_ITEMS,
        "stored",
        ("history", "popularity"),
    )
    assert (package.data.num_events, package.data.num_users) == (sum(map(len, exported_model.log)), NUM_USERS)
    recall = package.metrics["recall@20"]
    assert 0 < recall.value < 1 and recall.half_width is not None and recall.half_width > 0


def test_a_package_is_found_in_its_stage_in_its_folder_and_in_a_model_of_mlflow(flat, tmp_path: Path) -> None:
    shutil.copytree(flat[1].folder / "package", tmp_path / "artifacts" / "package")
    folders = (flat[1].folder, flat[1].folder / "package", str(tmp_path))
    assert len({Retriever.load(folder).version for folder in folders}) == 1
    assert Retriever.load(tmp_path, version="7").recommend([1], k=1)[0].version == "7"


def test_another_training_has_another_space(build: Build, retriever: Retriever) -> None:
    assert load(build(index="hnsw", quantization="int8")[1]).space_id == retriever.space_id
    assert load(build(similarity="dot")[1]).space_id != retriever.space_id
