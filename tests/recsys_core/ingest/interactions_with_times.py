"""Interactions stages written by hand from events with times, in the format of the ingest."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.manifests import InteractionsManifest, SourceFile, fingerprint_of
from tests.recsys_core.manifests.committed_stage import commit_stage

Parts = tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]], Sequence[tuple[int, int]]]
"""A user's training, validation and test events: (item row, time in microseconds)."""


def interactions_of(
    folder: Path,
    users: Sequence[Parts],
    *,
    item_ids: Sequence[int] | Sequence[str],
    user_ids: Sequence[int] | Sequence[str] | None = None,
    timed: bool = True,
    ordered: bool = True,
    vector_row: Sequence[int] | None = None,
    **facts: Any,
) -> InteractionsManifest:
    """Write an interactions stage. facts: replacements of manifest fields."""
    length_U3 = np.array([[len(part) for part in user] for user in users], np.int64).reshape(-1, 3)
    offset = np.concatenate([[0], np.cumsum(length_U3.sum(axis=1))])
    events = [event for user in users for part in user for event in part]
    trained = [item for user in users for item, _ in user[0]]
    ids: Mapping[str, Any] = {"items": item_ids, "users": range(len(users)) if user_ids is None else user_ids}
    types = {name: "string" if isinstance(next(iter(values), 0), str) else "int64" for name, values in ids.items()}

    def build(output_folder: Path) -> dict[str, Any]:
        np.save(output_folder / "user_offset.npy", offset)
        np.save(output_folder / "train_end.npy", offset[:-1] + length_U3[:, 0])
        np.save(output_folder / "validation_end.npy", offset[:-1] + length_U3[:, :2].sum(axis=1))
        np.save(output_folder / "event_item.npy", np.array([item for item, _ in events], np.int32))
        if timed:
            np.save(output_folder / "event_time.npy", np.array([time for _, time in events], np.int64))
        np.save(output_folder / "train_user.npy", np.repeat(np.arange(len(users), dtype=np.int32), length_U3[:, 0]))
        np.save(output_folder / "item_count.npy", np.bincount(np.array(trained, np.int64), minlength=len(item_ids)))
        np.save(output_folder / "vector_row.npy", np.array(vector_row or [-1] * len(item_ids), np.int64))
        for name, values in ids.items():
            pq.write_table(
                pa.table({"id": pa.array(values, pa.string() if types[name] == "string" else pa.int64())}),
                output_folder / f"{name}.parquet",
            )
        train, validation, test = length_U3.sum(axis=0).tolist()
        source = SourceFile(path="log.parquet", size_bytes=1, num_rows=len(events), modified_ns=1, footer_sha256="")
        return {
            "num_users": len(users), "num_items": len(item_ids), "num_train_events": train, "num_validation_events": validation,
            "num_test_events": test, "is_ordered": ordered, "num_items_with_vector": 0, "num_items_vector_only": 0,
            "user_id_type": types["users"], "item_id_type": types["items"], "lineage": str(output_folder), "run_number": 1,
            "rebuild_reason": "the first run", "id_columns": ("user_id", "item_id"),
            "num_idle_users": 0, "num_idle_items": 0, "parts": (), "num_rows_read": len(events), "num_files_read": 1,
            "columns": {}, "num_removed_events_by_filter": {}, "num_bad_rows_by_reason": {}, "sources": (source,),
        } | facts  # fmt: skip

    fingerprint = fingerprint_of("by hand", str(users), item_ids, facts)
    return commit_stage(folder, InteractionsManifest, fingerprint=fingerprint, build=build)
