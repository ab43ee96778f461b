"""Stage folders with files and manifest fields that a test chooses."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recsys_core.manifests import ManifestT, StageFolder


def commit_stage(
    folder: Path,
    manifest_type: type[ManifestT],
    *,
    fingerprint: str,
    build: Callable[[Path], Mapping[str, Any]],
    min_bytes: int = 0,
) -> ManifestT:
    """Commit the stage whose files `build` writes and whose fields it returns; reuse the stage if it is complete."""
    stage = StageFolder(folder, manifest_type, fingerprint=fingerprint)
    if stage.manifest is not None:
        return stage.manifest
    with stage.writing(min_bytes=min_bytes) as output_folder:
        return stage.commit(**build(output_folder))
