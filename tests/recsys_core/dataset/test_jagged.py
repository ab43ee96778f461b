import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.dataset.jagged import JaggedArray

ROWS = 6
ragged = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=5), min_size=1, max_size=5)
pairs = ragged.flatmap(lambda first: st.tuples(st.just(first), st.lists(st.lists(st.integers(0, ROWS - 1), max_size=4), min_size=len(first), max_size=len(first))))  # fmt: skip  # noqa: E501


def _lists(python: list[list[int]]) -> JaggedArray:
    offset = np.concatenate([[0], np.cumsum([len(rows) for rows in python])]).astype(np.int64)
    return JaggedArray(offset, np.array([row for rows in python for row in rows], np.int64))


def _python(lists: JaggedArray) -> list[list[int]]:
    return [part.tolist() for part in np.split(lists.values_L, lists.offset[1:-1])]


@given(pairs, st.integers(0, 3))
def test_jagged_arrays_behave_like_python_lists(both: tuple[list[list[int]], list[list[int]]], count: int) -> None:
    left, right = both
    a, b = _lists(left), _lists(right)
    together = list(zip(left, right, strict=True))
    assert _python(a) == left
    assert _python(a.last_values(count)) == [rows[len(rows) - min(count, len(rows)) :] for rows in left]
    assert _python(a.distinct(bound=ROWS)) == [sorted(set(rows)) for rows in left]
    assert _python(a.union(b, bound=ROWS)) == [sorted({*x, *y}) for x, y in together]
    assert _python(a.difference(b, bound=ROWS)) == [[row for row in x if row not in y] for x, y in together]
    assert _python(a.take(np.arange(len(left))[::-1])) == left[::-1]
    assert _python(a.slice(1, len(left))) == left[1:] or len(left) == 1
    swap = np.arange(len(left)) % 2 == 1
    assert _python(a.replace(b, where=swap)) == [y if n % 2 else x for n, (x, y) in enumerate(together)]
