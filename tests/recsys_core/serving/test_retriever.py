import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.errors import InputError
from recsys_core.manifests import PackageManifest
from recsys_core.serving.package import description_sha256
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.serving.conftest import CONTEXT_FEATURES, ITEM_IDS, ITEMS, USER_FEATURES, USER_IDS, USERS, Build, World

KINDS = ("flat", "ivf_flat", "ivf_sq8", "ivf_pq", "opq_pq", "pq_fastscan", "hnsw")


@pytest.fixture(scope="module")
def flat(build: Build) -> tuple[World, PackageManifest]:
    return build(index="flat")


@pytest.fixture(scope="module")
def retriever(flat: tuple[World, PackageManifest]) -> Retriever:
    return load(flat[1])


@pytest.fixture(scope="module", params=KINDS)
def any_retriever(request: pytest.FixtureRequest, build: Build) -> tuple[World, Retriever]:
    world, package = build(index=request.param, quantization="int8")
    return world, load(package)


def load(package: PackageManifest) -> Retriever:
    return Retriever.load(package.folder / "package", sha256=description_sha256(package))


def _seen(world: World, user: int) -> set[str]:
    return {ITEM_IDS[row] for row in world.log[user]}


def test_known_users_get_the_exact_best_unseen_items(flat, retriever: Retriever) -> None:
    world, _ = flat
    ids, scores = retriever.recommend(USER_IDS, k=10)
    for user in range(USERS):
        query = world.query(user, world.log[user])
        assert ids[user].tolist() == world.best(query, seen=world.log[user], k=10)
        rows = [ITEM_IDS.index(item) for item in ids[user]]
        np.testing.assert_allclose(scores[user], world.item_vectors[rows] @ query, rtol=1e-4, atol=1e-5)


def test_a_package_loads_without_the_compiler_of_torch(flat) -> None:
    code = (
        "import sys; from pathlib import Path; from recsys_core.serving.retriever import Retriever; "
        f"Retriever.load(Path({str(flat[1].folder)!r})); print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.split() == ["True", "False"]


def test_int8_agrees_with_float_on_most_of_the_top(build: Build, flat, retriever: Retriever) -> None:
    small = load(build(index="flat", quantization="int8")[1])
    pairs = zip(retriever.recommend(USER_IDS, k=20)[0], small.recommend(USER_IDS, k=20)[0], strict=True)
    assert np.mean([len({*a} & {*b}) / len(a) for a, b in pairs]) > 0.9


def test_every_index_kind_fills_the_list_without_seen_or_repeated_items(any_retriever: tuple[World, Retriever]) -> None:
    world, retriever = any_retriever
    for k in (1, 20, ITEMS, ITEMS + 50):
        ids, scores = retriever.recommend(USER_IDS, k=k)
        for user, (item_ids, score) in enumerate(zip(ids, scores, strict=True)):
            seen = _seen(world, user)
            assert len(item_ids) == len(score) == len({*item_ids}) == min(k, ITEMS - len(seen))
            assert not seen & {*item_ids} and {*item_ids} <= {*ITEM_IDS}
            assert (np.diff(score) <= 0).all()


def test_a_user_who_has_seen_nearly_all_items_gets_the_others(any_retriever: tuple[World, Retriever]) -> None:
    world, retriever = any_retriever
    assert {*retriever.recommend([USER_IDS[3]], k=5)[0][0]} == {*ITEM_IDS} - _seen(world, 3)


def test_a_given_history_replaces_the_stored_one(flat, retriever: Retriever) -> None:
    world, _ = flat
    rows = [11, 250, 31, 7, 99, 120, 130, 44]  # longer than a history
    given = [ITEM_IDS[row] for row in rows]
    ids, _ = retriever.recommend([USER_IDS[5], 1], k=8, histories=[["unheard of", *given], given])
    query = world.query(None, rows)
    assert ids[0].tolist() == world.best(query, seen=[*rows, *world.log[5]], k=8)
    assert ids[1].tolist() == world.best(query, seen=rows, k=8)


def test_without_exclude_stored_history_only_the_given_history_is_excluded(flat, retriever: Retriever) -> None:
    world, _ = flat
    rows = world.train[5]
    given = [[ITEM_IDS[row] for row in rows]]
    (ids,), _ = retriever.recommend([USER_IDS[5]], k=ITEMS, histories=given, exclude_stored_history=False)
    assert {*ids} == {*ITEM_IDS} - {*given[0]}  # the user's test item may come back
    (best,), _ = retriever.recommend([USER_IDS[5]], k=8, histories=given, exclude_stored_history=False)
    assert best.tolist() == world.best(world.query(None, rows), seen=rows, k=8)


def test_a_history_of_none_keeps_the_stored_one(retriever: Retriever) -> None:
    mixed, _ = retriever.recommend(USER_IDS[:2], k=5, histories=[None, [ITEM_IDS[0]]])
    alone, _ = retriever.recommend(USER_IDS[:1], k=5)
    assert mixed[0].tolist() == alone[0].tolist()


def test_an_unknown_user_without_a_known_item_gets_popular_items(flat, retriever: Retriever) -> None:
    world, _ = flat
    count = np.bincount(np.concatenate(world.train), minlength=ITEMS)
    popular = sorted(range(ITEMS), key=lambda row: (-count[row], ITEM_IDS[row]))
    ids, scores = retriever.recommend([1, 2, USER_IDS[0]], k=15, histories=[[], ["unheard of"], None])
    for answer, score in zip(ids[:2], scores[:2], strict=True):
        assert answer.tolist() == [ITEM_IDS[row] for row in popular[:15]]
        np.testing.assert_allclose(score, count[popular[:15]] / count.sum(), rtol=1e-6)
    assert not _seen(world, 0) & {*ids[2]}
    everything, _ = retriever.recommend([1], k=10**9)
    assert sorted(everything[0]) == sorted(ITEM_IDS)


def test_is_known_marks_the_users_of_the_log(retriever: Retriever) -> None:
    assert retriever.is_known([USER_IDS[0], 1, USER_IDS[5]]).tolist() == [True, False, True]


def test_a_model_of_user_ids_alone_serves_known_users_and_excludes_given_items(build: Build) -> None:
    world, package = build(learn_user_embedding=True, history={"length": 0, "last_item_feature": False})
    retriever = load(package)
    ids, _ = retriever.recommend([USER_IDS[2], 1], k=6, histories=[[ITEM_IDS[8]], [ITEM_IDS[8]]])
    assert ids[0].tolist() == world.best(world.query(2, []), seen=[8, *world.log[2]], k=6)
    assert ITEM_IDS[8] not in ids[1] and len(ids[1]) == 6


def test_features_of_known_users_are_read_from_the_package(build: Build) -> None:
    world, package = build(features=(*USER_FEATURES, *CONTEXT_FEATURES))
    retriever = load(package)
    ids, _ = retriever.recommend(USER_IDS, k=6)
    for user, item_ids in enumerate(ids):
        assert item_ids.tolist() == world.best(world.query(user, world.log[user]), seen=world.log[user], k=6)
    rows = [11, 250, 31]
    given = [[ITEM_IDS[row] for row in rows]] * 2
    (known, unknown), _ = retriever.recommend([USER_IDS[5], 1], k=6, histories=given)
    assert known.tolist() == world.best(world.query(5, rows), seen=[*rows, *world.log[5]], k=6)
    assert unknown.tolist() == world.best(world.query(None, rows), seen=rows, k=6)
    # Without a history, the query of a known user has only its features.
    (known,), _ = retriever.recommend([USER_IDS[5]], k=6, histories=[[]])
    assert known.tolist() == world.best(world.query(5, []), seen=world.log[5], k=6)
    assert not [path.name for path in (package.folder / "package").glob("context.*")]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(-3, USERS - 1), max_size=9), st.integers(1, 40), st.data())
