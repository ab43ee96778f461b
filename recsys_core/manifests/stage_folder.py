"""Stage folders: files and a manifest, committed atomically, reused if inputs and settings are unchanged.

A stage writes its files to `<folder>.tmp`. Then all files are hashed and fsynced, manifest.json is written, and the folder is
renamed into place. A folder without a valid manifest is removed and built again. The manifest's fingerprint identifies the
inputs and settings of the stage: a resumed run reuses a stage if its fingerprint is still the same.

Each folder that nightjar creates has a marker file. A folder without the marker is never removed or overwritten.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from recsys_core import __version__
from recsys_core.config import Frozen
from recsys_core.disk import MIN_STAGE_BYTES, explain_disk_full, require_free_space
from recsys_core.errors import InputError, StageError

MANIFEST_NAME = "manifest.json"
MARKER_NAME = ".nightjar"
_MARKER_TEXT = "nightjar created this folder, and may replace or remove the files in it.\n"
_NUM_HASH_THREADS = 4
_DAMAGED_JSON_ERRORS = (ValueError, KeyError, TypeError, AttributeError)


class FileRecord(Frozen):
    """Size and sha256 of one file of a stage."""

    size_bytes: int
    sha256: str


StageGroup = Literal["data", "training", "evaluation", "release"]


class Manifest(Frozen):
    """Base of the manifests of all stages. `folder` is the folder of the manifest; manifest.json does not contain it.

    Attributes:
        stage: name of the stage, which is also the name of its folder.
        group: group of the stage in the plot of the durations.
        pages: path of each page and plot of the stage, relative to the run folder, by link text.
        input_fingerprints: fingerprint of each stage that this stage has read in the same run, by stage name.
    """

    stage: ClassVar[str]
    group: ClassVar[StageGroup] = "data"
    pages: ClassVar[Mapping[str, str]] = {}

    format_version: Literal[3] = 3
    fingerprint: str
    input_fingerprints: dict[str, str] = Field(default_factory=dict)
    seconds: float
    files: dict[str, FileRecord]
    folder: Path = Field(exclude=True)

    def path(self, file_name: str) -> Path:
        """Return the path of the file `file_name`; raise StageError if the manifest does not list it."""
        if file_name not in self.files:
            raise StageError(
                f"{self.folder}: the {self.stage} manifest does not list the file {file_name!r}; it lists {sorted(self.files)}"
            )
        return self.folder / file_name


ManifestT = TypeVar("ManifestT", bound=Manifest)


def fingerprint_of(*inputs: object) -> str:
    """Return a sha256 over nightjar's version and `inputs`: configs, manifests (by their fingerprints) and plain values."""
    return hashlib.sha256(
        json.dumps([__version__, *(_json_value(fingerprint_input) for fingerprint_input in inputs)], sort_keys=True).encode()
    ).hexdigest()


def _json_value(fingerprint_input: object) -> Any:
    if isinstance(fingerprint_input, Manifest):
        return [fingerprint_input.stage, fingerprint_input.fingerprint]
    if isinstance(fingerprint_input, BaseModel):
        return fingerprint_input.model_dump(mode="json")
    if isinstance(fingerprint_input, Mapping):
        return {str(key): _json_value(element) for key, element in fingerprint_input.items()}
    if isinstance(fingerprint_input, list | tuple):
        return [_json_value(element) for element in fingerprint_input]
    return fingerprint_input if isinstance(fingerprint_input, str | int | float | bool | None) else str(fingerprint_input)


