"""Differences between the items of a package and the items of the input tables, and the vectors of new items.

Shapes: I items of the package, U items of the package and new items, V new items, D width of a vector.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.errors import InputError, StageError, shown_names
from recsys_core.ingest import InputConfig
from recsys_core.ingest.features.later_items import LaterItems, LaterItemTable
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from recsys_core.manifests import EmbeddingsManifest, IdType
from recsys_core.models.candidate_model import CandidateModel
from recsys_core.parquet.columns import require_equal_types
from recsys_core.serving.description import (
    CANDIDATE_NAME,
    FROM_FEATURES,
    FROM_VECTORS,
    ITEMS_NAME,
    SOURCES_NAME,
    PackageDescription,
)
from recsys_core.serving.items import join_columns

_FIX = "train a new model with `nightjar run`"


@dataclass(frozen=True)
class Changes:
    """Differences between a package and the current input tables.

    Attributes:
        kept_row_I: rows in the package of the items that stay, ascending. They are the first items of the new package.
        removed_ids: ids of the removed items of the package.
        items: item_id, title and filter columns of all items of the new package. New items are last.
        source_I: bit flags of the input tables that have each row of `items`; see SOURCES_NAME.
        changed_row_I: rows in `items` of the items that stay, but have a new title or new values in the filter columns.
        history_VD, candidate_VD: history vectors and candidate vectors of the new items.
    """

    kept_row_I: NDArray[np.int64]
    removed_ids: pa.Array
    items: pa.Table
    source_I: NDArray[np.uint8]
    changed_row_I: NDArray[np.int64]
    history_VD: NDArray[np.float32]
    candidate_VD: NDArray[np.float32]

    @property
    def num_added(self) -> int:
        """Number of new items."""
        return len(self.candidate_VD)

    @property
    def new_ids(self) -> pa.Array:
        """Ids of the new items."""
        return self.items["item_id"].combine_chunks().slice(len(self.kept_row_I))

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of added, removed and changed items, in this order."""
        return {"added": self.num_added, "removed": len(self.removed_ids), "changed": len(self.changed_row_I)}

    def __bool__(self) -> bool:
        return any(self.counts.values())

    def __str__(self) -> str:
        num_added, num_removed, num_changed = self.counts.values()
        return f"{num_added:,} items added, {num_removed:,} removed, {num_changed:,} changed"


@dataclass(frozen=True)
class _CurrentItems:
    """The items of the package, followed by the new items.

    Attributes:
        vector_row_U: row of each item in the pretrained vectors; -1 for an item without a vector.
        item_table: features, titles and filter columns of these items; None if the config has no table of items.
        has_row_U: whether each item has a row in this table; None if there is no table.
    """

    ids: pa.Array
    vector_row_U: NDArray[np.int64]
    item_table: LaterItems | None
    has_row_U: NDArray[np.bool_] | None


