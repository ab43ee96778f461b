"""The refreshed package: the model and the vectors of its parent, with the current items.

Shapes: I items, V new items, L looked-up items, D width of a vector.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsys_core.manifests import PackageManifest, StageFolder
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import ITEM_TABLES, TEACHER_TABLE
from recsys_core.refresh.changes import Changes
from recsys_core.retrieval.index import write_index
from recsys_core.retrieval.search import decoded_vectors, stored_vectors, verify_file
from recsys_core.serving.contents import PackageContents
from recsys_core.serving.description import (
    CANDIDATE_NAME,
    ITEMS_NAME,
    SEGMENTS_NAME,
    SOURCES_NAME,
    USERS_CHECKSUMS_NAME,
    USERS_NAME,
)
from recsys_core.serving.items import RESERVED_ITEM_COLUMNS, write_items
from recsys_core.serving.package import complete_package
from recsys_core.serving.popularity.segment_counts import replace_items_of_segments
from recsys_core.serving.quantise import BLOCK_TABLE, HISTORY_TABLE, ServedQueryTower, make_table, save_tower
from recsys_core.serving.users.mapped_file import write_block_checksums
from recsys_core.serving.users.user_table import replace_history_items


def refresh_package(parent: PackageContents, changes: Changes, *, parent_folder: Path, folder: Path) -> PackageManifest:
    """Write a stage folder with a package of the same format, model and space_id as its parent.

    The vectors of items that stay are copied bit by bit. New items have the last rows and the lowest popularity. Events of
    removed items are deleted from the histories. The index is built again with the settings of the parent's index.

    Args:
        parent_folder: folder of the parent package, whose contents are `parent`.
    """
    package = parent.package
    spec = _with_items(package.model, changes.items.num_rows)
    stage = StageFolder(folder, PackageManifest, inputs=["refresh", package, changes.counts])
    with stage.writing(min_bytes=sum(path.stat().st_size for path in parent_folder.iterdir())) as output_folder:
        package_folder = output_folder / "package"
        package_folder.mkdir()
        tower = _refreshed_tower(parent, spec, changes)
        save_tower(tower, package_folder / "tower.safetensors", space_id=package.space_id)
        item_vector_ID = refreshed_vectors(parent, changes)
        index_kind = package.index.fitted(len(item_vector_ID), package.dim)
        write_index(index_kind, item_vector_ID, [package_folder / name for name in package.index_names])
        write_items(
            package_folder / ITEMS_NAME,
            columns=changes.items,
            item_vector_ID=item_vector_ID,
            space_id=package.space_id,
            precision=package.item_vectors,
        )
        np.save(package_folder / SOURCES_NAME, changes.source_I)
        refreshed_row_I = np.full(package.model.num_items, -1, np.int32)
        refreshed_row_I[changes.kept_row_I] = np.arange(len(changes.kept_row_I))
        for file_name, array in _popularity_arrays(parent, changes, refreshed_row_I).items():
            np.save(package_folder / file_name, array)
        if package.popularity_by is not None:
            replace_items_of_segments(parent_folder / SEGMENTS_NAME, package_folder / SEGMENTS_NAME, refreshed_row_I)
        if package.users == "stored":
            verify_file(parent_folder / USERS_NAME, record=package.files[USERS_NAME])  # read_package did not verify this file
            replace_history_items(parent_folder / USERS_NAME, package_folder / USERS_NAME, refreshed_row_I)
            write_block_checksums(package_folder / USERS_NAME, package_folder / USERS_CHECKSUMS_NAME)
        for file_name in (*package.vocabulary_names, CANDIDATE_NAME):
            shutil.copyfile(parent_folder / file_name, package_folder / file_name)
        description = package.model_copy(
            update={
                "model": spec,
                "index_parameters": index_kind.model_dump(exclude={"kind"}),
                "max_k": spec.num_items,
                "filter_columns": tuple(name for name in changes.items.column_names if name not in RESERVED_ITEM_COLUMNS),
                "has_titles": "title" in changes.items.column_names,
            }
        )
        complete_package(package_folder, description)
        return stage.commit(
            size_bytes=sum(path.stat().st_size for path in package_folder.iterdir()),
            served_index=package.index_kind,
            quantization=package.quantization,
        )


def refreshed_vectors(parent: PackageContents, changes: Changes) -> NDArray[np.float32]:
    """Return the item vectors of the refreshed package, [I, D]: first the items of the parent, then the new items."""
    return np.concatenate([read_item_vectors(parent, changes.kept_row_I), changes.candidate_VD])


def read_item_vectors(contents: PackageContents, item_row_L: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the vectors of items, [L, D]: from items.parquet if it has the most precise vectors, otherwise from the index."""
    package = contents.package
    is_index_more_precise = package.item_vectors == "fp16" and package.index.has_exact_vectors
    if contents.items.has_vectors and not is_index_more_precise:
        return contents.items.vectors(item_row_L)
    return (stored_vectors(contents.index) or decoded_vectors(contents.index)).take(item_row_L)


def _with_items(spec: ModelSpec, num_items: int) -> ModelSpec:
    """Return the spec with another number of items."""
    resized_tables = {
        name: spec.tables[name].model_copy(update={"num_rows": num_items})
        for name in (*ITEM_TABLES, TEACHER_TABLE)
        if name in spec.tables
    }
    return spec.model_copy(update={"num_items": num_items, "tables": {**spec.tables, **resized_tables}})


def _refreshed_tower(parent: PackageContents, spec: ModelSpec, changes: Changes) -> ServedQueryTower:
    """Return the query tower with the unchanged rows of the items that stay, followed by the rows of the new items."""
    quantization, spectral_block = parent.package.quantization, spec.config.spectral_block
    vectors_by_table = {HISTORY_TABLE: changes.history_VD}
    if spectral_block is not None:
        vectors_by_table[BLOCK_TABLE] = np.zeros((changes.num_added, spectral_block.dim), np.float32)
    kept_rows = torch.from_numpy(changes.kept_row_I)
    state_dict = dict(parent.tower.state_dict())
    for table_name in vectors_by_table.keys() & set(parent.tower.tables):
        new_vector_VD = vectors_by_table[table_name]
        new_table = make_table(*new_vector_VD.shape, quantization=quantization)
        new_table.fill(new_vector_VD)
        for name, new_rows in new_table.state_dict().items():
            tensor_name = f"tables.{table_name}.{name}"
            state_dict[tensor_name] = torch.cat([state_dict[tensor_name][kept_rows], new_rows])
    with torch.device("meta"):
        new_tower = ServedQueryTower(spec, quantization=quantization)
    new_tower.load_state_dict(state_dict, assign=True)
    return new_tower


def _popularity_arrays(
    parent: PackageContents, changes: Changes, refreshed_row_I: NDArray[np.int32]
) -> Mapping[str, NDArray[Any]]:
    """Return the arrays of the popularity files by file name: item rows by falling popularity, and their shares."""
    popular_row_I = refreshed_row_I[parent.popularity.item_row_I]
    added_rows = np.arange(len(changes.kept_row_I), changes.items.num_rows, dtype=np.int32)
    share_I = parent.popularity.share_I[popular_row_I >= 0]
    return {
        "popularity.npy": np.concatenate([popular_row_I[popular_row_I >= 0], added_rows]),
        "popularity_share.npy": np.concatenate([share_I, np.zeros(len(added_rows), np.float32)]),
    }
