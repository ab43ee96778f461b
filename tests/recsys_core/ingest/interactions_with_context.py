"""Interactions stages written by hand, with context columns and weights of the events."""

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
    users: Sequence[Id],
    items: Sequence[Id],
    log: Sequence[UserEvents],
    context: dict[str, Any] | None = None,
    weight: Sequence[float] | None = None,
    lineage: str = "first",
) -> InteractionsManifest:
    """Write an interactions stage.

    Args:
        users: user ids by row.
        items: item ids by row.
        log: events of each user.
        context: columns with one entry per event in the order of the store.
        weight: weight of each event in the order of the store.
    """
    staging = folder.with_name(folder.name + ".building")
    staging.mkdir(parents=True)
    lengths = np.array([[len(part) for part in user] for user in log], np.int64).reshape(-1, 3)
    offset = np.concatenate([[0], lengths.sum(axis=1).cumsum()])
    item = np.array([row for user in log for part in user for row in part], np.int32)
    trained = np.bincount([row for train, _, _ in log for row in train], minlength=len(items)).astype(np.int64)
    arrays = {
        "user_offset": offset,
        "train_end": offset[:-1] + lengths[:, 0],
        "validation_end": offset[:-1] + lengths[:, 0] + lengths[:, 1],
        "event_item": item,
        "train_user": np.repeat(np.arange(len(log), dtype=np.int32), lengths[:, 0]),
        "item_count": trained,
        "vector_row": np.full(len(items), -1),
    }
    if weight is not None:
        arrays["event_weight"] = np.array(weight, np.float32)
    for name, array in arrays.items():
        np.save(staging / f"{name}.npy", array)
    for name, ids, counts in (("users", users, lengths[:, 0]), ("items", items, trained)):
        pq.write_table(pa.table({"id": list(ids), "train_count": counts}), staging / f"{name}.parquet")
    if context is not None:
        pq.write_table(pa.table(context), staging / "context.parquet", row_group_size=7)
    train, validation, test = (int(count) for count in lengths.sum(axis=0))
    return commit_folder(
        staging, folder, InteractionsManifest,
        fingerprint=f"by hand, {lineage}", seconds=0.0, num_users=len(users), num_items=len(items),
        num_train_events=train, num_validation_events=validation, num_test_events=test, is_ordered=True,
        num_items_with_vector=0, num_items_vector_only=0,
        user_id_type="string" if isinstance(users[0], str) else "int64",
        item_id_type="string" if isinstance(items[0], str) else "int64",
        lineage=lineage, run_number=1, rebuild_reason="by hand", id_columns=("user_id", "item_id"),
        num_rows_read=len(item), num_files_read=1,
        columns={}, num_removed_events_by_filter={}, num_bad_rows_by_reason={}, sources=(), parts=(),
        num_idle_users=0, num_idle_items=0,
    )  # fmt: skip
