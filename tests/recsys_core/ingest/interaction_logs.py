"""Logs as lists of events: the ingest of a log, its splits in plain Python, and the events in the stored stage."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.ingest import ingest_interactions
from recsys_core.manifests import EmbeddingsManifest, InteractionsManifest
from recsys_core.units import DAY_US
from tests.recsys_core.ingest.parquet_files import write_parquet

Id = int | str
Event = tuple[Id, Id, Any]
"""User, item, time."""
SplitEvents = tuple[list[Event], list[Event], list[Event]]
"""Training, validation and test events."""
engine_settings: dict[str, Any] = {"kind": "duckdb"}
"""The setting `engine` of `ingest`. The tests of the log ingest replace it in their fixture `engine`."""


def write_log(path: Path, events: Sequence[Event], **columns: Any) -> str:
    """Write a log with the columns user_id, item_id, t and `columns`. Return the path as a string."""
    users, items, times = zip(*events, strict=True)
    return write_parquet(path, user_id=list(users), item_id=list(items), t=list(times), **columns)


def ingest(
    folder: Path,
    *paths: str,
    split: dict[str, Any],
    embeddings: EmbeddingsManifest | None = None,
    previous: InteractionsManifest | None = None,
    **settings: Any,
) -> InteractionsManifest:
    """Ingest the log files.

    Args:
        split, settings: interactions settings. Without `order_column`, the timestamps are in column t, in microseconds.
        embeddings: pretrained vectors of the items.
        previous: interactions of the previous run; None in the first run.
    """
    if "order_column" not in settings:
        settings = {"timestamp_column": "t", "timestamp_unit": "us"} | settings
    config = InteractionsConfig(paths=paths, split=split, **({"threads": 2, "engine": engine_settings} | settings))
    return ingest_interactions(config, embeddings=embeddings, folder=folder, previous=previous)


def split_by_time(events: Sequence[Event], *, test_days: float, validation_days: float) -> SplitEvents:
    """Return the splits. The test split is the last `test_days`, and the validation split is the `validation_days` before."""
    splits: SplitEvents = ([], [], [])
    newest_time = max(time for _, _, time in events)
    for user, item, time in events:
        age_us = newest_time - time
        split_index = 2 if age_us < test_days * DAY_US else 1 if age_us < (test_days + validation_days) * DAY_US else 0
        splits[split_index].append((user, item, time))
    return splits


def leave_last_out(events: Sequence[Event], *, min_events: int) -> SplitEvents:
    """Return the splits. The last event of each user is a test event, and the event before it is a validation event.

    A user with fewer than `min_events` events has training events only. Events at the same time are ordered by item row.
    """
    splits: SplitEvents = ([], [], [])
    items = [item for _, item, _ in events]
    items_by_row = sorted(set(items), key=lambda item: (-items.count(item), item))
    row_by_item = {item: row for row, item in enumerate(items_by_row)}
    for user in {user for user, _, _ in events}:
        user_events = [event for event in events if event[0] == user]
        user_events.sort(key=lambda event: (event[2], row_by_item[event[1]]))
        num_held_out = 0 if len(user_events) < min_events else 2
        splits[0].extend(user_events[: len(user_events) - num_held_out])
        for split_index, event in zip((1, 2), user_events[len(user_events) - num_held_out :], strict=False):
            splits[split_index].append(event)
    return splits


@dataclass
class Store:
    """The content of an interactions stage, with ids instead of rows."""

    users: list[Id]
    """Ids by row."""
    items: list[Id]
    """Ids by row."""
    user_train_counts: list[int]
    """Number of training events of each user."""
    item_train_counts: list[int]
    """Number of training events of each item."""
    splits: SplitEvents = field(default_factory=lambda: ([], [], []))


def read_store(manifest: InteractionsManifest) -> Store:
    """Return the content of an interactions stage. Its events are in the order of the store."""
    arrays = {name[:-4]: np.load(manifest.path(name)) for name in manifest.files if name.endswith(".npy")}
    user_columns, item_columns = (pq.read_table(manifest.path(f"{side}.parquet")).to_pydict() for side in ("users", "items"))
    store = Store(user_columns["id"], item_columns["id"], user_columns["train_count"], item_columns["train_count"])
    time_E = arrays.get("event_time", np.zeros(len(arrays["event_item"]), np.int64)).tolist()
    for row, user in enumerate(store.users):
        start, stop = arrays["user_offset"][row : row + 2]
        bounds = (start, arrays["train_end"][row], arrays["validation_end"][row], stop)
        for split_index, split_events in enumerate(store.splits):
            split_events.extend(
                (user, store.items[arrays["event_item"][index]], time_E[index])
                for index in range(bounds[split_index], bounds[split_index + 1])
            )
    assert arrays["user_offset"][0] == 0 and arrays["user_offset"][-1] == len(arrays["event_item"])
    assert [len(split_events) for split_events in store.splits] == [
        manifest.num_train_events,
        manifest.num_validation_events,
        manifest.num_test_events,
    ]
    assert (manifest.num_users, manifest.num_items) == (len(store.users), len(store.items))
    assert [store.users[row] for row in arrays["train_user"]] == [user for user, _, _ in store.splits[0]]
    assert arrays["item_count"].tolist() == store.item_train_counts
    return store


def assert_stored_events(manifest: InteractionsManifest, splits: SplitEvents) -> None:
    """Assert that the stage has exactly the events of `splits`.

    The events of a user must be ordered by time, and both vocabularies must be sorted by falling count.
    """
    store = read_store(manifest)
    for stored_events, expected_events in zip(store.splits, splits, strict=True):
        assert sorted(stored_events) == sorted(expected_events)
        for user in store.users:
            times = [time for event_user, _, time in stored_events if event_user == user]
            assert times == sorted(times)
    for id_index, ids, counts in ((0, store.users, store.user_train_counts), (1, store.items, store.item_train_counts)):
        train_ids = [event[id_index] for event in splits[0]]
        event_ids = [event[id_index] for split_events in splits for event in split_events]
        assert ids == sorted(set(event_ids), key=lambda id_: (-event_ids.count(id_), id_))
        assert counts == [train_ids.count(id_) for id_ in ids]
