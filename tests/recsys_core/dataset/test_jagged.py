"""Operations of JaggedArray compared with the same operations on Python lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.dataset.jagged import JaggedArray

NUM_ROWS = 6
"""The values are rows of a table with this number of rows."""

row_lists = st.lists(st.integers(0, NUM_ROWS - 1), max_size=5)
list_pairs = st.lists(st.tuples(row_lists, row_lists), min_size=1, max_size=5)


def jagged_of(lists: list[list[int]]) -> JaggedArray:
    """Return the lists as one jagged array."""
    offset = np.concatenate([[0], np.cumsum([len(rows) for rows in lists])]).astype(np.int64)
    return JaggedArray(offset, np.array([row for rows in lists for row in rows], np.int64))


def lists_of(jagged: JaggedArray) -> list[list[int]]:
    """Return the lists of a jagged array."""
    return [rows.tolist() for rows in np.split(jagged.values_L, jagged.offset[1:-1])]


@given(list_pairs, st.integers(0, 3))
def test_jagged_arrays_behave_like_python_lists(pairs: list[tuple[list[int], list[int]]], num_last: int) -> None:
    left_lists = [left_rows for left_rows, _ in pairs]
    left_jagged, right_jagged = jagged_of(left_lists), jagged_of([right_rows for _, right_rows in pairs])
    assert lists_of(left_jagged) == left_lists
    assert lists_of(left_jagged.last_values(num_last)) == [rows[max(0, len(rows) - num_last) :] for rows in left_lists]
    assert lists_of(left_jagged.distinct(bound=NUM_ROWS)) == [sorted(set(rows)) for rows in left_lists]
    assert lists_of(left_jagged.union(right_jagged, bound=NUM_ROWS)) == [
        sorted({*left_rows, *right_rows}) for left_rows, right_rows in pairs
    ]
    assert lists_of(left_jagged.difference(right_jagged, bound=NUM_ROWS)) == [
        [row for row in left_rows if row not in right_rows] for left_rows, right_rows in pairs
    ]
    assert lists_of(left_jagged.take(np.arange(len(left_lists))[::-1])) == left_lists[::-1]
    if len(left_lists) > 1:
        assert lists_of(left_jagged.slice(1, len(left_lists))) == left_lists[1:]
    is_replaced = np.arange(len(left_lists)) % 2 == 1
    assert lists_of(left_jagged.replace(right_jagged, where=is_replaced)) == [
        right_rows if list_index % 2 else left_rows for list_index, (left_rows, right_rows) in enumerate(pairs)
    ]
