"""Metrics of the recommended items, compared with plain loops and with invariants."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation import diversity
from recsys_core.evaluation.diversity import Coverage, gini, known_negative_share, list_distances, novelty, popularity_lift

NUM_ITEMS, DIM = 30, 6


def random_lists(seed: int, *, num_lists: int = 9_000, k: int = 4) -> np.ndarray:
    """Return lists of distinct items, of which a tenth is missing (-1)."""
    random = np.random.default_rng(seed)
    top_BK = random.random((num_lists, NUM_ITEMS)).argsort(axis=1)[:, :k]
    return np.where(random.random(top_BK.shape) < 0.1, -1, top_BK)


def test_diversity_equals_the_mean_over_pairs_of_items_with_a_vector() -> None:
    random = np.random.default_rng(0)
    vectors_RD = random.normal(size=(NUM_ITEMS - 5, DIM)).astype(np.float32)
    vectors_RD[3] = 0  # a zero vector has no direction, so its item is left out
    vector_row_I = np.r_[np.arange(NUM_ITEMS - 5), np.full(5, -1)]
    top_BK = random_lists(1)
    mean_distances = []
    for items in top_BK:
        item_vectors = [vectors_RD[item] for item in items if item >= 0 and vector_row_I[item] >= 0 and vectors_RD[item].any()]
        unit_vectors = [vector / np.linalg.norm(vector) for vector in item_vectors]
        distances = [1 - vector @ other_vector for vector, other_vector in combinations(unit_vectors, 2)]
        if distances:
            mean_distances.append(np.mean(distances))
    chunks = list_distances(top_BK, vectors_RD=vectors_RD, vector_row_I=vector_row_I)
    total_distances, num_lists = zip(*chunks, strict=True)
    assert len(num_lists) > 1 and sum(num_lists) == len(mean_distances)
    assert sum(total_distances) == pytest.approx(np.sum(mean_distances), rel=1e-6)


def test_lists_are_divided_into_chunks_by_the_number_of_values_of_their_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    top_BK, vectors_RD = random_lists(1, num_lists=60), np.random.default_rng(0).normal(size=(NUM_ITEMS, DIM))
    arguments = {"vectors_RD": vectors_RD.astype(np.float32), "vector_row_I": np.arange(NUM_ITEMS)}
    ((total_distance, num_lists),) = list_distances(top_BK, **arguments)
    for max_values, num_chunks in ((7 * 4 * DIM, 9), (1, 60)):  # 7 lists per chunk, and 1 list per chunk
        monkeypatch.setattr(diversity, "MAX_CHUNK_VALUES", max_values)
        chunks = [*list_distances(top_BK, **arguments)]
        assert len(chunks) == num_chunks
        assert sum(distance for distance, _ in chunks) == pytest.approx(total_distance)
        assert sum(num_chunk_lists for _, num_chunk_lists in chunks) == num_lists


def test_the_coverage_of_chunks_equals_the_share_of_distinct_items_of_all_lists() -> None:
    top_BK = random_lists(5, num_lists=6)
    coverage = Coverage((4, 1), num_items=NUM_ITEMS)
    for chunk in (top_BK[:2], top_BK[2:3], top_BK[3:]):
        coverage.add(chunk)
    assert coverage.shares() == {k: len({*top_BK[:, :k].flat} - {-1}) / NUM_ITEMS for k in (1, 4)}


def test_gini_equals_the_mean_absolute_difference_of_the_counts() -> None:
    top_BK = random_lists(2)
    count_I = np.bincount(top_BK[top_BK >= 0], minlength=NUM_ITEMS)
    expected_gini = np.abs(count_I[:, None] - count_I).sum() / (2 * NUM_ITEMS * count_I.sum())
    assert gini(count_I) == pytest.approx(expected_gini, abs=1e-12)


@given(seed=st.integers(0, 1_000))
def test_rarer_items_are_more_novel_and_have_a_lower_popularity_lift(seed: int) -> None:
    random = np.random.default_rng(seed)
    train_count_I = np.sort(random.integers(0, 1_000, NUM_ITEMS))[::-1].copy()
    train_count_I[0] += 1  # at least one event
    popular_BK, rare_BK = np.array([[0, 1, 2]]), np.array([[NUM_ITEMS - 1, NUM_ITEMS - 2, NUM_ITEMS - 3]])
    history_item_L = random.integers(0, 3, 10)
    assert novelty(rare_BK, train_count_I=train_count_I) >= novelty(popular_BK, train_count_I=train_count_I)
    popular_lift, rare_lift = (
        popularity_lift(top_BK, history_item_L=history_item_L, train_count_I=train_count_I) for top_BK in (popular_BK, rare_BK)
    )
    assert popular_lift >= rare_lift >= -1


def test_a_missing_item_at_the_end_of_a_list_does_not_change_the_lift() -> None:
    arguments = {"history_item_L": np.array([1, 2]), "train_count_I": np.array([4, 2, 1])}
    assert popularity_lift(np.array([[0, 1, -1]]), **arguments) == popularity_lift(np.array([[0, 1]]), **arguments) == 1


def test_a_lift_without_a_history_is_nan_and_a_list_without_a_pair_has_no_distance() -> None:
    assert np.isnan(popularity_lift(np.array([[0]]), history_item_L=np.array([], int), train_count_I=np.ones(1)))
    chunks = list_distances(np.array([[0, 1]]), vectors_RD=np.ones((1, 2), np.float32), vector_row_I=np.array([0, -1]))
    assert [*chunks] == [(0.0, 0)]


def test_the_share_of_known_negatives_equals_a_count_in_each_list() -> None:
    random = np.random.default_rng(3)
    top_BK = random_lists(4, k=6)
    negatives_of_users = [random.choice(NUM_ITEMS, random.integers(0, 5), replace=False) for _ in top_BK]
    known_negatives = JaggedArray.from_lengths(
        np.array([len(items) for items in negatives_of_users]), np.concatenate(negatives_of_users)
    )
    for k in (1, 4, 6):
        share_B = known_negative_share(top_BK, known_negatives=known_negatives, k=k, num_items=NUM_ITEMS)
        for share, items, negatives in zip(share_B, top_BK, negatives_of_users, strict=True):
            if len(negatives):
                assert share == len(set(items[:k]) & set(negatives)) / k
            else:
                assert np.isnan(share)
