"""Leaked events: held-out events of this run on which the champion was trained.

Events leak if the split moves back: the log ends earlier, more days are held out, or the kind of split has changed.

Shapes: U users, E training events of a chunk, H distinct held-out events.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.jagged import Int64Array
from recsys_core.dataset.layout import EVENT_ARRAYS, array_files
from recsys_core.manifests import InteractionsManifest
from recsys_core.training.warm.starting_model import match_rows_by_id, require_unchanged


def count_leaked_events(interactions: InteractionsManifest, *, champion: InteractionsManifest) -> int:
    """Count the validation and test events of this run that were training events of the champion.

    Two events are the same if they have the same user and the same item. If both logs have times, the times must be equal too.
    Two kinds of events are not counted:
    - events that also occur among the training events of this run;
    - validation events of users who had too few events for the split of the champion's run and have more events now. The
      champion was trained on all events that these users had. With `leave_last_out`, the validation event of a user who has
      just reached `min_events` leaks in this way.

    If all training events of the champion are older than all held-out events, the result is 0 without a comparison. With a
    split by time that moves forward, this is always the case.

    Raises StageError if a file of the champion has changed.
    """
    store, champion_store = EventStore.open(interactions), EventStore.open(champion)
    has_times = store.has_times and champion_store.has_times
    for array_name in EVENT_ARRAYS:
        if has_times or array_name != "event_time":
            for file_name in array_files(array_name, num_shards=champion.num_shards):
                require_unchanged(champion, file_name)
    oldest_held_out_time = min(store.first_time("validation"), store.first_time("test"))
    if has_times and champion_store.newest_training_time() < oldest_held_out_time:
        return 0
    user_row, item_row = (
        match_rows_by_id(table_name, from_stage=champion, to_stage=interactions) for table_name in ("user", "item")
    )
    has_new_events_U = _has_new_events(store, champion_store, user_row=user_row)
    held_out_events = HeldOutEvents.from_store(store, skip_validation_U=has_new_events_U, has_times=has_times)
    champion_codes = held_out_events.matching_codes(champion_store, user_row=user_row, item_row=item_row)
    if not len(champion_codes):
        return 0
    train_codes = held_out_events.matching_codes(
        store, user_row=np.arange(store.num_users), item_row=np.arange(store.num_items)
    )
    return len(np.setdiff1d(champion_codes, train_codes))


def _has_new_events(store: EventStore, champion_store: EventStore, *, user_row: Int64Array) -> NDArray[np.bool_]:
    """Return bool [U]: whether a user of `store` had only training events in the champion's run and has more events now.

    user_row: for each user of `champion_store`, the row in `store`; -1 for none.
    """
    has_new_events_U = np.zeros(store.num_users, np.bool_)
    champion_event_count_U = champion_store.event_count_U
    unsplit_champion_users = np.flatnonzero((champion_store.train_count_U == champion_event_count_U) & (user_row >= 0))
    unsplit_users = user_row[unsplit_champion_users]
    has_new_events_U[unsplit_users] = store.event_count_U[unsplit_users] > champion_event_count_U[unsplit_champion_users]
    return has_new_events_U


@dataclass(frozen=True)
class HeldOutEvents:
    """Distinct held-out events, encoded as integers for a binary search.

    Attributes:
        num_items: number of items of the log.
        has_times: whether events with different times are different events.
        sorted_pairs: sorted codes of the (user, item) pairs: user * num_items + item.
        sorted_times: sorted times.
        code_H: sorted codes of the events: (index in sorted_pairs) * len(sorted_times) + (index in sorted_times).
    """

    num_items: int
    has_times: bool
    sorted_pairs: NDArray[np.int64]
    sorted_times: NDArray[np.int64]
    code_H: NDArray[np.int64]

    @classmethod
    def from_store(cls, store: EventStore, *, skip_validation_U: NDArray[np.bool_], has_times: bool) -> Self:
        """Collect the validation and test events. skip_validation_U: users whose validation events are left out."""
        user_E, event_E = store.held_out_events(skip_validation_U=skip_validation_U)
        pair_E = user_E * store.num_items + store.items_at(event_E)
        time_E = store.times_at(event_E) if has_times else np.zeros_like(event_E)
        sorted_pairs, pair_index_E = np.unique(pair_E, return_inverse=True)
        sorted_times, time_index_E = np.unique(time_E, return_inverse=True)
        return cls(
            store.num_items, has_times, sorted_pairs, sorted_times, np.unique(pair_index_E * len(sorted_times) + time_index_E)
        )

    def matching_codes(self, store: EventStore, *, user_row: Int64Array, item_row: Int64Array) -> NDArray[np.int64]:
        """Return the codes of the held-out events that are training events of `store`.

        user_row, item_row: for each user and item of `store`, the row in the log of the held-out events; -1 for none.
        """
        if not len(self.code_H):
            return np.zeros(0, np.int64)
        code_chunks = [np.zeros(0, np.int64)]
        for user_E, event_E in store.train_chunks():
            user_row_E, item_row_E = user_row[user_E], item_row[store.items_at(event_E)]
            pair_index_E, has_pair_E = _find_in_sorted(user_row_E * self.num_items + item_row_E, self.sorted_pairs)
            time_E = store.times_at(event_E) if self.has_times else np.zeros_like(event_E)
            time_index_E, has_time_E = _find_in_sorted(time_E, self.sorted_times)
            code_E = pair_index_E * len(self.sorted_times) + time_index_E
            is_candidate_E = (user_row_E >= 0) & (item_row_E >= 0) & has_pair_E & has_time_E
            code_chunks.append(np.intersect1d(code_E[is_candidate_E], self.code_H))
        return np.unique(np.concatenate(code_chunks))


def _find_in_sorted(
    value_E: NDArray[np.int64], sorted_values: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the index of each value in `sorted_values`, and whether `sorted_values` has the value."""
    index_E = np.searchsorted(sorted_values, value_E).clip(max=len(sorted_values) - 1)
    return index_E, sorted_values[index_E] == value_E
