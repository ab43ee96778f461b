"""Leaked events: held-out events of this run that the champion was trained on.

Events leak if the split moves back: the log ends earlier, more days are held out, or the kind of split has changed.

Shapes: U users, E training events of a chunk, H distinct held-out events.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.events import EVENTS_PER_CHUNK, EventStore, memory_map
from recsys_core.dataset.jagged import Int64Array, JaggedArray
from recsys_core.manifests import InteractionsManifest
from recsys_core.training.warm.starting_model import match_rows_by_id, require_unchanged

EVENT_FILE_NAMES = ("user_offset.npy", "train_end.npy", "validation_end.npy", "event_item.npy", "train_user.npy")
TIME_FILE_NAME = "event_time.npy"


def count_leaked_events(interactions: InteractionsManifest, *, champion: InteractionsManifest) -> int:
    """Count the validation and test events of this run that were training events of the champion.

    Two events are the same if they have the same user and the same item, and the same time if both logs have times. Two kinds
    of events are not counted:
    - events that also occur among the training events of this run;
    - validation events of users who had too few events for the split of the champion's run and have more events now. The
      champion was trained on all events that these users had. With `leave_last_out`, the validation event of a user who has
      just reached `min_events` is such an event.

    If all training events of the champion are older than all held-out events, the result is 0 without a comparison. A split
    by time that moves forward is always such a case.

    Raises StageError if a file of the champion has changed.
    """
    stages = (interactions, champion)
    has_times = all(TIME_FILE_NAME in stage.files for stage in stages)
    for file_name in (*EVENT_FILE_NAMES, TIME_FILE_NAME) if has_times else EVENT_FILE_NAMES:
        require_unchanged(champion, file_name)
    store, champion_store = (EventStore.open(stage) for stage in stages)
    event_time, champion_event_time = (memory_map(stage.path(TIME_FILE_NAME)) if has_times else None for stage in stages)
    if (
        event_time is not None
        and champion_event_time is not None
        and _newest_training_time(champion_store, champion_event_time) < _oldest_held_out_time(store, event_time)
    ):
        return 0
    user_row, item_row = (match_rows_by_id(side, from_stage=champion, to_stage=interactions) for side in ("user", "item"))
    has_new_events_U = _has_new_events(store, champion_store, user_row=user_row)
    held_out_events = HeldOutEvents.from_store(
        store, np.where(has_new_events_U, store.validation_end, store.train_end), event_time=event_time
    )
    champion_codes = held_out_events.matching_codes(
        champion_store, event_time=champion_event_time, user_row=user_row, item_row=item_row
    )
    if not len(champion_codes):
        return 0
    identity_user_row, identity_item_row = np.arange(len(store.train_end)), np.arange(len(store.item_count))
    own_codes = held_out_events.matching_codes(
        store, event_time=event_time, user_row=identity_user_row, item_row=identity_item_row
    )
    return len(np.setdiff1d(champion_codes, own_codes))


def _newest_training_time(store: EventStore, event_time: NDArray[np.int64]) -> int:
    """Return the time of the newest training event. The events of each user are sorted by time."""
    return int(event_time[store.train_end[store.train_end > store.user_offset[:-1]] - 1].max())


def _oldest_held_out_time(store: EventStore, event_time: NDArray[np.int64]) -> int:
    """Return the time of the oldest validation or test event. The events of each user are sorted by time within each split."""
    event_ranges = ((store.train_end, store.validation_end), (store.validation_end, store.user_offset[1:]))
    return int(np.concatenate([event_time[start_U[start_U < end_U]] for start_U, end_U in event_ranges]).min())


def _has_new_events(store: EventStore, champion_store: EventStore, *, user_row: Int64Array) -> NDArray[np.bool_]:
    """Return, for each user of `store`, whether the champion's run had all events of the user in training and `store` has more.

    user_row: for each user of `champion_store` the row in `store`, -1 for none.
    """
    has_new_events_U = np.zeros(len(store.train_end), np.bool_)
    unsplit_champion_users = np.flatnonzero((champion_store.train_end == champion_store.user_offset[1:]) & (user_row >= 0))
    users = user_row[unsplit_champion_users]
    has_new_events_U[users] = np.diff(store.user_offset)[users] > np.diff(champion_store.user_offset)[unsplit_champion_users]
    return has_new_events_U


@dataclass(frozen=True)
class HeldOutEvents:
    """Distinct held-out events, encoded as integers for a binary search.

    Attributes:
        num_items: number of items of the log.
        sorted_pairs: sorted codes of the (user, item) pairs: user * num_items + item.
        sorted_times: sorted times.
        code_H: sorted codes of the events: (index in sorted_pairs) * len(sorted_times) + (index in sorted_times).
    """

    num_items: int
    sorted_pairs: NDArray[np.int64]
    sorted_times: NDArray[np.int64]
    code_H: NDArray[np.int64]

    @classmethod
    def from_store(cls, store: EventStore, start_U: Int64Array, *, event_time: NDArray[np.int64] | None) -> Self:
        """Collect the events of each user from index `start_U` on. event_time: times of all events; None: times are ignored."""
        num_items, end_U = len(store.item_count), store.user_offset[1:]
        user_E = np.repeat(np.arange(len(start_U)), end_U - start_U)
        pair_E = user_E * num_items + JaggedArray.from_slices(store.event_item, start=start_U, end=end_U).values_L
        time_E = np.zeros_like(pair_E)
        if event_time is not None:
            time_E = JaggedArray.from_slices(event_time, start=start_U, end=end_U).values_L
        sorted_pairs, pair_index = np.unique(pair_E, return_inverse=True)
        sorted_times, time_index = np.unique(time_E, return_inverse=True)
        return cls(num_items, sorted_pairs, sorted_times, np.unique(pair_index * len(sorted_times) + time_index))

    def matching_codes(
        self, store: EventStore, *, event_time: NDArray[np.int64] | None, user_row: Int64Array, item_row: Int64Array
    ) -> NDArray[np.int64]:
        """Return the codes of the held-out events that are training events of `store`.

        user_row, item_row: for each user and item of `store` the row in the held-out events' log, -1 for none.
        """
        if not len(self.code_H):
            return np.zeros(0, np.int64)
        code_chunks = [np.zeros(0, np.int64)]
        index_offset_U = store.user_offset[:-1] - store.first_example_U
        for chunk_start in range(0, store.num_train_events, EVENTS_PER_CHUNK):
            user_E = store.train_user[chunk_start : chunk_start + EVENTS_PER_CHUNK]
            index_E = np.arange(chunk_start, chunk_start + len(user_E)) + index_offset_U[user_E]
            user_row_E, item_row_E = user_row[user_E], item_row[store.event_item[index_E]]
            pair_index_E, has_pair_E = _search(user_row_E * self.num_items + item_row_E, self.sorted_pairs)
            time_index_E, has_time_E = _search(
                np.zeros_like(user_row_E) if event_time is None else event_time[index_E], self.sorted_times
            )
            code_E = pair_index_E * len(self.sorted_times) + time_index_E
            is_candidate_E = (user_row_E >= 0) & (item_row_E >= 0) & has_pair_E & has_time_E
            code_chunks.append(np.intersect1d(code_E[is_candidate_E], self.code_H))
        return np.unique(np.concatenate(code_chunks))


def _search(value_E: NDArray[np.int64], sorted_values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the index of each value in `sorted_values`, and whether `sorted_values` has the value."""
    index_E = np.searchsorted(sorted_values, value_E).clip(max=len(sorted_values) - 1)
    return index_E, sorted_values[index_E] == value_E
