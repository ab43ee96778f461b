"""Top lists from tiles compared with a sort of the whole score matrix."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.evaluation.ranking.top_k import TopLists


def _sorted_columns(score_BC: np.ndarray, *, k: int) -> list[list[int]]:
    columns = range(score_BC.shape[1])
    return [
        [column for column in sorted(columns, key=lambda column: -score_C[column])[:k] if score_C[column] > -np.inf]
        for score_C in score_BC
    ]


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(1, 40),
    num_first=st.integers(40, 90),
    tile=st.integers(1, 50),
    high=st.integers(1, 60),
    num_tiles_of_first_block=st.integers(0, 8),
)
def test_top_lists_equal_a_stable_sort(
    seed: int, k: int, num_first: int, tile: int, high: int, num_tiles_of_first_block: int
) -> None:
    random = np.random.default_rng(seed)
    score_BC = random.integers(0, high, (7, 200)).astype(np.float32)  # few distinct scores give many ties
    score_BC[random.random(score_BC.shape) < 0.3] = -np.inf
    score_BC[0, :num_first] = -np.inf  # nothing bounds the first top list
    score_BC[1] = -np.inf
    tiles = [(start, score_BC[:, start : start + tile].copy()) for start in range(num_first, 200, tile)]
    lists = TopLists(len(score_BC), k=k)
    lists.add([(0, score_BC[:, :num_first].copy()), *tiles[:num_tiles_of_first_block]])
    for later in tiles[num_tiles_of_first_block:]:
        lists.add([later])
    assert [[column for column in top if column >= 0] for top in lists.column_BK.tolist()] == _sorted_columns(score_BC, k=k)


@pytest.mark.parametrize("is_rising", [True, False])
def test_the_order_of_the_columns_does_not_change_the_top_lists(is_rising: bool) -> None:
    score_BC = np.sort(np.random.default_rng(0).normal(size=(3, 5_000)), axis=1)[:, :: 1 if is_rising else -1].copy()
    lists = TopLists(3, k=9)
    lists.add([(0, score_BC[:, :1_000]), (1_000, score_BC[:, 1_000:].copy())])
    expected = np.arange(5_000)[::-1][:9] if is_rising else np.arange(9)
    np.testing.assert_array_equal(lists.column_BK, np.tile(expected, (3, 1)))