def read_changes(inputs: InputConfig, folder: Path, package: PackageDescription, *, scratch_folder: Path) -> Changes:
    """Compare the input tables with a package, and embed the items that the package does not have.

    An item that the package lacks is added if it has a pretrained vector. If the model does not use pretrained vectors, the
    item is added if it has a row in the table of items. An item is removed if it is missing in a table (of vectors or items)
    that had the item when the package was built. Other items stay.

    Args:
        folder: folder of the package, which has been verified.
        scratch_folder: an empty folder for temporary files.

    Raises:
        InputError: the tables are invalid, or do not match the model of the package.
    """
    package_items = pq.read_table(
        folder / ITEMS_NAME, columns=["item_id", *(["title"] * package.has_titles), *package.filter_columns]
    )
    package_ids = package_items["item_id"].combine_chunks()
    id_type: IdType = "int64" if pa.types.is_integer(package_ids.type) else "string"
    vectors_manifest = _ingest_vectors(inputs, package, id_type=id_type, folder=scratch_folder / "embeddings")
    current_items = _read_tables(
        inputs, folder, package, package_ids=package_ids, vectors_manifest=vectors_manifest, scratch_folder=scratch_folder
    )
    num_package_items = len(package_ids)
    source_flags_U = np.where(current_items.vector_row_U >= 0, FROM_VECTORS, 0).astype(np.uint8)
    compared_flags = FROM_VECTORS
    if current_items.has_row_U is not None:
        source_flags_U += np.where(current_items.has_row_U, FROM_FEATURES, 0).astype(np.uint8)
        compared_flags += FROM_FEATURES
    old_source_flags_I = np.load(folder / SOURCES_NAME) & compared_flags
    is_removed_I = (old_source_flags_I & ~source_flags_U[:num_package_items]) != 0
    kept_row_I, new_row_V = np.flatnonzero(~is_removed_I), np.arange(num_package_items, len(current_items.ids))
    items = join_columns(
        pa.table({"item_id": current_items.ids}),
        () if current_items.item_table is None else current_items.item_table.column_paths,
    )
    items = items.take(np.concatenate([kept_row_I, new_row_V]))
    history_VD, candidate_VD = _embed_new_items(
        folder, package, vectors_manifest=vectors_manifest, current_items=current_items, new_row_V=new_row_V
    )
    return Changes(
        kept_row_I=kept_row_I,
        removed_ids=package_ids.filter(pa.array(is_removed_I)),
        items=items,
        source_I=source_flags_U[np.concatenate([kept_row_I, new_row_V])],
        changed_row_I=np.flatnonzero(_is_changed(package_items.take(kept_row_I), items.slice(0, len(kept_row_I)))),
        history_VD=history_VD,
        candidate_VD=candidate_VD,
    )


def _ingest_vectors(
    inputs: InputConfig, package: PackageDescription, *, id_type: IdType, folder: Path
) -> EmbeddingsManifest | None:
    """Ingest the pretrained vectors of the items; return None if the model does not use pretrained vectors."""
    item_configs = [config for config in inputs.embeddings if config.table == "item"]
    parquet_configs = [config for config in item_configs if config.source == "parquet"]
    if len(parquet_configs) < len(item_configs):
        raise InputError(
            "embeddings: a refresh is not possible with source: log, because an item without an event has no vector; the next "
            "`nightjar run` adds new items"
        )
    if (is_pretrained := package.model.tables["item"].pretrained) != bool(parquet_configs):
        difference_text = (
            "with vectors of items, but the config has none"
            if is_pretrained
            else "without vectors of items, but the config has them"
        )
        raise InputError(f"embeddings: the served model was trained {difference_text}; go back to the former config, or {_FIX}")
    if any(config.pca_dim is not None for config in parquet_configs):
        raise InputError(
            "embeddings.pca_dim: a refresh is not possible with a projection, because it depends on the vectors of each run; "
            f"project the vectors before the pipeline reads them, or {_FIX}"
        )
    if not parquet_configs:
        return None
    vectors_manifest = ingest_embeddings(parquet_configs, folder=folder, allowed_data_root=inputs.allowed_data_root)
    vector_table = vectors_manifest.tables["item"]
    vectors_path = vectors_manifest.sources[0].path
    if vector_table.dim != (trained_dim := package.model.member_dim("item")):
        raise InputError(
            f"{vectors_path}: the vectors have {vector_table.dim} numbers, but the served model was trained with vectors of "
            f"{trained_dim}; write vectors of the same model, or {_FIX}"
        )
    require_equal_types(
        vector_table.id_type,
        subject=f"{vectors_path}: the item id",
        other_type=id_type,
        other_subject="the item id of the served model",
    )
    return vectors_manifest


