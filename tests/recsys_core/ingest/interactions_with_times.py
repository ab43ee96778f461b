"""Interactions stages in the format of the ingest, written from lists of events with times."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.manifests import InteractionsManifest, SourceFile, fingerprint_of
from tests.recsys_core.manifests.committed_stage import commit_stage

UserEvents = tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]], Sequence[tuple[int, int]]]
"""A user's training, validation and test events, each as (item row, time in microseconds)."""


def interactions_of(
    folder: Path,
    events_by_user: Sequence[UserEvents],
    *,
    item_ids: Sequence[int] | Sequence[str],
    user_ids: Sequence[int] | Sequence[str] | None = None,
    has_times: bool = True,
    is_ordered: bool = True,
    vector_row: Sequence[int] | None = None,
    **manifest_fields: Any,
) -> InteractionsManifest:
    """Write an interactions stage.

    Args:
        events_by_user: the events of each user, in the order of the user rows.
        item_ids: ids of the items by row.
        user_ids: ids of the users by row; by default 0, 1, ...
        has_times: whether the stage has timestamps.
        is_ordered: whether the events of the log have an order.
        vector_row: row of each item's pretrained vector; by default no item has one.
        manifest_fields: manifest fields that replace the values computed here.
    """
    num_events_U3 = np.array(
        [[len(split_events) for split_events in user_splits] for user_splits in events_by_user], np.int64
    ).reshape(-1, 3)
    offset = np.concatenate([[0], np.cumsum(num_events_U3.sum(axis=1))])
    events = [event for user_splits in events_by_user for split_events in user_splits for event in split_events]
    train_items = [item for train_events, _, _ in events_by_user for item, _ in train_events]
    ids_by_side: Mapping[str, Any] = {"items": item_ids, "users": range(len(events_by_user)) if user_ids is None else user_ids}
    id_types = {side: "string" if isinstance(next(iter(ids), 0), str) else "int64" for side, ids in ids_by_side.items()}

    def build(output_folder: Path) -> dict[str, Any]:
        np.save(output_folder / "user_offset.npy", offset)
        np.save(output_folder / "train_end.npy", offset[:-1] + num_events_U3[:, 0])
        np.save(output_folder / "validation_end.npy", offset[:-1] + num_events_U3[:, :2].sum(axis=1))
        np.save(output_folder / "event_item.npy", np.array([item for item, _ in events], np.int32))
        if has_times:
            np.save(output_folder / "event_time.npy", np.array([time for _, time in events], np.int64))
        np.save(
            output_folder / "train_user.npy", np.repeat(np.arange(len(events_by_user), dtype=np.int32), num_events_U3[:, 0])
        )
        np.save(output_folder / "item_count.npy", np.bincount(np.array(train_items, np.int64), minlength=len(item_ids)))
        np.save(output_folder / "vector_row.npy", np.array(vector_row or [-1] * len(item_ids), np.int64))
        for side, ids in ids_by_side.items():
            pq.write_table(
                pa.table({"id": pa.array(ids, pa.string() if id_types[side] == "string" else pa.int64())}),
                output_folder / f"{side}.parquet",
            )
        num_train_events, num_validation_events, num_test_events = num_events_U3.sum(axis=0).tolist()
        log_file = SourceFile(path="log.parquet", size_bytes=1, num_rows=len(events), modified_ns=1, footer_sha256="")
        return {
            "num_users": len(events_by_user), "num_items": len(item_ids), "is_ordered": is_ordered,
            "num_train_events": num_train_events, "num_validation_events": num_validation_events,
            "num_test_events": num_test_events, "parts": (),
            "num_items_with_vector": 0, "num_items_vector_only": 0,
            "user_id_type": id_types["users"], "item_id_type": id_types["items"], "id_columns": ("user_id", "item_id"),
            "lineage": str(output_folder), "run_number": 1, "rebuild_reason": "the first run",
            "num_idle_users": 0, "num_idle_items": 0, "num_rows_read": len(events), "num_files_read": 1,
            "columns": {}, "num_removed_events_by_filter": {}, "num_bad_rows_by_reason": {}, "sources": (log_file,),
        } | manifest_fields  # fmt: skip

    fingerprint = fingerprint_of("by hand", str(events_by_user), item_ids, manifest_fields)
    return commit_stage(folder, InteractionsManifest, inputs=[fingerprint], build=build)
