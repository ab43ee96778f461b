"""The interaction log in CSR form by user, memory-mapped. The history of an event is a slice of earlier events of its user.

Shapes: U users, I items, E events, B queries, S shards, H entries of all histories, L items of the users of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.jagged import Int64Array, JaggedArray, chunk_slices, ragged_ranges
from recsys_core.dataset.known_negatives import KnownNegatives
from recsys_core.dataset.layout import EventArrays, ShardArrays, allocate_npy, row_dtype
from recsys_core.dataset.shards import UserArray, event_array, user_array
from recsys_core.errors import InputError
from recsys_core.manifests import InteractionsManifest
from recsys_core.units import INT64_MAX

EvaluationSplit = Literal["validation", "test"]
EVENTS_PER_CHUNK = 2**18


@dataclass
class UserChunk:
    """All events of some users of one shard, sorted by user, split and time. The users of a chunk are numbered from 0."""

    user_row_U: Int64Array
    """Row of each user, ascending."""
    events: slice
    """Slice of the log that contains these events."""
    num_events_U3: Int64Array
    """Number of training, validation and test events of each user."""
    item_E: Int64Array
    time_E: Int64Array | None
    """Microseconds; None if the log has no timestamps."""

    @cached_property
    def segment_E(self) -> Int64Array:
        """Number 3 * user + split of each event, equal for events of the same user and split."""
        return np.repeat(np.arange(self.num_events_U3.size), self.num_events_U3.ravel())

    @cached_property
    def user_E(self) -> Int64Array:
        """User of each event."""
        return self.segment_E // 3

    @cached_property
    def split_E(self) -> Int64Array:
        """Split of each event: 0 training, 1 validation, 2 test."""
        return self.segment_E % 3


class EventStore:
    """The events, users and items of an interactions stage; all processes of a host share its memory-mapped pages.

    An event is identified by its index in the log. The events of a user are stored one after the other: first the training
    events, then the validation events, then the test events. A training event is also a training example, which is identified
    by its index among the training events of all users, in the order of the users' rows.

    The users are divided into shards (see InteractionsManifest). The log is the concatenation of the shards, so the index of an
    event depends on the number of shards. No other result depends on that number.

    Attributes:
        is_ordered: whether the events of a user have an order, from timestamps or an order column.
        known_negatives: None if the ingest did not keep the known negatives.
    """

    def __init__(self, arrays: EventArrays, *, is_ordered: bool) -> None:
        self.is_ordered = is_ordered
        self._user_offset_by_shard = ShardArrays.of(arrays.user_offset)
        self._train_end_by_shard = ShardArrays.of(arrays.train_end)
        self._num_shards, self._event_start_S = arrays.num_shards, ShardArrays.of(arrays.event_item).start_S
        as_user_array = partial(user_array, num_users=arrays.num_users, index_start_S=self._event_start_S)
        self._user_start, self._user_end = as_user_array(arrays.user_offset), as_user_array(arrays.user_offset, first_entry=1)
        self._train_end, self._validation_end = as_user_array(arrays.train_end), as_user_array(arrays.validation_end)
        self._stored_event_offset = None if arrays.event_offset is None else as_user_array(arrays.event_offset)
        self._event_item = event_array(arrays.event_item)
        self._event_time = None if arrays.event_time is None else event_array(arrays.event_time)
        self._event_weight = None if arrays.event_weight is None else event_array(arrays.event_weight)
        self._train_user, self._train_count_I, self._popularity_rank_I = arrays.train_user, arrays.item_count, arrays.item_rank
        self.known_negatives = KnownNegatives.of(arrays)
        self._vector_row_by_side = {"item": arrays.vector_row, "user": arrays.user_vector_row}

    @classmethod
    def open(cls, manifest: InteractionsManifest) -> Self:
        """Map the arrays of an interactions stage."""
        return cls(EventArrays.open(manifest), is_ordered=manifest.is_ordered)

    @property
    def num_users(self) -> int:
        """Number of rows of the user vocabulary."""
        return len(self._train_end)

    @property
    def num_items(self) -> int:
        """Number of rows of the item vocabulary."""
        return len(self._train_count_I)

    @property
    def num_train_events(self) -> int:
        """Number of training events, which are the training examples."""
        return len(self._train_user)

    @property
    def has_times(self) -> bool:
        """Whether the log has timestamps."""
        return self._event_time is not None

    @property
    def train_count_I(self) -> Int64Array:
        """[I]: number of training events of each item."""
        return self._train_count_I

    @property
    def popularity_rank_I(self) -> Int64Array:
        """[I]: popularity rank of each item by its number of training events; 0 is the most popular item."""
        assert self._popularity_rank_I is not None  # every ingest writes the ranks
        return self._popularity_rank_I

    @property
    def train_count_U(self) -> Int64Array:
        """[U]: number of training events of each user."""
        return self._train_end[:] - self._user_start[:]

    @property
    def event_count_U(self) -> Int64Array:
        """[U]: number of events of each user, in all splits."""
        return self._user_end[:] - self._user_start[:]

    def event_count_I(self) -> Int64Array:
        """Return the number of events of each item in all splits, [I]."""
        count_I = np.zeros(self.num_items, np.int64)
        for chunk in chunk_slices(len(self._event_item), length=self._bincount_chunk_events):
            count_I += np.bincount(self._event_item[chunk], minlength=self.num_items)
        return count_I

    def item_counts_before(self, split: EvaluationSplit) -> Int64Array:
        """Return the number of events of each item before `split`, [I]."""
        count_I = np.zeros(self.num_items, np.int64)
        for users in self.user_slices(max_events=self._bincount_chunk_events):
            item_lists = self.items_before(np.arange(users.start, users.stop, users.step), split)
            count_I += np.bincount(item_lists.values_L, minlength=self.num_items)
        return count_I

    def vector_rows(self, side: str) -> Int64Array | None:
        """Return the vector row of each user or item, -1 without a pretrained vector; None if no row of `side` has a vector."""
        return self._vector_row_by_side[side]

    def mean_weight(self, *, user_exponent: float = 0.0) -> np.float32:
        """Return the mean of `example_weights` over the training events; 1 without weights.

        Raise InputError if all weights are 0.

        >>> offset, empty = np.array([0, 3, 4]), np.zeros(0, np.int32)
        >>> arrays = EventArrays(
        ...     offset, np.array([2, 4]), offset[1:], empty, np.array([0, 0, 1]), empty, empty,
        ...     event_weight=np.array([1, 2, 90, 3], np.float32),
        ... )
        >>> float(EventStore(arrays, is_ordered=True).mean_weight())  # the third event is not a training event
        2.0
        """
        if self._event_weight is None and (user_exponent == 0 or self.num_train_events == 0):
            return np.float32(1)
        total_weight = 0.0
        for user_E, event_E in self.train_chunks():
            weight_E = self.example_weights(event_E, user_E.astype(np.int64), user_exponent=user_exponent)
            assert weight_E is not None
            total_weight += float(weight_E.sum(dtype=np.float64))
        if total_weight == 0:
            raise InputError(
                f"interactions.weight_column: all {self.num_train_events:,} training events have the weight 0 and do not "
                "contribute to the loss; give at least one event a weight above 0, or remove weight_column"
            )
        return np.float32(total_weight / self.num_train_events)

    def training_events(self, example_E: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the user and the index in the log of each training example."""
        user_E = self._train_user[example_E].astype(np.int64)
        return user_E, example_E + self._event_offset[user_E]

    def train_chunks(self) -> Iterator[tuple[NDArray[Any], Int64Array]]:
        """Yield the users and the indices in the log of all training events, EVENTS_PER_CHUNK events at a time."""
        for chunk in chunk_slices(self.num_train_events, length=EVENTS_PER_CHUNK):
            user_E = self._train_user[chunk]
            yield user_E, np.arange(chunk.start, chunk.stop) + self._event_offset[user_E]

    def user_chunks(self, *, max_events: int) -> Iterator[UserChunk]:
        """Yield all events in chunks of users. A chunk with more than `max_events` events has a single user."""
        return map(self.user_chunk, self.user_slices(max_events=max_events))

    def user_chunk(self, users: slice) -> UserChunk:
        """Return all events of a slice from `user_slices`."""
        end_U3 = np.stack([self._train_end[users], self._validation_end[users], self._user_end[users]], axis=1)
        start_U3 = np.column_stack([self._user_start[users], end_U3[:, :2]])
        events = slice(int(start_U3[0, 0]), int(end_U3[-1, 2]))
        return UserChunk(
            user_row_U=np.arange(users.start, users.stop, users.step),
            events=events,
            num_events_U3=end_U3 - start_U3,
            item_E=self._event_item[events].astype(np.int64),
            time_E=None if self._event_time is None else self._event_time[events],
        )

    def user_slices(self, *, max_events: int) -> Iterator[slice]:
        """Yield slices of the users of one shard. A slice with more than `max_events` events has a single user.

        The users of a shard are every S-th user. Slices without an event are left out.
        """
        for shard, user_offset in enumerate(self._user_offset_by_shard):
            first_row, num_rows = 0, len(user_offset) - 1
            while first_row < num_rows:
                max_end = user_offset[first_row] + max_events
                stop_row = int(np.searchsorted(user_offset, max_end, side="right")) - 1
                stop_row = min(max(stop_row, first_row + 1), num_rows)
                if user_offset[stop_row] > user_offset[first_row]:
                    first_user, last_user = (row * self._num_shards + shard for row in (first_row, stop_row - 1))
                    yield slice(first_user, last_user + 1, self._num_shards)
                first_row = stop_row

    def items_at(self, event_E: Int64Array) -> Int64Array:
        """Return the item row of each event."""
        return self._event_item[event_E].astype(np.int64)

    def times_at(self, event_E: Int64Array) -> Int64Array:
        """Return the time of each event in microseconds; 0 if the log has no timestamps."""
        return np.zeros_like(event_E) if self._event_time is None else self._event_time[event_E]

    def weights_at(self, event_E: Int64Array) -> NDArray[np.float32] | None:
        """Return the weight of each event as in the log; None if the log has no weights."""
        return None if self._event_weight is None else self._event_weight[event_E]

    def example_weights(
        self, event_E: Int64Array, user_E: Int64Array, *, user_exponent: float = 0.0
    ) -> NDArray[np.float32] | None:
        """Return the weight of each training event times (number of training events of its user)^user_exponent.

        Return None if the log has no weights and `user_exponent` is 0.
        """
        weight_E = self.weights_at(event_E)
        if user_exponent == 0:
            return weight_E
        factor_E = (self._train_end[user_E] - self._user_start[user_E]).astype(np.float32) ** np.float32(user_exponent)
        return factor_E if weight_E is None else factor_E * weight_E

    def is_training(self, events: slice) -> NDArray[np.bool_]:
        """Return whether each event in the slice `events` of the log is a training event."""
        is_training_by_shard = [np.zeros(0, np.bool_)]
        for shard, (user_offset, shard_start) in enumerate(
            zip(self._user_offset_by_shard, self._event_start_S.tolist(), strict=True)
        ):
            start, stop = np.clip([events.start - shard_start, events.stop - shard_start], 0, user_offset[-1])
            if start == stop:
                continue
            first_user = int(np.searchsorted(user_offset, start, side="right")) - 1
            users = slice(first_user, int(np.searchsorted(user_offset, stop, side="left")))
            # Blocks of training events alternate with blocks of validation and test events.
            block_starts = np.stack([user_offset[users], self._train_end_by_shard[shard][users]], axis=1).reshape(-1)
            block_lengths = np.diff(np.clip(np.append(block_starts, stop), start, stop))
            is_training_by_shard.append(np.repeat(np.arange(len(block_lengths)) % 2 == 0, block_lengths))
        return np.concatenate(is_training_by_shard)

    def histories(
        self, event_B: Int64Array, user_B: Int64Array, *, max_history: int, include_target: bool = False
    ) -> JaggedArray:
        """Return the history of each training event: at most max_history items of the same user.

        In an ordered log, these are the items of the user's last events before the event, oldest first.

        An unordered log stores the events of a user in random order. The history of an event then consists of the items of
        the events stored after it. After the user's last training event, the history continues with the user's first event.
        With `include_target`, the history starts with the item of the event itself.

        Args:
            event_B: index of each event in the log.
            user_B: row of each event's user.
            include_target: used only for an unordered log.
        """
        start_B, end_B = self._user_start[user_B], self._train_end[user_B]
        if self.is_ordered:
            length_B = np.minimum(event_B - start_B, max_history)
            return JaggedArray.from_slices(self._event_item, start=event_B - length_B, end=event_B)
        first_shift = 0 if include_target else 1
        length_B = np.minimum(end_B - start_B - first_shift, max_history)
        shift_H = ragged_ranges(np.full_like(length_B, first_shift), length_B)
        num_events_H, start_H = np.repeat(end_B - start_B, length_B), np.repeat(start_B, length_B)
        event_H = start_H + (np.repeat(event_B - start_B, length_B) + shift_H) % num_events_H
        return JaggedArray.from_lengths(length_B, self._event_item[event_H])

    def users_with_targets(self, split: EvaluationSplit) -> Int64Array:
        """Return the rows of the users that have events in `split`."""
        start, end = self._split_bounds(split)
        return np.flatnonzero(end[:] > start[:])

    def targets(self, user_B: Int64Array, split: EvaluationSplit) -> JaggedArray:
        """Return the items of each user's events in `split`."""
        start, end = self._split_bounds(split)
        return JaggedArray.from_slices(self._event_item, start=start[user_B], end=end[user_B])

    def first_event_index(self, user_B: Int64Array, split: EvaluationSplit) -> Int64Array:
        """Return the index in the log of each user's first event in `split`.

        For a user without an event in `split`, return the index at which such an event would be inserted.
        """
        return self._split_bounds(split)[0][user_B]

    def items_before(self, user_B: Int64Array, split: EvaluationSplit, *, max_items: int | None = None) -> JaggedArray:
        """Return the items of each user's events before `split`, oldest first; at most the newest `max_items` items."""
        end_B = self._split_bounds(split)[0][user_B]
        start_B = self._user_start[user_B]
        return JaggedArray.from_slices(
            self._event_item, start=start_B if max_items is None else np.maximum(start_B, end_B - max_items), end=end_B
        )

    def all_histories(self, scratch_path: Path) -> tuple[Int64Array, NDArray[Any]]:
        """Return the items of all events in CSR form by user: offset [U + 1], and item rows [E].

        Both arrays can be memory maps. With several shards, the item rows are copied to the new file `scratch_path`.
        """
        if self._num_shards == 1:
            return self._user_offset_by_shard[0], self._event_item[:]
        offset = np.concatenate([[0], np.cumsum(self.event_count_U)])
        item_E = allocate_npy(scratch_path, dtype=row_dtype(self.num_items), shape=(int(offset[-1]),))
        users_per_chunk = max(1, EVENTS_PER_CHUNK * self.num_users // max(1, len(item_E)))
        for users in chunk_slices(self.num_users, length=users_per_chunk):
            user_B = np.arange(users.start, users.stop)
            item_lists = JaggedArray.from_slices(self._event_item, start=self._user_start[user_B], end=self._user_end[user_B])
            item_E[offset[users.start] : offset[users.stop]] = item_lists.values_L
        return offset, item_E

    def held_out_events(self, *, skip_validation_U: NDArray[np.bool_]) -> tuple[Int64Array, Int64Array]:
        """Return the user and the index in the log of each validation and test event.

        skip_validation_U: True for a user whose validation events are left out.
        """
        start_U, end_U = np.where(skip_validation_U, self._validation_end[:], self._train_end[:]), self._user_end[:]
        num_events_U = end_U - start_U
        return np.repeat(np.arange(self.num_users), num_events_U), ragged_ranges(start_U, num_events_U)

    def first_time(self, split: EvaluationSplit) -> int:
        """Return the time of the oldest event of `split` in microseconds; INT64_MAX if the split has no event."""
        # The events of each user are sorted by time within each split.
        start_U, end_U = (bound[:] for bound in self._split_bounds(split))
        return int(self.times_at(start_U[end_U > start_U]).min(initial=INT64_MAX))

    def newest_times(self) -> Int64Array:
        """Return the time of each user's newest event in microseconds, for users with events. Needs an order by time."""
        return self.times_at(self._user_end[:][self.event_count_U > 0] - 1)

    def newest_training_time(self) -> int:
        """Return the time of the newest training event in microseconds."""
        return int(self.times_at(self._train_end[:][self.train_count_U > 0] - 1).max())

    @cached_property
    def _event_offset(self) -> UserArray:
        """For each user, the index of a training event in the log minus its index among the training events.

        With one shard, the array is computed. With several shards, the array is stored, because computing it would take too
        much memory on each rank.
        """
        if self._stored_event_offset is not None:
            return self._stored_event_offset
        num_examples_U = self.train_count_U
        event_offset_U: Int64Array = self._user_start[:] - (np.cumsum(num_examples_U) - num_examples_U)
        return event_offset_U

    @property
    def _bincount_chunk_events(self) -> int:
        """Number of events in a chunk for np.bincount: at least I, because each call takes time proportional to I."""
        return max(self.num_items, EVENTS_PER_CHUNK)

    def _split_bounds(self, split: EvaluationSplit) -> tuple[UserArray, UserArray]:
        """Return the start and the end of each user's events of `split` in the log."""
        return (self._validation_end, self._user_end) if split == "test" else (self._train_end, self._validation_end)
