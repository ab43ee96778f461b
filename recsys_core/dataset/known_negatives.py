"""Known negatives: items that a user has rejected in the log, in CSR form by user and split.

Shapes: U users, B queries, L known negatives.
"""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.jagged import Int64Array, JaggedArray, ragged_ranges
from recsys_core.dataset.layout import EventArrays

NUM_SPLITS = 3


@dataclass(frozen=True)
class KnownNegatives:
    """The known negatives of all users, memory-mapped. No training event of a user has an item that is a negative of the user.

    Attributes:
        offset: int64 [3 * U + 1]. Those of user u in split s are item_L[offset[3 * u + s]:offset[3 * u + s + 1]], oldest first.
        item_L: item rows.
        event_L: ascending, index in the log of the first event that a known negative is not later than, see
            InteractionsManifest; None if the events have no order.
    """

    offset: Int64Array
    item_L: NDArray[np.int32]
    event_L: Int64Array | None

    @classmethod
    def of(cls, arrays: EventArrays) -> Self | None:
        """Return the known negatives of an event store; None if its ingest did not keep them."""
        if arrays.negative_offset is None or arrays.negative_item is None:
            return None
        return cls(arrays.negative_offset, arrays.negative_item, arrays.negative_event)

    @property
    def num_train_negatives_U(self) -> Int64Array:
        """[U]: number of known negatives of each user in the training split."""
        return np.diff(self.offset)[::NUM_SPLITS]

    def before(self, user_B: Int64Array, split: Literal["validation", "test"]) -> JaggedArray:
        """Return the known negatives of each user before `split`, oldest first."""
        start_B = user_B * NUM_SPLITS
        end_B = start_B + (1 if split == "validation" else 2)
        return JaggedArray.from_slices(self.item_L, start=self.offset[start_B], end=self.offset[end_B])

    def at_events(self, event_B: Int64Array, user_B: Int64Array, *, max_items: int, draw_B: NDArray[np.float64]) -> JaggedArray:
        """Return at most `max_items` known negatives for each training event, of the event's user and of the training split.

        In an ordered log they are the newest ones that are not later than the event. Otherwise they are drawn without
        replacement: the known negatives of a user are stored in random order, and those after a drawn one are taken.

        Args:
            event_B: index of each event in the log.
            user_B: row of each event's user.
            draw_B: uniform random numbers from 0 to 1; used only for an unordered log.
        """
        start_B = self.offset[user_B * NUM_SPLITS]
        if self.event_L is not None:
            end_B = np.searchsorted(self.event_L, event_B, side="right")
            return JaggedArray.from_slices(self.item_L, start=np.maximum(start_B, end_B - max_items), end=end_B)
        num_negatives_B = self.offset[user_B * NUM_SPLITS + 1] - start_B
        length_B = np.minimum(num_negatives_B, max_items)
        shift_L = ragged_ranges((draw_B * num_negatives_B).astype(np.int64), length_B)
        shift_L %= np.repeat(num_negatives_B, length_B)
        return JaggedArray.from_lengths(length_B, self.item_L[np.repeat(start_B, length_B) + shift_L])
