"""The shuffle is a permutation that depends on the key."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_core.dataset.shuffle import shuffled

keys = st.tuples(st.integers(0, 2**63), st.integers(0, 10_000))


@settings(max_examples=150, deadline=None)
@given(n=st.integers(0, 70) | st.integers(0, 5000), key=keys)
def test_it_is_a_permutation_of_any_length(n: int, key: tuple[int, int]) -> None:
    assert np.array_equal(np.sort(shuffled(np.arange(n), n=n, key=key)), np.arange(n))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 5000), key=keys, data=st.data())
def test_a_part_is_shuffled_like_the_whole(n: int, key: tuple[int, int], data: st.DataObject) -> None:
    part = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1)))
    assert np.array_equal(shuffled(part, n=n, key=key), shuffled(np.arange(n), n=n, key=key)[part])


@settings(max_examples=50, deadline=None)
@given(n=st.integers(100, 5000), keys=st.lists(keys, min_size=2, max_size=2, unique=True))
def test_it_differs_by_key_and_is_not_the_order_itself(n: int, keys: list[tuple[int, int]]) -> None:
    first_order, second_order = (shuffled(np.arange(n), n=n, key=key) for key in keys)
    assert (first_order == second_order).sum() < 20  # 1 on average between two random permutations
    assert (first_order == np.arange(n)).sum() < 20


def test_the_argument_is_left_as_it_was() -> None:
    for n in (1, 7):
        positions = np.arange(n)
        assert shuffled(positions, n=n, key=(1,)) is not positions
        assert np.array_equal(positions, np.arange(n))


@pytest.mark.parametrize("n", [6, 37, 64])
def test_every_position_is_shuffled_to_every_other_equally_often(n: int) -> None:
    draws = 300 * n
    counts = np.zeros((n, n))
    for seed in range(draws // n):
        counts[np.arange(n), shuffled(np.arange(n), n=n, key=(seed, 1))] += 1
    expected = draws / n / n
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert chi_squared < freedom + 6 * np.sqrt(2 * freedom)