class StageFolder(Generic[ManifestT]):
    """The folder of one stage, which is either complete or has to be written:

        stage = StageFolder(folder, PlanManifest, inputs=["plan_sharding", config, interactions])
        if stage.manifest is not None:
            return stage.manifest
        with stage.writing() as new_folder:
            write_plan(plan, new_folder)
            return stage.commit(world_size=plan.world_size, device=plan.device)

    Attributes:
        fingerprint: sha256 over `inputs`: configs, manifests of earlier stages and plain values.
        manifest: the manifest of the complete stage; None if the stage is incomplete or has another fingerprint.
    """

    def __init__(self, folder: Path, manifest_type: type[ManifestT], *, inputs: Sequence[object]) -> None:
        self._folder, self._manifest_type, self.fingerprint = folder, manifest_type, fingerprint_of(*inputs)
        self._input_fingerprints = {
            stage_input.stage: stage_input.fingerprint
            for stage_input in inputs
            if isinstance(stage_input, Manifest) and stage_input.folder.parent == folder.parent
        }
        self._staging_folder = folder.with_name(folder.name + ".tmp")
        existing_manifest = load_manifest(folder, manifest_type)
        is_reusable = existing_manifest is not None and existing_manifest.fingerprint == self.fingerprint
        self.manifest = existing_manifest if is_reusable else None
        self._start_s = time.perf_counter()

    @contextmanager
    def writing(self, *, min_bytes: int = 0) -> Iterator[Path]:
        """Remove an older stage and yield the folder for the new files. Files that are not committed in the block are removed.

        Args:
            min_bytes: lower bound of the bytes that the block writes.

        Raises:
            InputError: the disk has too little space or fills up, or nightjar did not create the existing folder.
        """
        for old_folder in (self._folder, self._staging_folder):
            remove_own_folder(old_folder)
        require_free_space(self._folder, max(min_bytes, MIN_STAGE_BYTES), subject=f"the {self._manifest_type.stage} stage")
        try:
            with explain_disk_full(self._folder):
                create_own_folder(self._staging_folder)
                yield self._staging_folder
        finally:
            shutil.rmtree(self._staging_folder, ignore_errors=True)  # after `commit` the folder does not exist

    def commit(self, **fields: Any) -> ManifestT:
        """Commit the files of the `writing` block atomically, and return the manifest.

        Args:
            fields: values of the fields that the manifest type adds to Manifest.
        """
        seconds = time.perf_counter() - self._start_s
        return commit_folder(
            self._staging_folder,
            self._folder,
            self._manifest_type,
            fingerprint=self.fingerprint,
            input_fingerprints=self._input_fingerprints,
            seconds=seconds,
            **fields,
        )


def commit_folder(
    staging_folder: Path,
    folder: Path,
    manifest_type: type[ManifestT],
    *,
    records: Mapping[str, FileRecord] = MappingProxyType({}),
    **fields: Any,
) -> ManifestT:
    """Hash and fsync the files in `staging_folder`, write the manifest, and rename the folder to `folder`.

    records: records of the files that their writers have already hashed and synced, by name.
    """
    (staging_folder / MARKER_NAME).touch()
    paths = (path for path in staging_folder.rglob("*") if path.is_file() and path != staging_folder / MARKER_NAME)
    new_records = record_files([path for path in paths if path.name not in records], folder=staging_folder)
    manifest = manifest_type(**fields, files=new_records | dict(records), folder=folder)
    content = manifest.model_dump(mode="json")
    _write_durably(
        staging_folder / MANIFEST_NAME, json.dumps(content | {"sha256": _content_sha256(content)}, indent=2).encode()
    )
    for folder_to_sync in (staging_folder, *(path for path in staging_folder.rglob("*") if path.is_dir())):
        _fsync(folder_to_sync)
    staging_folder.rename(folder)
    _fsync(folder.parent)
    return manifest


def load_manifest(folder: Path, manifest_type: type[ManifestT], *, verify: bool = True) -> ManifestT | None:
    """Return the manifest of `folder`, or None if the stage is incomplete or one of its files changed.

    Args:
        verify: whether to compare the sha256 of every file with the manifest. If False, only the sizes are compared, which is
            faster.
    """
    manifest = read_unchecked_manifest(folder, manifest_type)
    if manifest is None:
        return None
    try:
        is_intact = all(
            (folder / file_name).stat().st_size == record.size_bytes
            and (not verify or record_file(folder / file_name) == record)
            for file_name, record in manifest.files.items()
        )
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    return manifest if is_intact else None


