"""Stage folders: files and a manifest, committed atomically, reused if inputs and settings are unchanged.

A stage writes its files to `<folder>.tmp`. Then all files are hashed and fsynced, manifest.json is written, and the folder is
renamed into place. A folder without a valid manifest is removed and built again. The manifest's fingerprint identifies the
inputs and settings of the stage: a resumed run reuses a stage if its fingerprint is still the same.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from recsys_core import __version__
from recsys_core.config import Frozen
from recsys_core.disk import MIN_STAGE_BYTES, explain_disk_full, require_free
from recsys_core.errors import StageError
from recsys_core.manifests.ownership import MARKER, create_own_folder, remove_own_folder

MANIFEST_NAME = "manifest.json"
_HASH_THREADS = 4
_DAMAGED_JSON_ERRORS = (ValueError, KeyError, TypeError, AttributeError)


class FileRecord(Frozen):
    """Size and sha256 of one file of a stage."""

    bytes: int
    sha256: str


class Manifest(Frozen):
    """Base of the manifests of all stages. `folder` is the folder of the manifest; manifest.json does not contain it."""

    kind: ClassVar[str]

    format_version: Literal[2] = 2
    fingerprint: str
    seconds: float
    files: dict[str, FileRecord]
    folder: Path = Field(exclude=True)

    def path(self, name: str) -> Path:
        """Return the path of the file `name`; raise StageError if the manifest does not list it."""
        if name not in self.files:
            raise StageError(
                f"{self.folder}: the {self.kind} manifest does not list the file {name!r}; it lists {sorted(self.files)}"
            )
        return self.folder / name


ManifestT = TypeVar("ManifestT", bound=Manifest)


def fingerprint_of(*parts: object) -> str:
    """Return a sha256 over nightjar's version and `parts`: configs, manifests (by their fingerprints) and plain values."""
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


class StageFolder(Generic[ManifestT]):
    """The folder of one stage. The stage is either complete, or it has to be written.

        stage = StageFolder(folder, PlanManifest, fingerprint=fingerprint)
        if stage.manifest is not None:
            return stage.manifest
        with stage.writing() as out:
            write_plan(plan, out)
            return stage.commit(world_size=plan.world_size, device=plan.device)

    Attributes:
        manifest: the manifest of the complete stage; None if the stage is incomplete or has another fingerprint.
    """

    def __init__(self, folder: Path, manifest_type: type[ManifestT], *, fingerprint: str) -> None:
        self._folder, self._manifest_type, self._fingerprint = folder, manifest_type, fingerprint
        self._staging = folder.with_name(folder.name + ".tmp")
        previous = load_manifest(folder, manifest_type)
        self.manifest = previous if previous is not None and previous.fingerprint == fingerprint else None
        self._start_s = time.perf_counter()

    @contextmanager
    def writing(self, *, needs_bytes: int = 0) -> Iterator[Path]:
        """Remove an older stage and yield the folder for the new files. Files that are not committed in the block are removed.

        Args:
            needs_bytes: minimum number of bytes that the block writes.

        Raises:
            InputError: the disk has too little space or fills up, or the folder is not a folder that nightjar created.
        """
        for old_folder in (self._folder, self._staging):
            remove_own_folder(old_folder)
        require_free(self._folder, max(needs_bytes, MIN_STAGE_BYTES), subject=f"the {self._manifest_type.kind} stage")
        try:
            with explain_disk_full(self._folder):
                create_own_folder(self._staging)
                yield self._staging
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)  # the folder exists only if the block failed before `commit`

    def commit(self, **fields: Any) -> ManifestT:
        """Commit the files of the `writing` block atomically, and return the manifest.

        fields: values of the fields that the manifest type adds to the base class.
        """
        seconds = time.perf_counter() - self._start_s
        return seal(self._staging, self._folder, self._manifest_type, fingerprint=self._fingerprint, seconds=seconds, **fields)


def seal(staging: Path, folder: Path, manifest_type: type[ManifestT], **fields: Any) -> ManifestT:
    """Commit the files in `staging` as the stage in `folder`: hash, fsync, write the manifest, rename."""
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
    """Return the manifest of `folder`, or None if the stage is incomplete or one of its files changed.

    Args:
        verify: whether to compare the sha256 of every file. False: compare only the sizes, which is faster.
    """
    manifest = read_manifest(folder, manifest_type)
    if manifest is None:
        return None
    try:
        is_intact = all(
            (folder / name).stat().st_size == record.bytes and (not verify or record_file(folder / name) == record)
            for name, record in manifest.files.items()
        )
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    return manifest if is_intact else None


def read_manifest(folder: Path, manifest_type: type[ManifestT]) -> ManifestT | None:
    """Return the manifest of `folder`, or None if it is damaged. The files are not checked; retention may have removed them."""
    try:
        content: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_bytes())
        if content.pop("sha256") != _digest(content):
            return None
        return manifest_type.model_validate(content | {"folder": folder})
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, *_DAMAGED_JSON_ERRORS):
        return None


def require_manifest(folder: Path, manifest_type: type[ManifestT], *, verify: bool = True) -> ManifestT:
    """Return the manifest of `folder`; raise StageError if the stage is incomplete or one of its files changed."""
    manifest = load_manifest(folder, manifest_type, verify=verify)
    if manifest is None:
        raise StageError(
            f"{folder}: the {manifest_type.kind} stage is incomplete, or one of its files changed; run the stage again"
        )
    return manifest


def _digest(content: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest's content. manifest.json contains both."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _record_files(folder: Path) -> dict[str, FileRecord]:
    """Hash and fsync all files in parallel: fsync waits for the disk, hashing uses a core, and both release the GIL."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MARKER)
    with ThreadPoolExecutor(2 * _HASH_THREADS) as pool:
        fsyncs = [pool.submit(_fsync, path) for path in paths]
        records = dict(zip((str(path.relative_to(folder)) for path in paths), pool.map(record_file, paths), strict=True))
        for fsync in fsyncs:
            fsync.result()
    return records


def record_file(path: Path) -> FileRecord:
    """Return size and sha256 of `path`."""
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
