"""Contracts between stages: a stage is a folder whose manifest.json was written last.

A stage builds its files in `<folder>.tmp`, everything is hashed and fsynced, manifest.json is written, and the folder is
renamed into place. A folder without a valid manifest is removed and redone. The fingerprint says
which inputs and which settings a stage came from, so a resumed run keeps exactly what is still true.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, Field

from recsys_core import __version__
from recsys_core.config import Frozen
from recsys_core.disk import MIN_STAGE_BYTES, explain_disk_full, require_free
from recsys_core.errors import StageError
from recsys_core.manifests.ownership import MARKER, own, remove_own

MANIFEST_NAME = "manifest.json"
_HASHED_AT_ONCE = 4
_NO_MANIFEST = (ValueError, KeyError, TypeError, AttributeError)  # what reading damaged JSON can end in


class FileRecord(Frozen):
    """Size and sha256 of one file of a stage."""

    bytes: int
    sha256: str


class Manifest(Frozen):
    """What every stage leaves behind. `folder` is where it was found and is not written."""

    kind: ClassVar[str]

    format_version: Literal[1] = 1
    fingerprint: str
    seconds: float
    files: dict[str, FileRecord]
    folder: Path = Field(exclude=True)

    def path(self, name: str) -> Path:
        """The file `name` of this stage; raises StageError if the manifest does not list it."""
        if name not in self.files:
            raise StageError(f"{self.folder}: the {self.kind} manifest lists no file {name!r}; it has {sorted(self.files)}")
        return self.folder / name


ManifestT = TypeVar("ManifestT", bound=Manifest)


def fingerprint_of(*parts: object) -> str:
    """sha256 over nightjar's version, configs, manifests (by their own fingerprint) and plain values, in order."""
    return hashlib.sha256(json.dumps([__version__, *(_canonical(part) for part in parts)], sort_keys=True).encode()).hexdigest()


def _canonical(part: object) -> Any:
    if isinstance(part, Manifest):
        return [part.kind, part.fingerprint]
    if isinstance(part, BaseModel):
        return part.model_dump(mode="json")
    if isinstance(part, Mapping):
        return {str(key): _canonical(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [_canonical(value) for value in part]
    return part if isinstance(part, str | int | float | bool | None) else str(part)


def produce(
    folder: Path,
    manifest_type: type[ManifestT],
    *,
    fingerprint: str,
    build: Callable[[Path], Mapping[str, Any]],
    needs_bytes: int = 0,
) -> ManifestT:
    """The stage in `folder`: reused if it is complete and came from `fingerprint`, else built anew and committed atomically.

    `build` writes files into the folder it is given and returns the manifest's own fields. needs_bytes: what it is known to
    write. Raises InputError where the disk has less room, or fills up, or where something is in the folder's place that
    nightjar did not make.
    """
    found = load_manifest(folder, manifest_type)
    if found is not None and found.fingerprint == fingerprint:
        return found
    staging = folder.with_name(folder.name + ".tmp")
    for outdated in (folder, staging):
        remove_own(outdated)
    require_free(folder, max(needs_bytes, MIN_STAGE_BYTES), what=f"the {manifest_type.kind} stage")
    started = time.perf_counter()
    try:
        with explain_disk_full(folder):
            own(staging)
            facts = build(staging)
            return seal(staging, folder, manifest_type, fingerprint=fingerprint, seconds=time.perf_counter() - started, **facts)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def seal(staging: Path, folder: Path, manifest_type: type[ManifestT], **fields: Any) -> ManifestT:
    """Commits the files in `staging` as the stage in `folder`: hash, fsync, manifest last, rename."""
    (staging / MARKER).touch()
    manifest = manifest_type(**fields, files=_record_files(staging), folder=folder)
    content = manifest.model_dump(mode="json")
    _write_durably(staging / MANIFEST_NAME, json.dumps(content | {"sha256": _digest(content)}, indent=2).encode())
    for directory in (staging, *(path for path in staging.rglob("*") if path.is_dir())):
        _fsync(directory)
    staging.rename(folder)
    _fsync(folder.parent)
    return manifest


def load_manifest(folder: Path, manifest_type: type[ManifestT], *, verify: bool = True) -> ManifestT | None:
    """The manifest of `folder`, or None where there is no complete, unchanged stage.

    verify: compare the sha256 of every file, not only its size; the ranks of a run that has just been verified need not.
    """
    try:
        content: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_bytes())
        if content.pop("sha256") != _digest(content):
            return None
        manifest = manifest_type.model_validate(content | {"folder": folder})
        intact = all(
            (folder / name).stat().st_size == record.bytes and (not verify or record_file(folder / name) == record)
            for name, record in manifest.files.items()
        )
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, *_NO_MANIFEST):
        return None
    return manifest if intact else None


def require_manifest(folder: Path, manifest_type: type[ManifestT], *, verify: bool = True) -> ManifestT:
    """load_manifest for a stage that must be there; raises StageError otherwise."""
    manifest = load_manifest(folder, manifest_type, verify=verify)
    if manifest is None:
        raise StageError(f"{folder}: no complete {manifest_type.kind} stage, or a file of it changed; run it again")
    return manifest


def _digest(content: Mapping[str, Any]) -> str:
    """The manifest's checksum of itself: a flipped bit in a metric would else go unnoticed."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _record_files(folder: Path) -> dict[str, FileRecord]:
    """Hashes all files while the disk takes them in: both wait for no one but themselves, and neither holds the GIL."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MARKER)
    with ThreadPoolExecutor(2 * _HASHED_AT_ONCE) as pool:
        synced = [pool.submit(_fsync, path) for path in paths]
        records = dict(zip((str(path.relative_to(folder)) for path in paths), pool.map(record_file, paths), strict=True))
        for done in synced:
            done.result()
    return records


def record_file(path: Path) -> FileRecord:
    """Size and sha256 of `path` as it is now."""
    with path.open("rb") as file:
        return FileRecord(bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _write_durably(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
