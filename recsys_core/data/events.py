"""The event log as CSR by user, in memory maps: a training example is a position, a history is a slice before it."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.data.jagged import JaggedArray, ragged_ranges
from recsys_core.errors import InputError
from recsys_core.manifests import InteractionsManifest

Rows = NDArray[np.int64]
EvaluationSplit = Literal["validation", "test"]
COUNTED_EVENTS = 2**18


def mapped(path: Path) -> NDArray[Any]:
    """A read-only map of a .npy file, as a plain array: np.memmap's own indexing costs microseconds more."""
    return np.asarray(np.load(path, mmap_mode="r"))


@dataclass(frozen=True)
class EventStore:
    """Maps of the files that InteractionsManifest describes; opening costs nothing, pages are shared by all ranks of a host."""

    ordered: bool
    user_offset: Rows
    train_end: Rows
    validation_end: Rows
    event_item: NDArray[np.int32]
    train_user: NDArray[np.int32]
    item_count: Rows
    vector_row: Rows
    event_weight: NDArray[np.float32] | None = None
    """How much each event counts in the loss, against `mean_weight`; None where the log has no weights."""

    @classmethod
    def open(cls, manifest: InteractionsManifest) -> Self:
        """Maps the arrays of a committed ingest."""
        names = ["user_offset", "train_end", "validation_end", "event_item", "train_user", "item_count", "vector_row"]
        if "event_weight.npy" in manifest.files:
            names.append("event_weight")
        return cls(ordered=manifest.ordered, **{name: mapped(manifest.path(f"{name}.npy")) for name in names})

    @property
    def train_events(self) -> int:
        """Number of training examples."""
        return len(self.train_user)

    @property
    def first_example(self) -> Rows:
        """[users]: index of each user's first training example."""
        lengths = self.train_end - self.user_offset[:-1]
        first: Rows = np.cumsum(lengths) - lengths
        return first

    def mean_weight(self) -> np.float32:
        """Mean weight of the training events; 1 where the log has no weights. Raises InputError where all of them are 0.

        >>> offset, nothing = np.array([0, 3, 4]), np.zeros(0, np.int32)
        >>> store = EventStore(
        ...     True, offset, np.array([2, 4]), offset[1:], nothing, np.array([0, 0, 1]), nothing, nothing,
        ...     event_weight=np.array([1, 2, 90, 3], np.float32),
        ... )
        >>> float(store.mean_weight())  # the third event is not a training event
        2.0
        """
        if self.event_weight is None:
            return np.float32(1)
        ahead_U, total = self.user_offset[:-1] - self.first_example, 0.0
        for first in range(0, self.train_events, COUNTED_EVENTS):
            user = self.train_user[first : first + COUNTED_EVENTS]
            total += float(self.event_weight[np.arange(first, first + len(user)) + ahead_U[user]].sum(dtype=np.float64))
        if total == 0:
            raise InputError(
                f"interactions.weight_column: all {self.train_events:,} training events have the weight 0, so none counts "
                "in the loss; give at least one a weight above 0, or leave weight_column out"
            )
        return np.float32(total / self.train_events)

    def histories(self, position: Rows, user: Rows, *, max_history: int, include_target: bool = False) -> JaggedArray:
        """Up to max_history items for each training event at `position` of `user`.

        Ordered logs: the events right before it, oldest first. Others: the user's training events that follow it, around the
        end to the start (they are stored in random order), without the event itself unless include_target.
        """
        start, end = self.user_offset[user], self.train_end[user]
        if self.ordered:
            length = np.minimum(position - start, max_history)
            return JaggedArray.from_slices(self.event_item, start=position - length, end=position)
        first_step = 0 if include_target else 1
        length = np.minimum(end - start - first_step, max_history)
        step = ragged_ranges(np.full_like(length, first_step), length)
        size, first = np.repeat(end - start, length), np.repeat(start, length)
        place = first + (np.repeat(position - start, length) + step) % size
        return JaggedArray.from_lengths(length, self.event_item[place])

    def users_with_targets(self, split: EvaluationSplit) -> Rows:
        """Rows of the users that have events in `split`."""
        start, end = self._segment(split)
        return np.flatnonzero(end > start)

    def targets(self, user: Rows, split: EvaluationSplit) -> JaggedArray:
        """Items of each user's events in `split`."""
        start, end = self._segment(split)
        return JaggedArray.from_slices(self.event_item, start=start[user], end=end[user])

    def first_of(self, user: Rows, split: EvaluationSplit) -> Rows:
        """Position of each user's first event in `split` (of the event after it where there is none)."""
        return self._segment(split)[0][user]

    def before(self, user: Rows, split: EvaluationSplit, *, last: int | None = None) -> JaggedArray:
        """Items of each user's events before `split`, oldest first; only the last `last` of them where given."""
        end = self._segment(split)[0][user]
        start = self.user_offset[user]
        first = start if last is None else np.maximum(start, end - last)
        return JaggedArray.from_slices(self.event_item, start=first, end=end)

    def counts_before(self, split: EvaluationSplit) -> Rows:
        """[items]: events of each item before `split`."""
        items = len(self.item_count)
        count = np.zeros(items, np.int64)
        # As many events at once as there are counters: neither the log nor the counters are held twice.
        first = np.searchsorted(self.user_offset, np.arange(0, len(self.event_item), max(items, COUNTED_EVENTS)))
        for start, stop in pairwise([*np.unique(first).tolist(), len(self.train_end)]):
            count += np.bincount(self.before(np.arange(start, stop), split).values_L, minlength=items)
        return count

    def _segment(self, split: EvaluationSplit) -> tuple[Rows, Rows]:
        if split == "test":
            return self.validation_end, self.user_offset[1:]
        return self.train_end, self.validation_end
