"""The interaction log in CSR form by user, memory-mapped: the history of an event is a slice before it."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.data.jagged import Int64Array, JaggedArray, ragged_ranges
from recsys_core.errors import InputError
from recsys_core.manifests import InteractionsManifest

EvaluationSplit = Literal["validation", "test"]
EVENTS_PER_CHUNK = 2**18


def mapped(path: Path) -> NDArray[Any]:
    """Map a .npy file read-only, as a plain array: indexing an np.memmap takes microseconds longer."""
    return np.asarray(np.load(path, mmap_mode="r"))


@dataclass(frozen=True)
class EventStore:
    """Memory maps of the arrays that InteractionsManifest describes; all processes of a host share their pages.

    The events of user u are event_item[user_offset[u]:user_offset[u + 1]]: the training events up to train_end[u], the
    validation events up to validation_end[u], then the test events.
    """

    ordered: bool
    user_offset: Int64Array
    train_end: Int64Array
    validation_end: Int64Array
    event_item: NDArray[np.int32]
    train_user: NDArray[np.int32]
    item_count: Int64Array
    vector_row: Int64Array
    event_weight: NDArray[np.float32] | None = None
    """Weight of each event in the loss, relative to `mean_weight`; None if the log has no weights."""

    @classmethod
    def open(cls, manifest: InteractionsManifest) -> Self:
        """Map the arrays of an interactions stage."""
        names = ["user_offset", "train_end", "validation_end", "event_item", "train_user", "item_count", "vector_row"]
        if "event_weight.npy" in manifest.files:
            names.append("event_weight")
        return cls(ordered=manifest.ordered, **{name: mapped(manifest.path(f"{name}.npy")) for name in names})

    @property
    def train_events(self) -> int:
        """Number of training events, which are the training examples."""
        return len(self.train_user)

    @property
    def first_example(self) -> Int64Array:
        """[U]: index of each user's first training example; examples are training events, numbered without the others."""
        lengths = self.train_end - self.user_offset[:-1]
        first: Int64Array = np.cumsum(lengths) - lengths
        return first

    def mean_weight(self) -> np.float32:
        """Return the mean weight of the training events, 1 if the log has no weights. Raises InputError if all weights are 0.

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
        example_to_event_U, total = self.user_offset[:-1] - self.first_example, 0.0
        for first in range(0, self.train_events, EVENTS_PER_CHUNK):
            user_E = self.train_user[first : first + EVENTS_PER_CHUNK]
            event_E = np.arange(first, first + len(user_E)) + example_to_event_U[user_E]
            total += float(self.event_weight[event_E].sum(dtype=np.float64))
        if total == 0:
            raise InputError(
                f"interactions.weight_column: all {self.train_events:,} training events have the weight 0, so none counts "
                "in the loss; give at least one a weight above 0, or leave weight_column out"
            )
        return np.float32(total / self.train_events)

    def histories(
        self, event_B: Int64Array, user_B: Int64Array, *, max_history: int, include_target: bool = False
    ) -> JaggedArray:
        """Return up to max_history items for each training event, given by its index in the log and its user.

        Ordered log: the items right before the event, oldest first. Log without timestamps, whose events are stored in random
        order: the user's training events after the event, then those from the first on; with include_target, starting with
        the event itself.
        """
        start_B, end_B = self.user_offset[user_B], self.train_end[user_B]
        if self.ordered:
            length_B = np.minimum(event_B - start_B, max_history)
            return JaggedArray.from_slices(self.event_item, start=event_B - length_B, end=event_B)
        first_step = 0 if include_target else 1
        length_B = np.minimum(end_B - start_B - first_step, max_history)
        step_H = ragged_ranges(np.full_like(length_B, first_step), length_B)
        num_events_H, start_H = np.repeat(end_B - start_B, length_B), np.repeat(start_B, length_B)
        event_H = start_H + (np.repeat(event_B - start_B, length_B) + step_H) % num_events_H
        return JaggedArray.from_lengths(length_B, self.event_item[event_H])

    def users_with_targets(self, split: EvaluationSplit) -> Int64Array:
        """Return the rows of the users that have events in `split`."""
        start_U, end_U = self._bounds(split)
        return np.flatnonzero(end_U > start_U)

    def targets(self, user_B: Int64Array, split: EvaluationSplit) -> JaggedArray:
        """Return the items of each user's events in `split`."""
        start_U, end_U = self._bounds(split)
        return JaggedArray.from_slices(self.event_item, start=start_U[user_B], end=end_U[user_B])

    def first_event(self, user_B: Int64Array, split: EvaluationSplit) -> Int64Array:
        """Return the index in the log of each user's first event in `split`; without one, of the event after the split."""
        return self._bounds(split)[0][user_B]

    def before(self, user_B: Int64Array, split: EvaluationSplit, *, last: int | None = None) -> JaggedArray:
        """Return the items of each user's events before `split`, oldest first; only the last `last` items if it is given."""
        end_B = self._bounds(split)[0][user_B]
        start_B = self.user_offset[user_B]
        return JaggedArray.from_slices(
            self.event_item, start=start_B if last is None else np.maximum(start_B, end_B - last), end=end_B
        )

    def counts_before(self, split: EvaluationSplit) -> Int64Array:
        """Count the events of each item before `split`, [I]."""
        num_items = len(self.item_count)
        count_I = np.zeros(num_items, np.int64)
        # A chunk has about as many events as there are items, so it needs about as much memory as the counts.
        first_user = np.searchsorted(self.user_offset, np.arange(0, len(self.event_item), max(num_items, EVENTS_PER_CHUNK)))
        for start, stop in pairwise([*np.unique(first_user).tolist(), len(self.train_end)]):
            count_I += np.bincount(self.before(np.arange(start, stop), split).values_L, minlength=num_items)
        return count_I

    def _bounds(self, split: EvaluationSplit) -> tuple[Int64Array, Int64Array]:
        """[U] and [U]: start and end of each user's events of `split` in the log."""
        if split == "test":
            return self.validation_end, self.user_offset[1:]
        return self.train_end, self.validation_end
