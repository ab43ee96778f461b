"""Event stores with merged splits, whose validation and test events have become training events."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.layout import popularity_ranks
from recsys_core.ingest.log.merged_splits import MERGED_ARRAYS, merge_splits
from tests.recsys_core.ingest.interaction_logs import ingest, write_log
from tests.recsys_core.ingest.interactions_with_context import write_interactions

LOG = [([2, 1], [3], [0]), ([], [], []), ([1], [], [1, 3])]
"""For each user, the rows of the training, validation and test items."""


def test_all_events_are_training_events_in_the_same_order(tmp_path: Path) -> None:
    interactions = write_interactions(tmp_path / "log", user_ids=[4, 5, 6], item_ids=["a", "b", "c", "d"], log=LOG)
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


def test_files_that_do_not_depend_on_the_split_are_hard_links(tmp_path: Path) -> None:
    interactions = write_interactions(tmp_path / "log", user_ids=[4, 5, 6], item_ids=["a", "b", "c", "d"], log=LOG)
    merged = merge_splits(interactions, tmp_path / "merged")
    for name in merged.files.keys() & interactions.files.keys():
        is_hard_link = merged.path(name).samefile(interactions.path(name))
        assert is_hard_link == (name.removesuffix(".npy") not in MERGED_ARRAYS)
    assert merge_splits(interactions, tmp_path / "merged") == merged, "a second call uses the existing stage"


def test_merged_known_negatives_leave_out_items_that_the_user_has(tmp_path: Path) -> None:
    """User 1 rejects 7, 8 and 9, and later likes 5 and 7, which are the held-out items. At the end, user 1 rejects 5."""
    log = [(1, 7, 0), (1, 8, 1), (1, 0, 2), (1, 1, 3), (1, 9, 4), (1, 2, 5), (1, 5, 6), (1, 7, 7), (1, 5, 8)]
    stars = [1, 1, 5, 5, 1, 5, 5, 5, 1]
    log += [(2, item, time) for time, item in enumerate([7, 8, 9, 5, 3, 4])] + [(3, 3, 1), (3, 4, 2), (2, 0, 2)]
    path = write_log(tmp_path / "log.parquet", log, stars=stars + [5] * 6 + [5, 5, 1])
    settings = {"split": {"kind": "leave_last_out"}, "label_column": "stars", "label_threshold": 3}
    interactions = ingest(tmp_path / "stage", path, explicit_negatives=True, **settings)
    merged = merge_splits(interactions, tmp_path / "merged")
    negatives, merged_negatives = (EventStore.open(manifest).known_negatives for manifest in (interactions, merged))
    assert negatives is not None and merged_negatives is not None
    items, users = (pq.read_table(merged.path(f"{side}.parquet"))["id"].to_pylist() for side in ("items", "users"))
    negative_items = [items[row] for row in negatives.item_L]
    assert sorted(negative_items) == [0, 7, 8, 9] and merged.num_known_negatives == interactions.num_known_negatives - 1 == 3
    assert [items[row] for row in merged_negatives.item_L] == [item for item in negative_items if item != 7]
    assert merged_negatives.event_L is not None and negatives.event_L is not None
    expected_indices = [index for index, item in zip(negatives.event_L.tolist(), negative_items, strict=True) if item != 7]
    assert merged_negatives.event_L.tolist() == expected_indices
    num_negatives_by_user = dict(zip(users, merged_negatives.num_train_negatives_U.tolist(), strict=True))
    assert num_negatives_by_user == {1: 2, 2: 1, 3: 0}
    assert merged_negatives.before(np.arange(3), "test").lengths.tolist() == merged_negatives.num_train_negatives_U.tolist()
