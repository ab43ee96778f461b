"""Interactions stages written from lists of items, with context columns and weights of the events."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.manifests import InteractionsManifest, commit_folder

Id = int | str
UserEvents = tuple[list[int], list[int], list[int]]
"""Item rows of one user's training, validation and test events."""


def write_interactions(
    folder: Path,
    *,
    user_ids: Sequence[Id],
    item_ids: Sequence[Id],
    log: Sequence[UserEvents],
    context: dict[str, Any] | None = None,
    event_weights: Sequence[float] | None = None,
    lineage: str = "first",
) -> InteractionsManifest:
    """Write an interactions stage.

    Args:
        user_ids: ids of the users by row.
        item_ids: ids of the items by row.
        log: the item rows of each user, by split.
        context: columns with one entry per event, in the order of the store; None if the log has no context.
        event_weights: weight of each event, in the order of the store; None if the log has no weights.
        lineage: the lineage in the manifest. Another lineage changes the fingerprint.
    """
    unfinished_folder = folder.with_name(folder.name + ".building")
    unfinished_folder.mkdir(parents=True)
    num_events_U3 = np.array([[len(split_items) for split_items in user_splits] for user_splits in log], np.int64).reshape(
        -1, 3
    )
    offset = np.concatenate([[0], num_events_U3.sum(axis=1).cumsum()])
    event_items = np.array([item for user_splits in log for split_items in user_splits for item in split_items], np.int32)
    all_train_items = np.array([item for train_items, _, _ in log for item in train_items], np.int64)
    train_count_I = np.bincount(all_train_items, minlength=len(item_ids))
    arrays = {
        "user_offset": offset,
        "train_end": offset[:-1] + num_events_U3[:, 0],
        "validation_end": offset[:-1] + num_events_U3[:, 0] + num_events_U3[:, 1],
        "event_item": event_items,
        "train_user": np.repeat(np.arange(len(log), dtype=np.int32), num_events_U3[:, 0]),
        "item_count": train_count_I,
        "vector_row": np.full(len(item_ids), -1),
    }
    if event_weights is not None:
        arrays["event_weight"] = np.array(event_weights, np.float32)
    for name, array in arrays.items():
        np.save(unfinished_folder / f"{name}.npy", array)
    for name, ids, counts in (("users", user_ids, num_events_U3[:, 0]), ("items", item_ids, train_count_I)):
        pq.write_table(pa.table({"id": list(ids), "train_count": counts}), unfinished_folder / f"{name}.parquet")
    if context is not None:
        pq.write_table(pa.table(context), unfinished_folder / "context.parquet", row_group_size=7)
    num_train_events, num_validation_events, num_test_events = (int(count) for count in num_events_U3.sum(axis=0))
    return commit_folder(
        unfinished_folder, folder, InteractionsManifest,
        fingerprint=f"by hand, {lineage}", seconds=0.0, num_users=len(user_ids), num_items=len(item_ids),
        num_train_events=num_train_events, num_validation_events=num_validation_events, num_test_events=num_test_events,
        is_ordered=True, num_items_with_vector=0, num_items_vector_only=0,
        user_id_type="string" if isinstance(user_ids[0], str) else "int64",
        item_id_type="string" if isinstance(item_ids[0], str) else "int64",
        lineage=lineage, run_number=1, rebuild_reason="by hand", id_columns=("user_id", "item_id"),
        num_rows_read=len(event_items), num_files_read=1,
        columns={}, num_removed_events_by_filter={}, num_bad_rows_by_reason={}, sources=(), parts=(),
        num_idle_users=0, num_idle_items=0,
    )  # fmt: skip