def read_unchecked_manifest(folder: Path, manifest_type: type[ManifestT]) -> ManifestT | None:
    """Return the manifest of `folder`, or None if manifest.json is missing or damaged.

    The other files are not checked, because retention may have removed them.
    """
    try:
        content: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_bytes())
        if content.pop("sha256") != _content_sha256(content):
            return None
        return manifest_type.model_validate(content | {"folder": folder})
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, *_DAMAGED_JSON_ERRORS):
        return None


def without_outdated(manifests: Iterable[Manifest]) -> Iterator[Manifest]:
    """Yield the manifests of a run without the stages whose inputs changed or are missing.

    If a run is resumed with other settings and ends early, its later stages are outdated.

    manifests: in the order of the stages.
    """
    fingerprint_by_stage: dict[str, str] = {}
    for manifest in manifests:
        if manifest.input_fingerprints.items() <= fingerprint_by_stage.items():
            fingerprint_by_stage[manifest.stage] = manifest.fingerprint
            yield manifest


def require_manifest(folder: Path, manifest_type: type[ManifestT], *, verify: bool = True) -> ManifestT:
    """Return the manifest of `folder`; raise StageError if the stage is incomplete or one of its files changed."""
    manifest = load_manifest(folder, manifest_type, verify=verify)
    if manifest is None:
        raise StageError(
            f"{folder}: the {manifest_type.stage} stage is incomplete, one of its files changed, or another version of "
            "nightjar wrote it; run the stage again"
        )
    return manifest


def _content_sha256(content: Mapping[str, Any]) -> str:
    """Return the checksum that manifest.json contains in addition to `content`."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def record_files(paths: Iterable[Path], *, folder: Path) -> dict[str, FileRecord]:
    """Hash and fsync files in parallel: fsync waits for the disk, hashing uses a core, and both release the GIL.

    Return the record of each file by its path in `folder`.
    """
    paths = sorted(paths)
    with ThreadPoolExecutor(2 * _NUM_HASH_THREADS) as thread_pool:
        fsync_futures = [thread_pool.submit(_fsync, path) for path in paths]
        records = dict(zip((str(path.relative_to(folder)) for path in paths), thread_pool.map(record_file, paths), strict=True))
        for future in fsync_futures:
            future.result()
    return records


def record_file(path: Path) -> FileRecord:
    """Return the size and the sha256 of the file `path`."""
    with path.open("rb") as file:
        return FileRecord(size_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _write_durably(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _fsync(path)


def _fsync(path: Path) -> None:
    file_descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file_descriptor)
    finally:
        os.close(file_descriptor)


def create_own_folder(folder: Path) -> None:
    """Create `folder` with the marker, or mark an empty folder. Raise InputError like `require_own_folder`."""
    require_own_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MARKER_NAME).exists():
        (folder / MARKER_NAME).write_text(_MARKER_TEXT)


def require_own_folder(folder: Path) -> None:
    """Raise InputError if `folder` is a link, a file, or a folder with files but no marker. Nothing is changed."""
    require_no_link(folder)
    if not folder.exists():
        return
    if not (folder / MARKER_NAME).is_file() and any(folder.iterdir()):
        raise InputError(
            f"{folder} holds files, but not the marker {MARKER_NAME} of a folder that nightjar created, so nightjar does not "
            "replace or remove them; move the folder away, or, if nightjar created it, create an empty file "
            f"{MARKER_NAME} in it"
        )


def require_no_link(folder: Path) -> None:
    """Raise InputError if `folder` is a link or a file: the files behind a link may belong to another program."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(
            f"{folder} is {'a link' if folder.is_symlink() else 'a file'}, but nightjar needs a folder of its own here, to "
            f"replace and remove files in it; move the {'link' if folder.is_symlink() else 'file'} away"
        )


def remove_own_folder(folder: Path) -> None:
    """Remove a folder that nightjar created. Raise InputError like `require_own_folder`.

    The marker is removed last, so that a folder that was removed only in part can still be removed later.
    """
    require_own_folder(folder)
    if not folder.exists():
        return
    for path in folder.iterdir():
        if path.name == MARKER_NAME:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (folder / MARKER_NAME).unlink(missing_ok=True)
    folder.rmdir()
