"""An event store whose validation and test events are training events, compared with the store that it was made from."""

from pathlib import Path

import numpy as np

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.layout import popularity_ranks
from recsys_core.ingest.log.merged_splits import MERGED_ARRAYS, merge_splits
from tests.recsys_core.ingest.interactions_with_context import write_interactions

LOG = [([2, 1], [3], [0]), ([], [], []), ([1], [], [1, 3])]


def test_all_events_are_training_events_in_the_same_order(tmp_path: Path) -> None:
    interactions = write_interactions(tmp_path / "log", users=[4, 5, 6], items=["a", "b", "c", "d"], log=LOG)
    merged = merge_splits(interactions, tmp_path / "merged")
    store, merged_store = EventStore.open(interactions), EventStore.open(merged)
    assert merged.num_train_events == store.event_count_U.sum() > interactions.num_train_events
    assert (merged.num_validation_events, merged.num_test_events, merged.parts) == (0, 0, ())
    np.testing.assert_array_equal(merged_store.train_count_U, store.event_count_U)
    np.testing.assert_array_equal(merged_store.train_count_I, store.event_count_I())
    np.testing.assert_array_equal(merged_store.popularity_rank_I, popularity_ranks(store.event_count_I()))
    for split in ("validation", "test"):
        assert len(merged_store.users_with_targets(split)) == 0
    user_E, event_E = merged_store.training_events(np.arange(merged.num_train_events))
    assert user_E.tolist() == [0, 0, 0, 0, 2, 2, 2] and event_E.tolist() == list(range(7))
    assert merged_store.items_before(np.arange(3), "test").values_L.tolist() == [2, 1, 3, 0, 1, 1, 3]


def test_files_that_do_not_depend_on_the_split_are_the_same_files(tmp_path: Path) -> None:
    interactions = write_interactions(tmp_path / "log", users=[4, 5, 6], items=["a", "b", "c", "d"], log=LOG)
    merged = merge_splits(interactions, tmp_path / "merged")
    for name in merged.files.keys() & interactions.files.keys():
        is_same = merged.path(name).samefile(interactions.path(name))
        assert is_same == (name.removesuffix(".npy") not in MERGED_ARRAYS)
    assert merge_splits(interactions, tmp_path / "merged") == merged