def _read_tables(
    inputs: InputConfig,
    folder: Path,
    package: PackageDescription,
    *,
    package_ids: pa.Array,
    vectors_manifest: EmbeddingsManifest | None,
    scratch_folder: Path,
) -> _CurrentItems:
    """Read the table of items, and append the new items to the items of the package."""
    id_type: IdType = "int64" if pa.types.is_integer(package_ids.type) else "string"
    input_table = None
    if inputs.features is not None and inputs.features.items is not None:
        input_table = LaterItemTable(
            inputs.features.items,
            encodings=package.item_features,
            id_type=id_type,
            memory_limit=inputs.interactions.memory_limit,
            threads=inputs.interactions.threads,
            allowed_data_root=inputs.allowed_data_root,
        )
    elif package.item_features:
        raise InputError(
            f"features.items: the served model reads {shown_names([*package.item_features])}, but the config has no table of "
            f"items; go back to the former config, or {_FIX}"
        )
    if vectors_manifest is not None:
        available_ids = pq.read_table(vectors_manifest.ids_path("item"))["id"].combine_chunks()
    elif input_table is not None:
        available_ids = input_table.ids(folder=scratch_folder / "ids")
    else:
        raise InputError(
            "the served model reads neither vectors nor features of items, so it cannot embed an item without events; add "
            f"embeddings or features.items, and {_FIX}"
        )
    available_ids = available_ids.cast(package_ids.type)
    new_ids = available_ids.filter(pc.invert(pc.is_in(available_ids, value_set=package_ids)))
    item_ids = pa.concat_arrays([package_ids, new_ids.take(pc.sort_indices(new_ids))])
    vector_row_U = np.full(len(item_ids), -1, np.int64)
    if vectors_manifest is not None:
        vector_row_U = pc.fill_null(pc.index_in(item_ids, value_set=available_ids), -1).to_numpy().astype(np.int64)
    if input_table is None:
        return _CurrentItems(item_ids, vector_row_U, None, None)
    item_table = input_table.read(item_ids, vocabulary_folder=folder, folder=scratch_folder / "features")
    has_row_U = np.zeros(len(item_ids), np.bool_)
    has_row_U[pq.read_table(item_table.row_path, columns=["row"])["row"].to_numpy()] = True
    return _CurrentItems(item_ids, vector_row_U, item_table, has_row_U)


def _embed_new_items(
    folder: Path,
    package: PackageDescription,
    *,
    vectors_manifest: EmbeddingsManifest | None,
    current_items: _CurrentItems,
    new_row_V: NDArray[np.int64],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the history vectors and the candidate vectors of the new items."""
    model = CandidateModel.load(folder / CANDIDATE_NAME, package.model)
    pretrained_VD = None
    if vectors_manifest is not None:
        pretrained_VD = np.load(vectors_manifest.vectors_path("item"), mmap_mode="r")[current_items.vector_row_U[new_row_V]]
    features = FeatureStore({}) if current_items.item_table is None else current_items.item_table.features
    history_VD, candidate_VD = model.encode(pretrained_VD, features, new_row_V)
    is_finite_V = np.isfinite(candidate_VD).all(axis=1) & np.isfinite(history_VD).all(axis=1)
    if not is_finite_V.all():
        item_id = current_items.ids[int(new_row_V[int(is_finite_V.argmin())])].as_py()
        raise StageError(f"item {item_id!r}: the candidate tower gives a vector that is not finite; correct its vector")
    return history_VD, candidate_VD


def _is_changed(old_items: pa.Table, new_items: pa.Table) -> NDArray[np.bool_]:
    """Return for each row whether a value has changed, [I]. A column that only one table has is null in the other table."""
    is_changed_I = np.zeros(old_items.num_rows, np.bool_)
    for name in dict.fromkeys([*old_items.column_names, *new_items.column_names]):
        if name not in old_items.column_names or name not in new_items.column_names:
            values = (old_items if name in old_items.column_names else new_items)[name]
            is_changed_I |= values.is_valid().to_numpy()
            continue
        old_values, new_values = _nan_to_null(old_items[name]), _nan_to_null(new_items[name])
        if old_values.type != new_values.type:
            return np.ones(old_items.num_rows, np.bool_)
        is_equal = pc.fill_null(pc.equal(old_values, new_values), False).to_numpy()
        is_changed_I |= ~(is_equal | (old_values.is_null().to_numpy() & new_values.is_null().to_numpy()))
    return is_changed_I


def _nan_to_null(values: pa.ChunkedArray) -> pa.ChunkedArray:
    if not pa.types.is_floating(values.type):
        return values
    return pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
