"""Whether a warm start would be measured on events that the champion was trained on.

That is so where the split moves back: the log is cut off earlier, more days are held out, or the kind of split is another one.
Shapes: U users, H held-out events, E training events of one part.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.data.events import EVENTS_PER_CHUNK, EventStore, mapped
from recsys_core.data.jagged import Int64Array, JaggedArray
from recsys_core.errors import StageError
from recsys_core.manifests import InteractionsManifest, record_file
from recsys_core.training.champion import champion_rows

EVENT_FILES = ("user_offset.npy", "train_end.npy", "validation_end.npy", "event_item.npy", "train_user.npy")
TIMES = "event_time.npy"


def leak(tonight: InteractionsManifest, *, champion: InteractionsManifest) -> int:
    """How many of tonight's validation and test events the champion was trained on, and a full training would not be.

    An event is the same user and item and, where both logs have times, the same time. None is counted that is among tonight's
    training events too, nor the validation event of a user who was too short to be split in the champion's night and has grown
    since: with `leave_last_out` that is a training event whenever a user reaches `min_events`.

    Reads the training events only where the newest one is not older than all that is held out, which a split by time makes it.
    Raises StageError when a file of the champion's has changed.
    """
    stages = (tonight, champion)
    timed = all(TIMES in stage.files for stage in stages)
    _require_unchanged(champion, (*EVENT_FILES, TIMES) if timed else EVENT_FILES)
    store, before = (EventStore.open(stage) for stage in stages)
    time, old_time = (mapped(stage.path(TIMES)) if timed else None for stage in stages)
    if time is not None and old_time is not None and _trained_until(before, old_time) < _held_out_from(store, time):
        return 0
    # Tonight's row of each of the champion's users and items, -1 for none.
    user_row, item_row = (
        champion_rows(side, interactions=(champion, tonight), features=(None, None)) for side in ("user", "item")
    )
    has_grown_U = _has_grown(store, before, user_row=user_row)
    held_out = HeldOut.of(store, np.where(has_grown_U, store.validation_end, store.train_end), time=time)
    found = held_out.among(before, time=old_time, user_row=user_row, item_row=item_row)
    if not len(found):
        return 0
    same_user, same_item = np.arange(len(store.train_end)), np.arange(len(store.item_count))
    return len(np.setdiff1d(found, held_out.among(store, time=time, user_row=same_user, item_row=same_item)))


def _trained_until(store: EventStore, time: NDArray[np.int64]) -> int:
    """Time of the newest training event; a user's are in order."""
    return int(time[store.train_end[store.train_end > store.user_offset[:-1]] - 1].max())


def _held_out_from(store: EventStore, time: NDArray[np.int64]) -> int:
    """Time of the oldest validation or test event; a user's of each are in order."""
    parts = ((store.train_end, store.validation_end), (store.validation_end, store.user_offset[1:]))
    return int(np.concatenate([time[first_U[first_U < end_U]] for first_U, end_U in parts]).min())


def _has_grown(store: EventStore, before: EventStore, *, user_row: Int64Array) -> NDArray[np.bool_]:
    """[U]: users with more events than in the champion's night, all of whose events were training events then."""
    grown_U = np.zeros(len(store.train_end), np.bool_)
    old_U = np.flatnonzero((before.train_end == before.user_offset[1:]) & (user_row >= 0))
    row_U = user_row[old_U]
    grown_U[row_U] = np.diff(store.user_offset)[row_U] > np.diff(before.user_offset)[old_U]
    return grown_U


@dataclass(frozen=True)
class HeldOut:
    """Held-out events by sorted codes of their user and item, and of their place there and their time."""

    items: int
    pair_H: NDArray[np.int64]
    time_H: NDArray[np.int64]
    code_H: NDArray[np.int64]

    @classmethod
    def of(cls, store: EventStore, first_U: Int64Array, *, time: NDArray[np.int64] | None) -> Self:
        """The events of each user from the position `first_U` on. time: of each event; None: all the same."""
        items, end_U = len(store.item_count), store.user_offset[1:]
        user_H = np.repeat(np.arange(len(first_U)), end_U - first_U)
        pair_H = user_H * items + JaggedArray.from_slices(store.event_item, start=first_U, end=end_U).values_L
        when_H = np.zeros_like(pair_H) if time is None else JaggedArray.from_slices(time, start=first_U, end=end_U).values_L
        pairs, place_H = np.unique(pair_H, return_inverse=True)
        times, moment_H = np.unique(when_H, return_inverse=True)
        return cls(items, pairs, times, np.unique(place_H * len(times) + moment_H))

    def among(
        self, store: EventStore, *, time: NDArray[np.int64] | None, user_row: Int64Array, item_row: Int64Array
    ) -> NDArray[np.int64]:
        """Codes of the held-out events that are training events of `store`. user_row, item_row: its rows in these events'."""
        if not len(self.code_H):
            return np.zeros(0, np.int64)
        found = [np.zeros(0, np.int64)]
        ahead_U = store.user_offset[:-1] - store.first_example
        for first in range(0, store.train_events, EVENTS_PER_CHUNK):
            user_E = store.train_user[first : first + EVENTS_PER_CHUNK]
            position_E = np.arange(first, first + len(user_E)) + ahead_U[user_E]
            row_E, item_E = user_row[user_E], item_row[store.event_item[position_E]]
            place_E, is_pair_E = _places(row_E * self.items + item_E, self.pair_H)
            moment_E, is_time_E = _places(np.zeros_like(row_E) if time is None else time[position_E], self.time_H)
            code_E = place_E * len(self.time_H) + moment_E
            known_E = (row_E >= 0) & (item_E >= 0) & is_pair_E & is_time_E
            found.append(np.intersect1d(code_E[known_E], self.code_H))
        return np.unique(np.concatenate(found))


def _places(value_E: NDArray[np.int64], sorted_H: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where each value is in `sorted_H`, and whether it is there at all."""
    place_E = np.searchsorted(sorted_H, value_E).clip(max=len(sorted_H) - 1)
    return place_E, sorted_H[place_E] == value_E


def _require_unchanged(stage: InteractionsManifest, names: tuple[str, ...]) -> None:
    for name in names:
        path = stage.path(name)
        if record_file(path) != stage.files[name]:
            raise StageError(f"{path}: changed since it was written; set training.warm_start to null for this night")
