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

Tables = Callable[..., None]


def refresh_small(
    parent: SmallPipeline,
    folder: Path,
    *,
    package_folder: Path | None = None,
    inputs: InputConfig | None = None,
    **limits: float,
) -> Refreshed | None:
    """Refresh the package of `parent`, or the one in `package_folder`, into the new folder `folder`."""
    package_folder = package_folder or parent.package_folder
    folder.mkdir()
    return refresh(
        RefreshConfig(**limits),
        inputs or parent.inputs,
        parent_folder=package_folder,
        sha256=record_file(package_folder / DESCRIPTION_NAME).sha256,
        folder=folder,
    )


def folder_of(refresh_result: Refreshed | None) -> Path:
    assert refresh_result is not None
    return refresh_result.package.folder / "package"


def vectors_of(folder: Path) -> dict[Any, bytes]:
    """Return the bytes of each item's vector in a package."""
    return {item_id: vector.tobytes() for item_id, vector in values_of(folder).items()}


def values_of(folder: Path) -> dict[Any, np.ndarray]:
    items = pq.read_table(folder / "items.parquet").to_pydict()
    return {item_id: np.array(vector, np.float32) for item_id, vector in zip(items["item_id"], items["vector"], strict=True)}
