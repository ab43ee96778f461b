"""Refreshes of a small pipeline, and the vectors of their packages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from recsys_core.ingest import InputConfig
from recsys_core.manifests import record_file
from recsys_core.refresh.config import RefreshConfig
from recsys_core.refresh.refresh import Refreshed, refresh
from recsys_core.serving.description import DESCRIPTION_NAME
from tests.recsys_core.refresh.small_pipeline import SmallPipeline

TableWriter = Callable[..., None]


def refresh_small(
    parent: SmallPipeline,
    folder: Path,
    *,
    package_folder: Path | None = None,
    inputs: InputConfig | None = None,
    **refresh_settings: float,
) -> Refreshed | None:
    """Refresh the package in `package_folder`, by default the package of `parent`, into the new folder `folder`."""
    package_folder = package_folder or parent.package_folder
    folder.mkdir()
    return refresh(
        RefreshConfig(**refresh_settings),
        inputs or parent.inputs,
        parent_folder=package_folder,
        sha256=record_file(package_folder / DESCRIPTION_NAME).sha256,
        folder=folder,
    )


def package_folder_of(refresh_result: Refreshed | None) -> Path:
    """Return the package folder of a refresh that wrote a package."""
    assert refresh_result is not None
    return refresh_result.package.folder / "package"


def vector_bytes_by_id(package_folder: Path) -> dict[Any, bytes]:
    """Return the bytes of each item's vector in a package, for comparisons bit by bit."""
    return {item_id: vector.tobytes() for item_id, vector in vector_by_id(package_folder).items()}


def vector_by_id(package_folder: Path) -> dict[Any, np.ndarray]:
    """Return the vector of each item in a package."""
    item_columns = pq.read_table(package_folder / "items.parquet").to_pydict()
    return {
        item_id: np.array(vector, np.float32)
        for item_id, vector in zip(item_columns["item_id"], item_columns["vector"], strict=True)
    }
