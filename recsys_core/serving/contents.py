"""Reading and verification of a model package: first the checksums, then the contents of each file against package.json.

package.json has the size and sha256 of every other file. The sha256 of package.json is stored with the model version,
outside the package.

users.arrow, which may be large, is verified block by block when a block is read, so only its size is compared here.

Shapes: I items.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from recsys_core.errors import StageError
from recsys_core.retrieval.search import load_index, search, search_exhaustively, verify_file, verify_size
from recsys_core.retrieval.shards import shards_of
from recsys_core.serving.description import (
    DESCRIPTION_NAME,
    FORMAT_VERSION,
    ITEMS_NAME,
    SEGMENTS_NAME,
    USERS_CHECKSUMS_NAME,
    USERS_NAME,
    PackageDescription,
)
from recsys_core.serving.given_features import RequestFeatures
from recsys_core.serving.ids import IdMap
from recsys_core.serving.items import ItemTable
from recsys_core.serving.popularity.ranking import Popularity, Segments
from recsys_core.serving.quantise import ServedQueryTower, load_tower, read_space_id
from recsys_core.serving.users.user_table import UserTable


@dataclass(frozen=True)
class PackageContents:
    """The verified contents of a package."""

    package: PackageDescription
    tower: ServedQueryTower
    users: UserTable
    request_features: RequestFeatures
    index: Any
    items: ItemTable
    item_ids: IdMap
    popularity: Popularity


def read_package(folder: Path, *, sha256: str) -> PackageContents:
    """Read the package in `folder`. sha256: expected checksum of package.json.

    Raises StageError, which names the file, if a file is missing, superfluous or changed, or does not match package.json.
    """
    package = _read_description(folder / DESCRIPTION_NAME, sha256=sha256)
    # All other readers name their file in each error, so an error without a file name comes from a value in package.json.
    with _name_unreadable_file(folder / DESCRIPTION_NAME):
        _verify_files(folder, package)
        return open_contents(folder, package)


def open_contents(folder: Path, package: PackageDescription) -> PackageContents:
    """Read the files of a package without comparing their checksums. Raises StageError if they do not match the description."""
    spec = package.model
    tower_path = folder / "tower.safetensors"
    tower = load_tower(tower_path, spec=spec, quantization=package.quantization)
    items = _read_items(folder / ITEMS_NAME, package)
    for path, space_id in ((tower_path, read_space_id(tower_path)), (folder / ITEMS_NAME, items.space_id)):
        if space_id != package.space_id:
            raise StageError(
                f"{path}: the file has the space_id {space_id}, but the package has {package.space_id}: query tower and items "
                "are of different versions; package the model again"
            )
    return PackageContents(
        package=package,
        tower=tower,
        users=_read_users(folder, package),
        request_features=RequestFeatures(package.features, folder=folder),
        index=_read_index(folder, package),
        items=items,
        item_ids=_read_item_ids(folder / ITEMS_NAME, num_items=spec.num_items),
        popularity=_read_popularity(folder, package),
    )


def _read_description(path: Path, *, sha256: str) -> PackageDescription:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StageError(f"{path}: cannot be read ({error.strerror}); package the model again") from error
    if (actual_sha256 := hashlib.sha256(content).hexdigest()) != sha256:
        raise StageError(
            f"{path}: the sha256 is {actual_sha256}, but the file was written with {sha256}; the file was changed. Download or "
            "package the model again"
        )
    if (format_version := _format_version(content)) != FORMAT_VERSION:
        raise StageError(
            f"{path}: the package has format {format_version}, but this version of nightjar reads format {FORMAT_VERSION}; run "
            "the pipeline again, or use the version of nightjar that wrote the package"
        )
    try:
        return PackageDescription.model_validate_json(content)
    except ValidationError as error:
        raise StageError(
            f"{path}: not a package description of format {FORMAT_VERSION}; package the model again: {error}"
        ) from error


def _format_version(content: bytes) -> Any:
    """Return the format version of a package.json of any format; None if it has no format version."""
    try:
        return json.loads(content)["format_version"]
    except (ValueError, KeyError, TypeError):
        return None


def _verify_files(folder: Path, package: PackageDescription) -> None:
    """Raise StageError unless the folder has exactly the files of the model, with the recorded checksums."""
    expected_names = package.file_names
    for file_name in sorted(expected_names ^ package.files.keys()):
        difference_text = "does not list it" if file_name in expected_names else "lists it, but the model does not use it"
        raise StageError(f"{folder / file_name}: {DESCRIPTION_NAME} {difference_text}; package the model again")
    for file_name in sorted({path.name for path in folder.iterdir()} - expected_names - {DESCRIPTION_NAME}):
        raise StageError(
            f"{folder / file_name}: {DESCRIPTION_NAME} does not list this file; remove it, or package the model again"
        )
    for file_name, record in package.files.items():
        if file_name == USERS_NAME:
            verify_size(folder / file_name, record=record)
        elif file_name not in package.index_names:  # load_index verifies the index files
            verify_file(folder / file_name, record=record)


def _read_index(folder: Path, package: PackageDescription) -> Any:
    num_items, dim = package.model.num_items, package.model.config.output_dim
    path_in_errors = folder / ", ".join(package.index_names)
    with _name_unreadable_file(path_in_errors):
        index = load_index({folder / name: package.files[name] for name in package.index_names})
        if (index.ntotal, index.d) != (num_items, dim):
            raise _mismatch_error(
                path_in_errors, f"{index.ntotal} vectors of width {index.d}", f"{num_items} vectors of width {dim}"
            )
        for shard in shards_of(index):
            if shard.metric_type != faiss.METRIC_INNER_PRODUCT:
                raise _mismatch_error(
                    path_in_errors, f"an index with FAISS metric {shard.metric_type}", "inner products (metric 0)"
                )
        # These two searches fail if the kind or the parameters in package.json do not match the index.
        zero_query = np.zeros((1, dim), np.float32)
        search(index, zero_query, kind=package.index, depth=1)
        search_exhaustively(index, zero_query, kind=package.index, depth=1)
    return index


def _read_users(folder: Path, package: PackageDescription) -> UserTable:
    if package.users == "none":
        return UserTable.empty()
    with _name_unreadable_file(folder / USERS_NAME):
        checksums = (folder / USERS_CHECKSUMS_NAME).read_bytes()
        return UserTable.open(folder / USERS_NAME, checksums, spec=package.model)


def _read_popularity(folder: Path, package: PackageDescription) -> Popularity:
    num_items, segments = package.model.num_items, None
    item_row_I = _read_array(folder / "popularity.npy", np.int32, length=num_items)
    if not np.array_equal(np.sort(item_row_I), np.arange(num_items)):
        raise _mismatch_error(folder / "popularity.npy", "repeated or missing items", f"each of {num_items} items once")
    share_I = _read_array(folder / "popularity_share.npy", np.float32, length=num_items)
    if package.popularity_by is not None:
        with _name_unreadable_file(folder / SEGMENTS_NAME):
            segments = Segments.read(folder / SEGMENTS_NAME, key=package.popularity_by, num_items=num_items)
    return Popularity(item_row_I, share_I, segments)


def _read_items(path: Path, package: PackageDescription) -> ItemTable:
    with _name_unreadable_file(path):
        items = ItemTable(path, filter_columns=package.filter_columns, has_titles=package.has_titles)
    if items.has_vectors != (package.item_vectors != "none"):
        raise _mismatch_error(
            path, "vectors" if items.has_vectors else "no vectors", f"vectors of precision {package.item_vectors}"
        )
    if not (items.has_vectors or package.index.has_readable_vectors):
        raise StageError(
            f"{path}: the file has no vectors, and they cannot be read from an index {package.index_kind}; set "
            "package.item_vectors to fp16 or fp32, and package the model again"
        )
    return items


def _read_item_ids(path: Path, *, num_items: int) -> IdMap:
    with _name_unreadable_file(path):
        ids = IdMap.read(path, id_name="item_id")
    if len(ids) != num_items:
        raise _mismatch_error(path, f"{len(ids)} ids", str(num_items))
    return ids


def _read_array(path: Path, dtype: type[np.generic], *, length: int) -> NDArray[Any]:
    with _name_unreadable_file(path):
        array: NDArray[Any] = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    if array.dtype != dtype or array.shape != (length,):
        raise _mismatch_error(path, f"{array.dtype} {list(array.shape)}", f"{np.dtype(dtype)} [{length}]")
    return array


def _mismatch_error(path: Path, actual_text: str, expected_text: str) -> StageError:
    return StageError(f"{path}: the file has {actual_text}, but the model needs {expected_text}; package the model again")


@contextmanager
def _name_unreadable_file(path: Path) -> Iterator[None]:
    """Convert an error of numpy, pyarrow, faiss or torch to a StageError that names the file."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:  # these libraries have no common base class
        raise StageError(f"{path}: cannot be read ({type(error).__name__}: {error}); package the model again") from error
