"""The shuffle: a permutation of indices, which depends on a key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.dataset.shuffle import shuffled

key_tuples = st.tuples(st.integers(0, 2**63), st.integers(0, 10_000))


@given(num_indices=st.integers(0, 70) | st.integers(0, 5000), key=key_tuples)
def test_the_shuffle_is_a_permutation_of_any_length(num_indices: int, key: tuple[int, int]) -> None:
    assert np.array_equal(np.sort(shuffled(np.arange(num_indices), n=num_indices, key=key)), np.arange(num_indices))


@given(num_indices=st.integers(1, 5000), key=key_tuples, data=st.data())
def test_an_index_moves_to_the_same_position_whichever_other_indices_are_shuffled(
    num_indices: int, key: tuple[int, int], data: st.DataObject
) -> None:
    some_indices = np.array(data.draw(st.lists(st.integers(0, num_indices - 1), min_size=1)))
    assert np.array_equal(
        shuffled(some_indices, n=num_indices, key=key), shuffled(np.arange(num_indices), n=num_indices, key=key)[some_indices]
    )


@given(num_indices=st.integers(100, 5000), keys=st.lists(key_tuples, min_size=2, max_size=2, unique=True))
def test_the_shuffle_depends_on_the_key_and_moves_almost_all_indices(num_indices: int, keys: list[tuple[int, int]]) -> None:
    shuffled_indices, differently_shuffled_indices = (shuffled(np.arange(num_indices), n=num_indices, key=key) for key in keys)
    # Two random permutations agree at one position on average.
    assert (shuffled_indices == differently_shuffled_indices).sum() < 20
    assert (shuffled_indices == np.arange(num_indices)).sum() < 20


@pytest.mark.parametrize("num_indices", [1, 7])
def test_the_argument_is_not_modified(num_indices: int) -> None:
    indices = np.arange(num_indices)
    assert shuffled(indices, n=num_indices, key=(1,)) is not indices
    assert np.array_equal(indices, np.arange(num_indices))


@pytest.mark.parametrize("num_indices", [6, 37, 64])
def test_every_index_is_shuffled_to_every_position_equally_often(num_indices: int) -> None:
    """The chi-squared statistic has mean f and standard deviation sqrt(2 f) for f degrees of freedom."""
    num_shuffles = 300
    count_by_index_and_position = np.zeros((num_indices, num_indices))
    for seed in range(num_shuffles):
        count_by_index_and_position[np.arange(num_indices), shuffled(np.arange(num_indices), n=num_indices, key=(seed, 1))] += 1
    expected_count = num_shuffles / num_indices
    chi_squared = ((count_by_index_and_position - expected_count) ** 2 / expected_count).sum()
    num_degrees_of_freedom = (num_indices - 1) ** 2
    assert chi_squared < num_degrees_of_freedom + 6 * np.sqrt(2 * num_degrees_of_freedom)
