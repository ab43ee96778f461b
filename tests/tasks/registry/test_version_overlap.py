"""Overlap of the recommendations of two versions, compared with counts over single users."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest

from recsys_core.errors import InputError
from recsys_core.serving.retriever import Retriever
from tasks.registry.version_overlap import compare_recommendations
from tests.recsys_core.serving.conftest import ITEM_FILES, USER_IDS, ModelBuilder
from tests.recsys_core.serving.conftest import build_packaged_model as build_packaged_model  # a fixture

K = 5


@pytest.fixture(scope="module")
def retrievers(build_packaged_model: ModelBuilder) -> tuple[Retriever, Retriever]:
    """Two versions. The first version reads histories of 2 items, and the second version histories of 6 items."""
    packages = [build_packaged_model(item_files=ITEM_FILES, history={"length": length}).package for length in (2, 6)]
    return Retriever.load(packages[0].folder), Retriever.load(packages[1].folder)


def test_a_version_overlaps_completely_with_itself(retrievers: tuple[Retriever, Retriever]) -> None:
    comparison = compare_recommendations(retrievers[0], retrievers[0], num_users=1_000, k=K)
    assert (comparison.num_users, comparison.mean_overlap, comparison.num_equal_lists, comparison.movers) == (
        len(USER_IDS),
        1.0,
        len(USER_IDS),
        (),
    )


def test_the_mean_overlap_and_the_movers_agree_with_single_recommendations(retrievers: tuple[Retriever, Retriever]) -> None:
    retriever_before, retriever_after = retrievers
    comparison = compare_recommendations(retriever_before, retriever_after, num_users=1_000, k=K)
    item_lists_by_version = [[retriever.recommend([user], K)[0].item_ids for user in USER_IDS] for retriever in retrievers]
    list_pairs = list(zip(*item_lists_by_version, strict=True))
    overlaps = [len({*items_before} & {*items_after}) / len(items_before) for items_before, items_after in list_pairs]
    assert comparison.mean_overlap == pytest.approx(sum(overlaps) / len(overlaps))
    assert comparison.num_equal_lists == sum(items_before == items_after for items_before, items_after in list_pairs)
    count_before, count_after = (
        Counter(item_id for item_ids in item_lists for item_id in item_ids) for item_lists in item_lists_by_version
    )
    for mover in comparison.movers:
        assert mover.num_users_before == count_before[mover.item_id]
        assert mover.num_users_after == count_after[mover.item_id]
        assert mover.title == retriever_before.items.titles(retriever_before.item_ids.rows([mover.item_id]))[0]
    differences = [abs(mover.num_users_after - mover.num_users_before) for mover in comparison.movers]
    assert differences == sorted(differences, reverse=True)
    assert differences[0] == max(abs(count_after[item_id] - count_before[item_id]) for item_id in {*count_before, *count_after})


def test_the_sample_of_users_has_the_requested_size(retrievers: tuple[Retriever, Retriever]) -> None:
    assert compare_recommendations(*retrievers, num_users=7, k=K).num_users == 7


def test_versions_without_a_common_user_are_rejected(
    build_packaged_model: ModelBuilder, retrievers: tuple[Retriever, Retriever]
) -> None:
    retriever_without_users = Retriever.load(build_packaged_model(users="none").package.folder)
    with pytest.raises(InputError, match="have no user in common"):
        compare_recommendations(retrievers[0], retriever_without_users, num_users=7, k=K)


class ScriptedRetriever:
    """A version with scripted recommendations to each user. The title of an item contains the number of the version."""

    def __init__(self, version: str, items_by_user: Mapping[int, Sequence[int]], *, untitled_items: Sequence[int] = ()) -> None:
        self.version, self._items_by_user = version, {user: np.array(items) for user, items in items_by_user.items()}
        self.user_ids = MagicMock(ids=lambda rows: np.array([*items_by_user])[rows], __len__=lambda _: len(items_by_user))
        self.item_ids = Mock(rows=np.array)
        self.items = Mock(
            titles=lambda rows: [None if row in untitled_items else f"title {row} of version {version}" for row in rows]
        )

    def is_known(self, users: Sequence[int]) -> np.ndarray:
        return np.isin(users, [*self._items_by_user])

    def recommend(self, users: Sequence[int], k: int) -> Mock:
        return Mock(item_ids=[self._items_by_user[user][:k] for user in users])


def test_lists_of_different_lengths_and_the_ten_largest_changes_are_counted() -> None:
    # Both versions have the users 1 to 4. Keys are users, and values are recommended items.
    retriever_before: Any = ScriptedRetriever("1", {1: [1, 2], 2: [], 3: [1, 2, 3, 4], 4: [], 9: [1]})
    items_after = {1: [2], 2: [], 3: [1, 2, 3, 4], 4: [*range(20, 32)], 8: [1]}
    retriever_after: Any = ScriptedRetriever("2", items_after, untitled_items=[1])
    comparison = compare_recommendations(retriever_before, retriever_after, num_users=1_000, k=20)
    assert (comparison.num_users, comparison.num_equal_lists) == (4, 2)
    assert comparison.mean_overlap == (1 / 2 + 1 + 1 + 0) / 4
    assert len(comparison.movers) == 10
    assert [(mover.item_id, mover.title) for mover in comparison.movers[:2]] == [
        (1, "title 1 of version 1"),
        (20, "title 20 of version 2"),
    ]
    assert (comparison.movers[0].num_users_before, comparison.movers[0].num_users_after) == (2, 1)
