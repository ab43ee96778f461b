"""Commits of stage folders whose files and manifest fields a test chooses."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recsys_core.manifests import ManifestT, StageFolder


def commit_stage(
    folder: Path,
    manifest_type: type[ManifestT],
    *,
    inputs: Sequence[object],
    build: Callable[[Path], Mapping[str, Any]],
    min_bytes: int = 0,
) -> ManifestT:
    """Commit a stage: `build` writes its files and returns its manifest fields. A complete stage is reused without `build`."""
    stage = StageFolder(folder, manifest_type, inputs=inputs)
    if stage.manifest is not None:
        return stage.manifest
    with stage.writing(min_bytes=min_bytes) as output_folder:
        return stage.commit(**build(output_folder))
