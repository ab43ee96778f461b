"""Small interactions, embeddings, features and export stages, written by hand."""

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
"""Item rows of the events of each user."""


def write_interactions_stage(
    folder: Path,
    *,
    train: Events,
    validation: Events,
    test: Events,
    num_items: int,
    item_ids: Sequence[int] | Sequence[str] | None = None,
    user_ids: Sequence[int] | Sequence[str] | None = None,
    vector_row: Sequence[int] | None = None,
    arrays: Mapping[str, np.ndarray] = MappingProxyType({}),
    test_days: float | None = None,
    context: pa.Table | None = None,
) -> InteractionsManifest:
    """Write an interactions stage.

    Args:
        item_ids, user_ids: id of each row; None: the id is the row number.
        vector_row: row of each item's pretrained vector, -1 for an item without a vector; None if no item has a vector.
        arrays: further arrays of the store, such as event_time.
        context: columns that describe the event, such as its device. One row per event, in the order of event_item.npy.
    """
    num_train_U, num_validation_U, num_test_U = ([len(rows) for rows in split] for split in (train, validation, test))
    offset = np.concatenate([[0], np.cumsum(np.sum([num_train_U, num_validation_U, num_test_U], axis=0))]).astype(np.int64)
    splits_of_users = zip(train, validation, test, strict=True)
    event_item = np.array([row for splits in splits_of_users for split in splits for row in split], np.int32)
    count_I = np.bincount([row for rows in train for row in rows], minlength=num_items)
    item_column = pa.array(range(num_items) if item_ids is None else item_ids)
    user_column = pa.array(range(len(train)) if user_ids is None else user_ids)

    def write_files(output_folder: Path) -> dict[str, Any]:
        np.save(output_folder / "user_offset.npy", offset)
        np.save(output_folder / "train_end.npy", offset[:-1] + num_train_U)
        np.save(output_folder / "validation_end.npy", offset[:-1] + num_train_U + num_validation_U)
        np.save(output_folder / "event_item.npy", event_item)
        for name, array in arrays.items():
            np.save(output_folder / f"{name}.npy", array)
        if context is not None:
            pq.write_table(context, output_folder / "context.parquet")
        np.save(output_folder / "train_user.npy", np.repeat(np.arange(len(train), dtype=np.int32), num_train_U))
        np.save(output_folder / "item_count.npy", count_I.astype(np.int64))
        np.save(output_folder / "vector_row.npy", np.array([-1] * num_items if vector_row is None else vector_row, np.int64))
        pq.write_table(pa.table({"id": item_column, "train_count": count_I}), output_folder / "items.parquet")
        pq.write_table(pa.table({"id": user_column, "train_count": num_train_U}), output_folder / "users.parquet")
        return {
            "num_users": len(train),
            "num_items": num_items,
            "test_days": test_days,
            "num_train_events": sum(num_train_U),
            "num_validation_events": sum(num_validation_U),
            "num_test_events": sum(num_test_U),
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

    return commit_stage(folder, InteractionsManifest, inputs=["interactions"], build=write_files)


def write_embeddings_stage(folder: Path, vectors: np.ndarray) -> EmbeddingsManifest:
    """Write an embeddings stage in which item id i has row i of `vectors`."""

    def write_files(output_folder: Path) -> dict[str, Any]:
        np.save(output_folder / "item.vectors.npy", vectors.astype(np.float32))
        pq.write_table(pa.table({"id": np.arange(len(vectors))}), output_folder / "item.ids.parquet")
        item_table = VectorTable(num_rows=len(vectors), dim=vectors.shape[1], id_type="int64")
        return {"tables": {"item": item_table}, "sources": ()}

    return commit_stage(folder, EmbeddingsManifest, inputs=["embeddings"], build=write_files)


def write_features_stage(
    folder: Path,
    store: FeatureStore,
    *,
    ingested_by_feature: Mapping[str, IngestedFeature],
    table_by_file_name: Mapping[str, pa.Table] | None = None,
) -> FeaturesManifest:
    """Write the features of `store`. table_by_file_name: further parquet files, for example vocabularies."""

    def write_files(output_folder: Path) -> dict[str, Any]:
        for key, feature in store.feature_by_key.items():
            for name, array in (("row", feature.table_rows), ("offset", feature.offset), ("weight", feature.weights)):
                if array is not None:
                    np.save(output_folder / f"{key}.{name}.npy", array)
        for file_name, table in (table_by_file_name or {}).items():
            pq.write_table(table, output_folder / file_name)
        return {"lineage": "interactions", "features": dict(ingested_by_feature), "tables": {}, "sources": ()}

    return commit_stage(folder, FeaturesManifest, inputs=["features"], build=write_files)


def write_export_stage(
    folder: Path,
    *,
    item_vectors: np.ndarray,
    queries: Mapping[str, tuple[Sequence[int], np.ndarray]],
    spec: ModelSpec | None = None,
    tables: Mapping[str, np.ndarray] | None = None,
    history_items: np.ndarray | None = None,
    dense: Mapping[str, torch.Tensor] | None = None,
    spectral_block_store: EventStore | None = None,
) -> ExportManifest:
    """Write an export stage.

    Args:
        queries: user rows and their query vectors, by split.
        spec: None for a model that reads nothing but the history.
        tables: weights of the embedding tables by name.
        history_items: vectors that represent the items in histories; None for the item vectors.
        dense: parameters of the towers by name.
        spectral_block_store: events whose spectral vectors are appended to the model's vectors; None: nothing is appended.
    """
    num_users = 1 + max((user for split_users, _ in queries.values() for user in split_users), default=0)
    model_spec = spec or ModelSpec.sized(TwoTowerConfig(), num_users=num_users, num_items=len(item_vectors))

    def write_files(output_folder: Path) -> dict[str, Any]:
        np.save(output_folder / "item_vectors.npy", item_vectors.astype(np.float32))
        np.save(
            output_folder / "history_items.npy", (item_vectors if history_items is None else history_items).astype(np.float32)
        )
        for split, (users, vectors) in queries.items():
            np.save(output_folder / f"query_users_{split}.npy", np.array(users, np.int64))
            np.save(output_folder / f"query_vectors_{split}.npy", np.asarray(vectors, np.float32))
        for name, table in (tables or {}).items():
            np.save(output_folder / f"table_{name}.npy", table)
        (output_folder / "model.json").write_text(model_spec.model_dump_json())
        if spec is not None:
            save_file(dict(dense or {}), output_folder / "dense.safetensors")
        if spectral_block_store is not None:
            append_block(model_spec, store=spectral_block_store, validation=None, folder=output_folder)
        return {
            "num_items": len(item_vectors),
            "dim": item_vectors.shape[1] if spectral_block_store is None else model_spec.config.output_dim,
            "similarity": "dot" if spec is None else spec.config.similarity,
            "num_queries": {split: len(users) for split, (users, _) in queries.items()},
        }

    return commit_stage(folder, ExportManifest, inputs=["export"], build=write_files)
