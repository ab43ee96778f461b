"""Logs of events in plain Python, their splits computed in plain Python, and the stored events read back."""

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
engine: dict[str, Any] = {"kind": "duckdb"}
"""Engine of `ingest`; the tests of the log ingest set each engine in turn."""


def write_log(path: Path, events: Sequence[Event], **columns: Any) -> str:
    user, item, time = zip(*events, strict=True)
    return write_parquet(path, user_id=list(user), item_id=list(item), t=list(time), **columns)


def ingest(
    folder: Path,
    *paths: str,
    split: dict[str, Any],
    embeddings: EmbeddingsManifest | None = None,
    previous: InteractionsManifest | None = None,
    **settings: Any,
) -> InteractionsManifest:
    """Ingest the log files. By default the times are in column t, in microseconds; `settings` override this."""
    if "order_column" not in settings:
        settings = {"timestamp_column": "t", "timestamp_unit": "us"} | settings
    config = InteractionsConfig(paths=paths, split=split, **({"threads": 2, "engine": engine} | settings))
    return ingest_interactions(config, embeddings=embeddings, folder=folder, previous=previous)


def split_by_time(events: Sequence[Event], *, test_days: float, validation_days: float) -> SplitEvents:
    splits: SplitEvents = ([], [], [])
    newest = max(time for _, _, time in events)
    for event in events:
        age = newest - event[2]
        splits[2 if age < test_days * DAY_US else 1 if age < (test_days + validation_days) * DAY_US else 0].append(event)
    return splits


def leave_last_out(events: Sequence[Event], *, min_events: int) -> SplitEvents:
    splits: SplitEvents = ([], [], [])
    items = [item for _, item, _ in events]
    row = {item: row for row, item in enumerate(sorted(set(items), key=lambda item: (-items.count(item), item)))}
    for user in {user for user, _, _ in events}:
        user_events = sorted((event for event in events if event[0] == user), key=lambda event: (event[2], row[event[1]]))
        held_out = 0 if len(user_events) < min_events else 2
        splits[0].extend(user_events[: len(user_events) - held_out])
        for split, event in zip((1, 2), user_events[len(user_events) - held_out :], strict=False):
            splits[split].append(event)
    return splits


@dataclass
class Store:
    """The content of an interactions stage."""

    users: list[Id]
    items: list[Id]
    user_counts: list[int]
    item_counts: list[int]
    splits: SplitEvents = field(default_factory=lambda: ([], [], []))


def read_store(manifest: InteractionsManifest) -> Store:
    """Read an interactions stage and return its events with their original ids, in the order of the store."""
    arrays = {name[:-4]: np.load(manifest.path(name)) for name in manifest.files if name.endswith(".npy")}
    users, items = (pq.read_table(manifest.path(f"{side}.parquet")).to_pydict() for side in ("users", "items"))
    store = Store(users["id"], items["id"], users["train_count"], items["train_count"])
    time = arrays.get("event_time", np.zeros(len(arrays["event_item"]), np.int64)).tolist()
    for row, user in enumerate(store.users):
        start, stop = arrays["user_offset"][row : row + 2]
        bounds = (start, arrays["train_end"][row], arrays["validation_end"][row], stop)
        for code, split in enumerate(store.splits):
            split.extend(
                (user, store.items[arrays["event_item"][at]], time[at]) for at in range(bounds[code], bounds[code + 1])
            )
    assert arrays["user_offset"][0] == 0 and arrays["user_offset"][-1] == len(arrays["event_item"])
    assert [len(split) for split in store.splits] == [
        manifest.num_train_events,
        manifest.num_validation_events,
        manifest.num_test_events,
    ]
    assert (manifest.num_users, manifest.num_items) == (len(store.users), len(store.items))
    assert [store.users[row] for row in arrays["train_user"]] == [user for user, _, _ in store.splits[0]]
    assert arrays["item_count"].tolist() == store.item_counts
    return store


def check_stored_events(manifest: InteractionsManifest, splits: SplitEvents) -> None:
    """Assert that the stage holds the events of `parts` once each.

    The events of a user must be in order of time, and both vocabularies sorted by descending count.
    """
    store = read_store(manifest)
    for stored, expected in zip(store.splits, splits, strict=True):
        assert sorted(stored) == sorted(expected)
        for user in store.users:
            times = [time for owner, _, time in stored if owner == user]
            assert times == sorted(times)
    for side, ids, counts in ((0, store.users, store.user_counts), (1, store.items, store.item_counts)):
        train_ids, ids_of_events = ([event[side] for split in chosen for event in split] for chosen in (splits[:1], splits))
        assert ids == sorted(set(ids_of_events), key=lambda id_: (-ids_of_events.count(id_), id_))
        assert counts == [train_ids.count(id_) for id_ in ids]