def test_recommendations_do_not_depend_on_the_rest_of_the_batch(
    retriever: Retriever, users: list[int], k: int, data: st.DataObject
) -> None:
    choice = st.one_of(st.none(), st.lists(st.sampled_from([*ITEM_IDS[:40], "unheard of"]), max_size=5))
    histories = data.draw(st.lists(choice, min_size=len(users), max_size=len(users)))
    user_ids = [USER_IDS[user] if user >= 0 else user for user in users]
    together, _ = retriever.recommend(user_ids, k=k, histories=histories)
    for user, history, answer in zip(user_ids, histories, together, strict=True):
        alone, _ = retriever.recommend([user], k=k, histories=[history])
        assert answer.tolist() == alone[0].tolist()


def test_a_large_request_is_split_into_batches(retriever: Retriever, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = retriever.recommend(USER_IDS, k=7)
    monkeypatch.setattr("recsys_core.serving.retriever.MAX_BATCH_RESULTS", 21)
    parts, _ = retriever.recommend(USER_IDS, k=7)
    assert [answer.tolist() for answer in whole] == [answer.tolist() for answer in parts]


def test_invalid_arguments_are_rejected(retriever: Retriever) -> None:
    assert retriever.recommend([], k=3) == ([], [])
    with pytest.raises(InputError, match="k is 0"):
        retriever.recommend([1], k=0)
    with pytest.raises(InputError, match="1 histories for 2 users"):
        retriever.recommend([1, 2], k=1, histories=[[]])


def test_the_folder_of_the_stage_loads_without_a_checksum(flat, retriever: Retriever) -> None:
    loaded = Retriever.load(flat[1].folder)
    assert loaded.recommend(USER_IDS[:1], k=5)[0][0].tolist() == retriever.recommend(USER_IDS[:1], k=5)[0][0].tolist()


def test_a_moved_package_loads_without_other_files(flat, retriever: Retriever, tmp_path: Path) -> None:
    shutil.copytree(flat[1].folder / "package", tmp_path / "elsewhere")
    moved = Retriever.load(tmp_path / "elsewhere", sha256=description_sha256(flat[1]))
    assert moved.recommend(USER_IDS[:1], k=5)[0][0].tolist() == retriever.recommend(USER_IDS[:1], k=5)[0][0].tolist()
