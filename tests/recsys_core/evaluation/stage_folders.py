"""Small interactions, embeddings, features and export stages written by hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.manifests import (
    EmbeddingsManifest,
    ExportManifest,
    FeaturesManifest,
    IngestedFeature,
    InteractionsManifest,
    VectorTable,
)
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.training.export.append_block import append_block
from tests.recsys_core.manifests.committed_stage import commit_stage

Events = Sequence[Sequence[int]]
"""Item rows per user."""


def interactions_stage(
    folder: Path,
    *,
    train: Events,
    validation: Events,
    test: Events,
    items: int,
    item_ids: Sequence[int] | Sequence[str] | None = None,
    user_ids: Sequence[int] | Sequence[str] | None = None,
    vector_row: Sequence[int] | None = None,
    arrays: Mapping[str, np.ndarray] = MappingProxyType({}),
    test_days: float | None = None,
    context: pa.Table | None = None,
) -> InteractionsManifest:
    """Write the stage.

    Args:
        arrays: further arrays of the store, such as event_time.
        context: context of all events, in the order of the store.
    """
    parts = [[len(rows) for rows in split] for split in (train, validation, test)]
    offset = np.concatenate([[0], np.cumsum(np.sum(parts, axis=0))]).astype(np.int64)
    events = np.array([row for user in zip(train, validation, test, strict=True) for part in user for row in part], np.int32)
    count = np.bincount([row for rows in train for row in rows], minlength=items)
    item_column = pa.array(range(items) if item_ids is None else item_ids)
    user_column = pa.array(range(len(train)) if user_ids is None else user_ids)

    def build(out: Path) -> dict[str, Any]:
        np.save(out / "user_offset.npy", offset)
        np.save(out / "train_end.npy", offset[:-1] + parts[0])
        np.save(out / "validation_end.npy", offset[:-1] + parts[0] + parts[1])
        np.save(out / "event_item.npy", events)
        for name, array in arrays.items():
            np.save(out / f"{name}.npy", array)
        if context is not None:
            pq.write_table(context, out / "context.parquet")
        np.save(out / "train_user.npy", np.repeat(np.arange(len(train), dtype=np.int32), parts[0]))
        np.save(out / "item_count.npy", count.astype(np.int64))
        np.save(out / "vector_row.npy", np.array([-1] * items if vector_row is None else vector_row, np.int64))
        pq.write_table(pa.table({"id": item_column, "train_count": count}), out / "items.parquet")
        pq.write_table(pa.table({"id": user_column, "train_count": parts[0]}), out / "users.parquet")
        return {
            "num_users": len(train),
            "num_items": items,
            "test_days": test_days,
            "num_train_events": sum(parts[0]),
            "num_validation_events": sum(parts[1]),
            "num_test_events": sum(parts[2]),
            "is_ordered": True,
            "num_items_with_vector": 0,
            "num_items_vector_only": 0,
            "user_id_type": "string" if pa.types.is_string(user_column.type) else "int64",
            "item_id_type": "string" if pa.types.is_string(item_column.type) else "int64",
            "sources": (),
            "lineage": "interactions",
            "run_number": 1,
            "rebuild_reason": "there is no previous run",
            **dict.fromkeys(("num_idle_users", "num_idle_items", "num_rows_read", "num_files_read"), 0),
            "id_columns": ("user_id", "item_id"),
            **{name: {} for name in ("columns", "num_removed_events_by_filter", "num_bad_rows_by_reason")},
            "parts": (),
        }

    return commit_stage(folder, InteractionsManifest, fingerprint="interactions", build=build)


def embeddings_stage(folder: Path, vectors: np.ndarray) -> EmbeddingsManifest:
    def build(out: Path) -> dict[str, Any]:
        np.save(out / "item.vectors.npy", vectors.astype(np.float32))
        pq.write_table(pa.table({"id": np.arange(len(vectors))}), out / "item.ids.parquet")
        item = VectorTable(num_rows=len(vectors), dim=vectors.shape[1], id_type="int64")
        return {"tables": {"item": item}, "sources": ()}

    return commit_stage(folder, EmbeddingsManifest, fingerprint="embeddings", build=build)


def features_stage(
    folder: Path,
    store: FeatureStore,
    *,
    ingested_by_feature: Mapping[str, IngestedFeature],
    table_by_file_name: Mapping[str, pa.Table] | None = None,
) -> FeaturesManifest:
    """Write the features of `store`. table_by_file_name: further parquet files, for example vocabularies."""

    def build(out: Path) -> dict[str, Any]:
        for key, feature in store.feature_by_key.items():
            for name, array in (("row", feature.table_rows), ("offset", feature.offset), ("weight", feature.weights)):
                if array is not None:
                    np.save(out / f"{key}.{name}.npy", array)
        for file_name, table in (table_by_file_name or {}).items():
            pq.write_table(table, out / file_name)
        return {"lineage": "interactions", "features": dict(ingested_by_feature), "tables": {}, "sources": ()}

    return commit_stage(folder, FeaturesManifest, fingerprint="features", build=build)


def export_stage(
    folder: Path,
    *,
    item_vectors: np.ndarray,
    queries: Mapping[str, tuple[Sequence[int], np.ndarray]],
    spec: ModelSpec | None = None,
    tables: Mapping[str, np.ndarray] | None = None,
    history_items: np.ndarray | None = None,
    dense: Mapping[str, torch.Tensor] | None = None,
    block_store: EventStore | None = None,
) -> ExportManifest:
    """Write an export.

    Args:
        queries: split -> (user rows, vectors).
        history_items: representation of each item in histories; None for the item vectors.
        spec: None for a model whose only feature is the history.
        block_store: events of a model with a spectral block, which is appended to the vectors.
    """
    users = 1 + max((user for split_users, _ in queries.values() for user in split_users), default=0)
    model = spec or ModelSpec.sized(TwoTowerConfig(), num_users=users, num_items=len(item_vectors))

    def build(out: Path) -> dict[str, Any]:
        np.save(out / "item_vectors.npy", item_vectors.astype(np.float32))
        np.save(out / "history_items.npy", (item_vectors if history_items is None else history_items).astype(np.float32))
        for split, (users, vectors) in queries.items():
            np.save(out / f"query_users_{split}.npy", np.array(users, np.int64))
            np.save(out / f"query_vectors_{split}.npy", np.asarray(vectors, np.float32))
        for name, table in (tables or {}).items():
            np.save(out / f"table_{name}.npy", table)
        (out / "model.json").write_text(model.model_dump_json())
        if spec is not None:
            save_file(dict(dense or {}), out / "dense.safetensors")
        if block_store is not None:
            append_block(model, store=block_store, validation=None, folder=out)
        return {
            "num_items": len(item_vectors),
            "dim": item_vectors.shape[1] if block_store is None else model.config.output_dim,
            "similarity": "dot" if spec is None else spec.config.similarity,
            "num_queries": {split: len(users) for split, (users, _) in queries.items()},
        }

    return commit_stage(folder, ExportManifest, fingerprint="export", build=build)
