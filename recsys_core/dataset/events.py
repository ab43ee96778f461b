"""The interaction log in CSR form by user, memory-mapped. The history of an event is the slice of events before it."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.jagged import Int64Array, JaggedArray, ragged_ranges
from recsys_core.errors import InputError
from recsys_core.manifests import InteractionsManifest

EvaluationSplit = Literal["validation", "test"]
EVENTS_PER_CHUNK = 2**18


def memory_map(path: Path) -> NDArray[Any]:
    """Memory-map a .npy file, read-only, as a plain array, because indexing an np.memmap takes microseconds longer."""
    return np.asarray(np.load(path, mmap_mode="r"))


@dataclass(frozen=True)
class EventStore:
    """Memory maps of the arrays that InteractionsManifest describes; all processes of a host share their pages.

    The events of user u are event_item[user_offset[u]:user_offset[u + 1]]: the training events up to train_end[u], the
    validation events up to validation_end[u], then the test events.
    """

    is_ordered: bool
    """Whether the events of a user have an order, from timestamps or an order column."""
    user_offset: Int64Array
    train_end: Int64Array
    validation_end: Int64Array
    event_item: NDArray[np.int32]
    train_user: NDArray[np.int32]
    item_count: Int64Array
    vector_row: Int64Array
    event_weight: NDArray[np.float32] | None = None
    """Weight of each event as in the log; None if the log has no weights. The loader divides the weights by `mean_weight`."""

    @classmethod
    def open(cls, manifest: InteractionsManifest) -> Self:
        """Map the arrays of an interactions stage."""
        array_names = ["user_offset", "train_end", "validation_end", "event_item", "train_user", "item_count", "vector_row"]
        if "event_weight.npy" in manifest.files:
            array_names.append("event_weight")
        return cls(is_ordered=manifest.is_ordered, **{name: memory_map(manifest.path(f"{name}.npy")) for name in array_names})

    @property
    def num_train_events(self) -> int:
        """Number of training events, which are the training examples."""
        return len(self.train_user)

    @property
    def first_example_U(self) -> Int64Array:
        """[U]: index of each user's first training example. Only training events are numbered as examples."""
        num_examples_U = self.train_end - self.user_offset[:-1]
        first_example_U: Int64Array = np.cumsum(num_examples_U) - num_examples_U
        return first_example_U

    def mean_weight(self) -> np.float32:
        """Return the mean weight of the training events, 1 if the log has no weights; raise InputError if all weights are 0.

        >>> offset, empty = np.array([0, 3, 4]), np.zeros(0, np.int32)
        >>> store = EventStore(
        ...     True, offset, np.array([2, 4]), offset[1:], empty, np.array([0, 0, 1]), empty, empty,
        ...     event_weight=np.array([1, 2, 90, 3], np.float32),
        ... )
        >>> float(store.mean_weight())  # the third event is not a training event
        2.0
        """
        if self.event_weight is None:
            return np.float32(1)
        event_offset_U, total_weight = self.user_offset[:-1] - self.first_example_U, 0.0
        for start in range(0, self.num_train_events, EVENTS_PER_CHUNK):
            user_E = self.train_user[start : start + EVENTS_PER_CHUNK]
            event_E = np.arange(start, start + len(user_E)) + event_offset_U[user_E]
            total_weight += float(self.event_weight[event_E].sum(dtype=np.float64))
        if total_weight == 0:
            raise InputError(
                f"interactions.weight_column: all {self.num_train_events:,} training events have the weight 0 and do not "
                "contribute to the loss; give at least one event a weight above 0, or remove weight_column"
            )
        return np.float32(total_weight / self.num_train_events)

    def histories(
        self, event_B: Int64Array, user_B: Int64Array, *, max_history: int, include_target: bool = False
    ) -> JaggedArray:
        """Return the history of each training event: at most max_history items of the same user.

        In an ordered log these are the items right before the event, oldest first.

        An unordered log stores the events of a user in random order. The history of an event then consists of the items of
        the events stored after it. After the user's last training event, the history continues with the user's first event.
        With include_target the history starts with the item of the event itself.

        Args:
            event_B: index of each event in the log.
            user_B: row of each event's user.
            include_target: used only for an unordered log.
        """
        start_B, end_B = self.user_offset[user_B], self.train_end[user_B]
        if self.is_ordered:
            length_B = np.minimum(event_B - start_B, max_history)
            return JaggedArray.from_slices(self.event_item, start=event_B - length_B, end=event_B)
        first_shift = 0 if include_target else 1
        length_B = np.minimum(end_B - start_B - first_shift, max_history)
        shift_H = ragged_ranges(np.full_like(length_B, first_shift), length_B)
        num_events_H, start_H = np.repeat(end_B - start_B, length_B), np.repeat(start_B, length_B)
        event_H = start_H + (np.repeat(event_B - start_B, length_B) + shift_H) % num_events_H
        return JaggedArray.from_lengths(length_B, self.event_item[event_H])

    def users_with_targets(self, split: EvaluationSplit) -> Int64Array:
        """Return the rows of the users that have events in `split`."""
        start_U, end_U = self._split_bounds(split)
        return np.flatnonzero(end_U > start_U)

    def targets(self, user_B: Int64Array, split: EvaluationSplit) -> JaggedArray:
        """Return the items of each user's events in `split`."""
        start_U, end_U = self._split_bounds(split)
        return JaggedArray.from_slices(self.event_item, start=start_U[user_B], end=end_U[user_B])

    def first_event_index(self, user_B: Int64Array, split: EvaluationSplit) -> Int64Array:
        """Return the index in the log of each user's first event in `split`.

        For a user without an event in `split`, return the index at which such an event would be inserted.
        """
        return self._split_bounds(split)[0][user_B]

    def items_before(self, user_B: Int64Array, split: EvaluationSplit, *, max_items: int | None = None) -> JaggedArray:
        """Return the items of each user's events before `split`, oldest first; with max_items only the newest of them."""
        end_B = self._split_bounds(split)[0][user_B]
        start_B = self.user_offset[user_B]
        return JaggedArray.from_slices(
            self.event_item, start=start_B if max_items is None else np.maximum(start_B, end_B - max_items), end=end_B
        )

    def item_counts_before(self, split: EvaluationSplit) -> Int64Array:
        """Return the number of events of each item before `split`, [I]."""
        num_items = len(self.item_count)
        count_I = np.zeros(num_items, np.int64)
        # A chunk has at least as many events as there are items, because np.bincount takes time proportional to num_items.
        first_user_of_chunk = np.searchsorted(
            self.user_offset, np.arange(0, len(self.event_item), max(num_items, EVENTS_PER_CHUNK))
        )
        for start_user, stop_user in pairwise([*np.unique(first_user_of_chunk).tolist(), len(self.train_end)]):
            count_I += np.bincount(self.items_before(np.arange(start_user, stop_user), split).values_L, minlength=num_items)
        return count_I

    def _split_bounds(self, split: EvaluationSplit) -> tuple[Int64Array, Int64Array]:
        """Return start and end of each user's events of `split` in the log, [U] each."""
        if split == "test":
            return self.validation_end, self.user_offset[1:]
        return self.train_end, self.validation_end
