"""Ragged lists of rows as CSR, without a loop per list.

Shapes: N lists, T rows in all of them together.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


def ragged_ranges(start_N: NDArray[Any], length_N: NDArray[Any]) -> NDArray[np.int64]:
    """start, start + 1, ... for each pair, concatenated.

    >>> ragged_ranges(np.array([10, 50]), np.array([3, 2])).tolist()
    [10, 11, 12, 50, 51]
    """
    end_N = np.cumsum(length_N)
    return np.repeat(start_N - end_N + length_N, length_N) + np.arange(end_N[-1] if len(end_N) else 0)


@dataclass(frozen=True)
class Lists:
    """List n is row_T[offset[n]:offset[n + 1]]; `offset` is int64 [N + 1], `row_T` int64 [T]."""

    offset: NDArray[np.int64]
    row_T: NDArray[np.int64]

    @classmethod
    def of_slices(cls, values: NDArray[Any], *, start_N: NDArray[np.int64], end_N: NDArray[np.int64]) -> Self:
        """List n is a copy of values[start_N[n]:end_N[n]].

        >>> Lists.of_slices(np.array([5, 6, 7, 8]), start_N=np.array([2, 0]), end_N=np.array([4, 1])).row_T.tolist()
        [7, 8, 5]
        """
        length_N = end_N - start_N
        return cls.of_lengths(length_N, values[ragged_ranges(start_N, length_N)])

    @classmethod
    def of_lengths(cls, length_N: NDArray[Any], row_T: NDArray[Any]) -> Self:
        """From all lists one after the other, and how long each is."""
        return cls(np.concatenate([[0], np.cumsum(length_N)]).astype(np.int64), row_T.astype(np.int64, copy=False))

    @classmethod
    def of_owners(cls, owner_T: NDArray[np.int64], row_T: NDArray[np.int64], *, count: int) -> Self:
        """From pairs (list, row) sorted by list."""
        offset = np.concatenate([[0], np.cumsum(np.bincount(owner_T, minlength=count))]).astype(np.int64)
        return cls(offset, row_T.astype(np.int64))

    @classmethod
    def empty(cls, count: int) -> Self:
        """`count` lists with nothing in them."""
        return cls(np.zeros(count + 1, np.int64), np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.offset) - 1

    @property
    def length_N(self) -> NDArray[np.int64]:
        """Rows per list."""
        return np.diff(self.offset)

    @property
    def owner_T(self) -> NDArray[np.int64]:
        """The list each row belongs to."""
        return np.repeat(np.arange(len(self)), self.length_N)

    def last(self, count: int) -> "Lists":
        """The last `count` rows of each list, in their order; all of them where there are fewer.

        >>> Lists(np.array([0, 3, 4]), np.array([4, 1, 2, 7])).last(2).row_T.tolist()
        [1, 2, 7]
        """
        end_N = self.offset[1:]
        return Lists.of_slices(self.row_T, start_N=np.maximum(self.offset[:-1], end_N - count), end_N=end_N)

    def part(self, start: int, end: int) -> "Lists":
        """Lists start..end, as a view."""
        rows = self.row_T[self.offset[start] : self.offset[end]]
        return Lists(self.offset[start : end + 1] - self.offset[start], rows)

    def take(self, list_M: NDArray[Any]) -> "Lists":
        """The chosen lists, in that order."""
        return Lists.of_slices(self.row_T, start_N=self.offset[list_M], end_N=self.offset[list_M + 1])

    def keep(self, mask_T: NDArray[np.bool_]) -> "Lists":
        """The same lists with only the marked rows."""
        return Lists.of_owners(self.owner_T[mask_T], self.row_T[mask_T], count=len(self))

    def keys_T(self, *, rows: int) -> NDArray[np.int64]:
        """One number per (list, row), where every row is below `rows`."""
        return self.owner_T * rows + self.row_T

    def distinct(self, *, rows: int) -> "Lists":
        """Each list's rows once, ascending.

        >>> Lists(np.array([0, 3, 4]), np.array([4, 1, 4, 1])).distinct(rows=5)
        Lists(offset=array([0, 2, 3]), row_T=array([1, 4, 1]))
        """
        key = np.unique(self.keys_T(rows=rows))
        return Lists.of_owners(key // rows, key % rows, count=len(self))

    def union(self, other: "Lists", *, rows: int) -> "Lists":
        """What either has, each row once, ascending."""
        key = np.union1d(self.keys_T(rows=rows), other.keys_T(rows=rows))
        return Lists.of_owners(key // rows, key % rows, count=len(self))

    def replaced(self, other: "Lists", *, where_N: NDArray[np.bool_]) -> "Lists":
        """The same lists, but those of `other` where marked."""
        start_N = np.where(where_N, len(self.row_T) + other.offset[:-1], self.offset[:-1])
        return Lists.of_slices(
            np.concatenate([self.row_T, other.row_T]),
            start_N=start_N,
            end_N=start_N + np.where(where_N, other.length_N, self.length_N),
        )

    def without(self, other: "Lists", *, rows: int) -> "Lists":
        """Each list without the rows that the same list of `other` has."""
        return self.keep(~np.isin(self.keys_T(rows=rows), other.keys_T(rows=rows)))


def single(row_N: NDArray[np.int64]) -> Lists:
    """N lists of one row each."""
    return Lists(np.arange(len(row_N) + 1), row_N)
