"""Steps of a refresh: compare the items, embed new items, write the package and its delta file, and check the package.

Shapes: I items, L new and changed items, D width of a vector.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys_core.errors import InputError
from recsys_core.ingest import InputConfig
from recsys_core.manifests import PackageManifest
from recsys_core.refresh.changes import Changes, read_changes
from recsys_core.refresh.checks import Check, check_package
from recsys_core.refresh.config import RefreshConfig
from recsys_core.refresh.package import read_item_vectors, refresh_package
from recsys_core.serving.contents import PackageContents, read_package
from recsys_core.serving.description import description_sha256
from recsys_core.serving.quantise import SPACE_ID_KEY

DELTA_NAME = "delta.parquet"
"""File with the items that a system with its own copy of the vectors has to insert, replace or delete."""


@dataclass(frozen=True)
class Refreshed:
    """A refreshed package.

    Attributes:
        delta_path: path of the delta file; see `write_delta`.
    """

    package: PackageManifest
    changes: Changes
    checks: tuple[Check, ...]
    delta_path: Path

    @property
    def problems(self) -> tuple[str, ...]:
        """Descriptions of the checks that failed."""
        return tuple(str(check) for check in self.checks if not check.is_passed)


def refresh(config: RefreshConfig, inputs: InputConfig, *, parent_folder: Path, sha256: str, folder: Path) -> Refreshed | None:
    """Write a package with the items of the current input tables to `folder`; return None if no item has changed.

    Args:
        parent_folder: package whose model embeds the new items.
        sha256: expected checksum of package.json in `parent_folder`.
        folder: an empty folder, for the package, the delta file and temporary files.

    Raises:
        StageError: the parent package is damaged, or has another format.
        InputError: the tables are invalid or do not fit the model, or too many items are missing in them.
    """
    parent = read_package(parent_folder, sha256=sha256)
    (scratch_folder := folder / "scratch").mkdir()
    changes = read_changes(inputs, parent_folder, parent.package, scratch_folder=scratch_folder)
    if not changes:
        return None
    _check_removed_share(config, changes, num_items=parent.package.model.num_items)
    package_manifest = refresh_package(parent, changes, parent_folder=parent_folder, folder=folder / "package")
    package_folder = package_manifest.folder / "package"
    contents = read_package(package_folder, sha256=description_sha256(package_manifest))
    checks = check_package(parent, contents, changes, parent_folder=parent_folder, config=config)
    write_delta(folder / DELTA_NAME, changes, contents)
    return Refreshed(package_manifest, changes, checks, folder / DELTA_NAME)


def _check_removed_share(config: RefreshConfig, changes: Changes, *, num_items: int) -> None:
    num_removed = len(changes.removed_ids)
    if num_removed > config.max_removed_share * num_items or num_removed == num_items:
        raise InputError(
            f"{num_removed:,} of {num_items:,} items of the served model ({100 * num_removed / num_items:.1f} %) are missing "
            f"in the vectors or in the table of items, but refresh.max_removed_share is "
            f"{100 * config.max_removed_share:.1f} %; check that the input files are complete, or raise the limit"
        )


def write_delta(path: Path, changes: Changes, contents: PackageContents) -> None:
    """Write a parquet file with the column `operation` and the columns of items.parquet.

    `upsert` is a new item, or an item whose title or filter columns changed. `delete` is a removed item, which has only its id.
    The metadata of the schema contains the space_id.

    contents: the refreshed package.
    """
    num_kept_items = len(changes.kept_row_I)
    row_L = np.concatenate([changes.changed_row_I, np.arange(num_kept_items, num_kept_items + changes.num_added)])
    vector_LD = read_item_vectors(contents, row_L)
    # The lists have no fixed size, because pyarrow cannot read a column of fixed-size lists with nulls.
    offsets = np.arange(len(row_L) + 1, dtype=np.int32) * vector_LD.shape[1]
    vector_lists = pa.ListArray.from_arrays(offsets, pa.array(vector_LD.reshape(-1)))
    upserts = changes.items.take(row_L).append_column("vector", vector_lists)
    removed_ids = changes.removed_ids.cast(upserts["item_id"].type)
    deletes = pa.table({"item_id": removed_ids})
    operations = ["upsert"] * len(row_L) + ["delete"] * len(removed_ids)
    delta_items = pa.concat_tables([upserts, deletes], promote_options="default")
    delta_table = delta_items.add_column(0, "operation", pa.array(operations, pa.string()))
    pq.write_table(delta_table.replace_schema_metadata({SPACE_ID_KEY: contents.package.space_id}), path)
