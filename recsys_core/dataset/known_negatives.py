"""Known negatives: items that a user has rejected in the log, in CSR form by user and split.

Shapes: U users, B queries, L known negatives, S shards.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.jagged import Int64Array, JaggedArray, ragged_ranges
from recsys_core.dataset.layout import EventArrays, ShardArrays
from recsys_core.dataset.shards import EventArray, EventIndices, ShardedEventIndices, UserArray, event_array, user_array

NUM_SPLITS = 3


@dataclass(frozen=True)
class KnownNegatives:
    """The known negatives of all users, memory-mapped. A user's known negatives and training events have no item in common.

    Attributes:
        train_start, validation_start, test_start: int64 [U], index of each user's first known negative of each split.
        item_L: item rows, oldest first within a user and split.
        event_L: for each known negative, the index in the log of its user's first event of the same split that is not earlier
            (see InteractionsManifest). The indices are ascending. None if the events have no order.
    """

    train_start: UserArray
    validation_start: UserArray
    test_start: UserArray
    item_L: EventArray
    event_L: EventIndices | None

    @classmethod
    def of(cls, arrays: EventArrays) -> Self | None:
        """Return the known negatives of an event store; None if its ingest did not keep them."""
        if arrays.negative_offset is None or arrays.negative_item is None:
            return None
        start_S = ShardArrays.of(arrays.negative_item).start_S
        starts_of_split = partial(
            user_array, arrays.negative_offset, num_users=arrays.num_users, index_start_S=start_S, step=NUM_SPLITS
        )
        event_L: EventIndices | None
        if isinstance(arrays.negative_event, ShardArrays):
            event_L = ShardedEventIndices(arrays.negative_event, event_start_S=ShardArrays.of(arrays.event_item).start_S)
        else:
            event_L = arrays.negative_event
        item_L = event_array(arrays.negative_item)
        train_start, validation_start, test_start = (starts_of_split(first_entry=split) for split in range(NUM_SPLITS))
        return cls(train_start, validation_start, test_start, item_L=item_L, event_L=event_L)

    @property
    def num_train_negatives_U(self) -> Int64Array:
        """[U]: number of known negatives of each user in the training split."""
        return self.validation_start[:] - self.train_start[:]

    def before(self, user_B: Int64Array, split: Literal["validation", "test"]) -> JaggedArray:
        """Return the known negatives of each user before `split`, oldest first."""
        end = self.validation_start if split == "validation" else self.test_start
        return JaggedArray.from_slices(self.item_L, start=self.train_start[user_B], end=end[user_B])

    def at_events(self, event_B: Int64Array, user_B: Int64Array, *, max_items: int, draw_B: NDArray[np.float64]) -> JaggedArray:
        """Return, for each training event, at most `max_items` of its user's known negatives in the training split.

        In an ordered log, they are the newest known negatives before or at the event. In an unordered log, they are drawn
        without replacement: a user's known negatives are stored in random order, and consecutive known negatives are taken from
        a random index on. After the user's last known negative follows the first one.

        Args:
            event_B: index of each event in the log.
            user_B: row of each event's user.
            draw_B: a uniform random number from 0 to 1 for each event; used only for an unordered log.
        """
        start_B = self.train_start[user_B]
        if self.event_L is not None:
            end_B = self.event_L.searchsorted(event_B, side="right")
            return JaggedArray.from_slices(self.item_L, start=np.maximum(start_B, end_B - max_items), end=end_B)
        num_negatives_B = self.validation_start[user_B] - start_B
        length_B = np.minimum(num_negatives_B, max_items)
        shift_L = ragged_ranges((draw_B * num_negatives_B).astype(np.int64), length_B)
        shift_L %= np.repeat(num_negatives_B, length_B)
        return JaggedArray.from_lengths(length_B, self.item_L[np.repeat(start_B, length_B) + shift_L])
