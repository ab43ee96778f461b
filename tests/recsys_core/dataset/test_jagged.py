import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.dataset.jagged import JaggedArray

NUM_ROWS = 6
ragged = st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=5), min_size=1, max_size=5)
pairs = ragged.flatmap(lambda first: st.tuples(st.just(first), st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=4), min_size=len(first), max_size=len(first))))  # fmt: skip  # noqa: E501


def _lists(python: list[list[int]]) -> JaggedArray:
    offset = np.concatenate([[0], np.cumsum([len(rows) for rows in python])]).astype(np.int64)
    return JaggedArray(offset, np.array([row for rows in python for row in rows], np.int64))


def _python(lists: JaggedArray) -> list[list[int]]:
    return [part.tolist() for part in np.split(lists.values_L, lists.offset[1:-1])]


@given(pairs, st.integers(0, 3))
def test_jagged_arrays_behave_like_python_lists(both: tuple[list[list[int]], list[list[int]]], count: int) -> None:
    left, right = both
    left_lists, right_lists = _lists(left), _lists(right)
    row_pairs = list(zip(left, right, strict=True))
    assert _python(left_lists) == left
    assert _python(left_lists.last_values(count)) == [rows[len(rows) - min(count, len(rows)) :] for rows in left]
    assert _python(left_lists.distinct(bound=NUM_ROWS)) == [sorted(set(rows)) for rows in left]
    assert _python(left_lists.union(right_lists, bound=NUM_ROWS)) == [
        sorted({*left_rows, *right_rows}) for left_rows, right_rows in row_pairs
    ]
    assert _python(left_lists.difference(right_lists, bound=NUM_ROWS)) == [
        [row for row in left_rows if row not in right_rows] for left_rows, right_rows in row_pairs
    ]
    assert _python(left_lists.take(np.arange(len(left))[::-1])) == left[::-1]
    assert _python(left_lists.slice(1, len(left))) == left[1:] or len(left) == 1
    swap = np.arange(len(left)) % 2 == 1
    assert _python(left_lists.replace(right_lists, where=swap)) == [
        right_rows if list_index % 2 else left_rows for list_index, (left_rows, right_rows) in enumerate(row_pairs)
    ]
