"""Arrays of an event store in several shards, read by the row of a user or the index of an event.

User u is in shard u % S, where it has row u // S. The index of an event is its index in the concatenation of the shards. Each
class has the methods of a NumPy array that the dataset needs, and reads only the shards that an index selects.

Shapes: S shards, U users, E events, B selected users or events.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.jagged import Int64Array
from recsys_core.dataset.layout import ShardArrays


class ShardedUserArray:
    """One index of an event or known negative per user, [U]. A shard stores indices inside the shard.

    Args:
        shard_arrays: array of each shard. Its entries are indices inside the shard.
        index_start_S: index of the first event, or known negative, of each shard.
        first_entry, step: the entry of the user with row r in a shard has the index first_entry + r * step in the shard's
            array.
    """

    def __init__(
        self, shard_arrays: ShardArrays, *, num_users: int, index_start_S: Int64Array, first_entry: int = 0, step: int = 1
    ) -> None:
        self._shard_arrays, self._num_users, self._index_start_S = shard_arrays, num_users, index_start_S
        self._first_entry, self._step = first_entry, step

    def __len__(self) -> int:
        return self._num_users

    def __getitem__(self, users: Int64Array | slice) -> Int64Array:
        """Return the entries of these users. A slice must select all users or, with step S, users of one shard."""
        num_shards = len(self._shard_arrays)
        if not isinstance(users, slice):
            row_B, values_B = users // num_shards, np.empty(len(users), np.int64)
            for shard, positions in positions_by_shard(users % num_shards, num_shards=num_shards):
                values_B[positions] = self._entries(shard, row_B[positions])
            return values_B
        selected_users = range(self._num_users)[users]
        if selected_users.step == num_shards:
            first_row = selected_users.start // num_shards
            return self._entries(selected_users.start % num_shards, slice(first_row, first_row + len(selected_users)))
        assert len(selected_users) == self._num_users, f"{users} is neither all users nor users of one shard of {num_shards}"
        values_U = np.empty(self._num_users, np.int64)
        for shard in range(num_shards):
            values_U[shard::num_shards] = self._entries(shard, slice(len(values_U[shard::num_shards])))
        return values_U

    def _entries(self, shard: int, rows: Int64Array | slice) -> Int64Array:
        entries: Int64Array = self._shard_arrays[shard][self._first_entry :: self._step][rows] + self._index_start_S[shard]
        return entries


class ShardedEventArray:
    """The concatenation of the arrays of all shards, [E]."""

    def __init__(self, shard_arrays: ShardArrays) -> None:
        self._shard_arrays, self._start_S, self._end_S = shard_arrays, shard_arrays.start_S, np.cumsum(shard_arrays.length_S)

    def __len__(self) -> int:
        return int(self._end_S[-1])

    def __getitem__(self, index: Int64Array | slice) -> NDArray[Any]:
        """Return the entries at these indices. A slice must have the step 1."""
        if isinstance(index, slice):
            return self._entries_in_range(*index.indices(len(self))[:2])
        shard_B = np.searchsorted(self._end_S, index, side="right")
        entries_by_shard = [
            (positions, self._shard_arrays[shard][index[positions] - self._start_S[shard]])
            for shard, positions in positions_by_shard(shard_B, num_shards=len(self._shard_arrays))
        ]
        values_B = np.empty(len(index), self._shard_arrays.dtype)
        for positions, shard_entries in entries_by_shard:
            values_B[positions] = shard_entries
        return values_B

    def _entries_in_range(self, start: int, stop: int) -> NDArray[Any]:
        entries_by_shard = [np.empty(0, self._shard_arrays.dtype)]  # for a range without an event
        for shard, (shard_start, shard_end) in enumerate(zip(self._start_S.tolist(), self._end_S.tolist(), strict=True)):
            if max(start, shard_start) < min(stop, shard_end):
                entries_by_shard.append(self._shard_arrays[shard][max(start - shard_start, 0) : stop - shard_start])
        return np.concatenate(entries_by_shard) if len(entries_by_shard) > 2 else entries_by_shard[-1]


class ShardedEventIndices:
    """Ascending event indices, stored by shard. The array of each shard has event indices inside the shard.

    Args:
        event_start_S: index of the first event of each shard.
    """

    def __init__(self, shard_arrays: ShardArrays, *, event_start_S: Int64Array) -> None:
        self._shard_arrays, self._start_S, self._event_start_S = shard_arrays, shard_arrays.start_S, event_start_S

    def searchsorted(self, event_B: Int64Array, /, side: Literal["left", "right"] = "left") -> Int64Array:
        """Return the index at which each event would be inserted, like ndarray.searchsorted, but only into its own shard.

        The index counts the entries of all shards.
        """
        shard_B, index_B = np.searchsorted(self._event_start_S, event_B, side="right") - 1, np.empty(len(event_B), np.int64)
        for shard, positions in positions_by_shard(shard_B, num_shards=len(self._shard_arrays)):
            event_in_shard = event_B[positions] - self._event_start_S[shard]
            index_B[positions] = self._shard_arrays[shard].searchsorted(event_in_shard, side=side) + self._start_S[shard]
        return index_B


UserArray = Int64Array | ShardedUserArray
EventArray = NDArray[Any] | ShardedEventArray
EventIndices = Int64Array | ShardedEventIndices


def user_array(
    array: NDArray[Any] | ShardArrays, *, num_users: int, index_start_S: Int64Array, first_entry: int = 0, step: int = 1
) -> UserArray:
    """Return one number per user; see ShardedUserArray. With one shard, the result is a view of the stored array."""
    if isinstance(array, ShardArrays):
        return ShardedUserArray(array, num_users=num_users, index_start_S=index_start_S, first_entry=first_entry, step=step)
    return array[first_entry::step][:num_users]


def event_array(array: NDArray[Any] | ShardArrays) -> EventArray:
    """Return the array of all events. With one shard, the result is the stored array."""
    return ShardedEventArray(array) if isinstance(array, ShardArrays) else array


def positions_by_shard(shard_B: Int64Array, *, num_shards: int) -> Iterator[tuple[int, Int64Array]]:
    """Yield each shard that occurs in `shard_B`, with the ascending positions at which it occurs."""
    positions_B = np.argsort(shard_B.astype(np.uint16), kind="stable")  # NumPy sorts 16-bit integers in linear time
    end_S = np.cumsum(np.bincount(shard_B, minlength=num_shards)).tolist()
    start = 0
    for shard, end in enumerate(end_S):
        if end > start:
            yield shard, positions_B[start:end]
        start = end
