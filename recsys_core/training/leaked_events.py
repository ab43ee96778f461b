"""Leaked events: held-out events of this run that the champion was trained on.

Events leak if the split moves back: the log ends earlier, more days are held out, or the kind of split has changed.

Shapes: U users, E training events of a chunk, H distinct held-out events.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.data.events import EVENTS_PER_CHUNK, EventStore, memory_map
from recsys_core.data.jagged import Int64Array, JaggedArray
from recsys_core.manifests import InteractionsManifest
from recsys_core.training.champion import require_unchanged, rows_by_id

EVENT_FILES = ("user_offset.npy", "train_end.npy", "validation_end.npy", "event_item.npy", "train_user.npy")
TIME_FILE = "event_time.npy"


def count_leaked_events(interactions: InteractionsManifest, *, champion: InteractionsManifest) -> int:
    """Count the validation and test events of this run that were training events of the champion.

    Two events are the same if they have the same user and the same item, and the same time if both logs have times. Two kinds
    of events are not counted:
    - events that also occur among the training events of this run;
    - validation events of users who were not split in the champion's run, because they had too few events. With
      `leave_last_out`, every user who reaches `min_events` has one such event.

    If all training events of the champion are older than all held-out events, the events are not compared. This is always so
    if a split by time moves forward.

    Raises StageError if a file of the champion has changed.
    """
    stages = (interactions, champion)
    has_times = all(TIME_FILE in stage.files for stage in stages)
    for name in (*EVENT_FILES, TIME_FILE) if has_times else EVENT_FILES:
        require_unchanged(champion, name)
    store, old_store = (EventStore.open(stage) for stage in stages)
    time, old_time = (memory_map(stage.path(TIME_FILE)) if has_times else None for stage in stages)
    if (
        time is not None
        and old_time is not None
        and _newest_training_time(old_store, old_time) < _oldest_held_out_time(store, time)
    ):
        return 0
    user_row, item_row = (rows_by_id(side, from_stage=champion, to_stage=interactions) for side in ("user", "item"))
    has_new_events_U = _has_new_events(store, old_store, user_row=user_row)
    held_out = HeldOutEvents.of(store, np.where(has_new_events_U, store.validation_end, store.train_end), time=time)
    trained_by_champion = held_out.matches(old_store, time=old_time, user_row=user_row, item_row=item_row)
    if not len(trained_by_champion):
        return 0
    identity_user_row, identity_item_row = np.arange(len(store.train_end)), np.arange(len(store.item_count))
    trained_in_this_run = held_out.matches(store, time=time, user_row=identity_user_row, item_row=identity_item_row)
    return len(np.setdiff1d(trained_by_champion, trained_in_this_run))


def _newest_training_time(store: EventStore, time: NDArray[np.int64]) -> int:
    """Return the time of the newest training event. The events of each user are sorted by time."""
    return int(time[store.train_end[store.train_end > store.user_offset[:-1]] - 1].max())


def _oldest_held_out_time(store: EventStore, time: NDArray[np.int64]) -> int:
    """Return the time of the oldest validation or test event. The events of each user are sorted by time within each split."""
    splits = ((store.train_end, store.validation_end), (store.validation_end, store.user_offset[1:]))
    return int(np.concatenate([time[first_U[first_U < end_U]] for first_U, end_U in splits]).min())


def _has_new_events(store: EventStore, old_store: EventStore, *, user_row: Int64Array) -> NDArray[np.bool_]:
    """Return whether each user of `store` has new events, and the champion was trained on all older events of the user.

    user_row: for each user of `old_store` the row in `store`, -1 for none.
    """
    has_new_events_U = np.zeros(len(store.train_end), np.bool_)
    unsplit_old_users = np.flatnonzero((old_store.train_end == old_store.user_offset[1:]) & (user_row >= 0))
    users = user_row[unsplit_old_users]
    has_new_events_U[users] = np.diff(store.user_offset)[users] > np.diff(old_store.user_offset)[unsplit_old_users]
    return has_new_events_U


@dataclass(frozen=True)
class HeldOutEvents:
    """Distinct held-out events, encoded as integers for a binary search.

    Attributes:
        num_items: number of items of the log.
        pairs: sorted codes of the (user, item) pairs: user * num_items + item.
        times: sorted times.
        code_H: sorted codes of the events: (index in pairs) * len(times) + (index in times).
    """

    num_items: int
    pairs: NDArray[np.int64]
    times: NDArray[np.int64]
    code_H: NDArray[np.int64]

    @classmethod
    def of(cls, store: EventStore, first_U: Int64Array, *, time: NDArray[np.int64] | None) -> Self:
        """Collect the events of each user from index `first_U` on. time: times of all events; None: times are not compared."""
        num_items, end_U = len(store.item_count), store.user_offset[1:]
        user_E = np.repeat(np.arange(len(first_U)), end_U - first_U)
        pair_E = user_E * num_items + JaggedArray.from_slices(store.event_item, start=first_U, end=end_U).values_L
        time_E = np.zeros_like(pair_E)
        if time is not None:
            time_E = JaggedArray.from_slices(time, start=first_U, end=end_U).values_L
        pairs, pair_index = np.unique(pair_E, return_inverse=True)
        times, time_index = np.unique(time_E, return_inverse=True)
        return cls(num_items, pairs, times, np.unique(pair_index * len(times) + time_index))

    def matches(
        self, store: EventStore, *, time: NDArray[np.int64] | None, user_row: Int64Array, item_row: Int64Array
    ) -> NDArray[np.int64]:
        """Return the codes of the held-out events that are training events of `store`.

        user_row, item_row: for each user and item of `store` the row in the held-out events' log, -1 for none.
        """
        if not len(self.code_H):
            return np.zeros(0, np.int64)
        matching_codes = [np.zeros(0, np.int64)]
        example_to_index_U = store.user_offset[:-1] - store.first_example_U
        for first in range(0, store.num_train_events, EVENTS_PER_CHUNK):
            user_E = store.train_user[first : first + EVENTS_PER_CHUNK]
            index_E = np.arange(first, first + len(user_E)) + example_to_index_U[user_E]
            user_row_E, item_row_E = user_row[user_E], item_row[store.event_item[index_E]]
            pair_index_E, has_pair_E = _search(user_row_E * self.num_items + item_row_E, self.pairs)
            time_index_E, has_time_E = _search(np.zeros_like(user_row_E) if time is None else time[index_E], self.times)
            code_E = pair_index_E * len(self.times) + time_index_E
            is_candidate_E = (user_row_E >= 0) & (item_row_E >= 0) & has_pair_E & has_time_E
            matching_codes.append(np.intersect1d(code_E[is_candidate_E], self.code_H))
        return np.unique(np.concatenate(matching_codes))


def _search(value_E: NDArray[np.int64], sorted_values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the index of each value in `sorted_values`, and whether `sorted_values` has the value."""
    index_E = np.searchsorted(sorted_values, value_E).clip(max=len(sorted_values) - 1)
    return index_E, sorted_values[index_E] == value_E
