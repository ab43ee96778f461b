"""Top lists that are merged from tiles, compared with a sort of the whole score matrix."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.evaluation.ranking.top_k import TopLists


def _top_columns(score_BC: np.ndarray, *, k: int) -> list[list[int]]:
    """Return, for each row, the k columns with the largest finite scores, from a stable sort."""
    columns = range(score_BC.shape[1])
    return [
        [column for column in sorted(columns, key=lambda column: -score_C[column])[:k] if score_C[column] > -np.inf]
        for score_C in score_BC
    ]


@given(
    seed=st.integers(0, 10_000),
    k=st.integers(1, 40),
    num_first_columns=st.integers(40, 90),
    columns_per_tile=st.integers(1, 50),
    max_score=st.integers(1, 60),
    num_tiles_in_first_block=st.integers(0, 8),
)
def test_top_lists_equal_a_stable_sort(
    seed: int, k: int, num_first_columns: int, columns_per_tile: int, max_score: int, num_tiles_in_first_block: int
) -> None:
    random = np.random.default_rng(seed)
    score_BC = random.integers(0, max_score, (7, 200)).astype(np.float32)  # few distinct scores give many ties
    score_BC[random.random(score_BC.shape) < 0.3] = -np.inf
    score_BC[0, :num_first_columns] = -np.inf  # the first columns give query 0 no bound for its top list
    score_BC[1] = -np.inf
    tiles = [
        (start, score_BC[:, start : start + columns_per_tile].copy())
        for start in range(num_first_columns, 200, columns_per_tile)
    ]
    top_lists = TopLists(len(score_BC), k=k)
    top_lists.add([(0, score_BC[:, :num_first_columns].copy()), *tiles[:num_tiles_in_first_block]])
    for tile in tiles[num_tiles_in_first_block:]:
        top_lists.add([tile])
    assert [[column for column in top if column >= 0] for top in top_lists.column_BK.tolist()] == _top_columns(score_BC, k=k)


@pytest.mark.parametrize("is_rising", [True, False], ids=["rising", "falling"])
def test_the_best_columns_are_found_if_the_scores_rise_or_fall(is_rising: bool) -> None:
    score_BC = np.sort(np.random.default_rng(0).normal(size=(3, 5_000)), axis=1)[:, :: 1 if is_rising else -1].copy()
    top_lists = TopLists(3, k=9)
    top_lists.add([(0, score_BC[:, :1_000]), (1_000, score_BC[:, 1_000:].copy())])
    expected_column_K = np.arange(5_000)[::-1][:9] if is_rising else np.arange(9)
    np.testing.assert_array_equal(top_lists.column_BK, np.tile(expected_column_K, (3, 1)))
