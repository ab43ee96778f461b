"""One night's run: its id, and where its stages lie."""

import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from recsys_core.errors import InputError, shown
from recsys_core.manifests import ManifestT, load_manifest, own

StageName = Literal[
    "ingest_embeddings",
    "ingest_interactions",
    "ingest_features",
    "check_data",
    "plan_sharding",
    "train",
    "export",
    "evaluate",
    "build_index",
    "package",
    "register",
]
STAGES: dict[StageName, str] = {
    "ingest_embeddings": "embeddings",
    "ingest_interactions": "interactions",
    "ingest_features": "features",
    "check_data": "data_report",
    "plan_sharding": "plan",
    "train": "train",
    "export": "export",
    "evaluate": "evaluation",
    "build_index": "index",
    "package": "package",
    "register": "registration",
}
"""Stage -> its folder in the run, in the order of the chain."""

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""A run id is the name of one folder, never a path."""


@dataclass(frozen=True)
class Run:
    """`workspace` holds all runs and the embedded MLflow; `experiment` is the MLflow experiment this run is tracked in.

    place: the folder of the workspace that holds it, `runs` for nights.
    """

    run_id: str
    workspace: Path
    experiment: str
    place: str = "runs"

    def __post_init__(self) -> None:
        """Raises InputError for a run id that is none."""
        if RUN_ID.fullmatch(self.run_id) is None:
            raise InputError(
                f"run id {shown(self.run_id)}: a run id has letters, digits, - and _ alone, such as 20261121-070312-ab12; name "
                f"a folder of {self.workspace / self.place}"
            )

    @property
    def folder(self) -> Path:
        """`<workspace>/runs/<run_id>`."""
        return self.workspace / self.place / self.run_id

    @property
    def config_file(self) -> Path:
        """The config this run was last started with."""
        return self.folder / "config.yaml"

    def stage_folder(self, stage: StageName) -> Path:
        """Where `stage` (a key of STAGES) leaves its files and manifest."""
        return self.folder / STAGES[stage]

    def last_night(
        self, stage: StageName, manifest_type: type[ManifestT], *, where: Callable[[ManifestT], bool] = lambda _: True
    ) -> ManifestT | None:
        """The manifest of `stage` in the newest run before this one that has it whole, and `where` holds."""
        earlier = sorted(
            (path for path in self.folder.parent.glob("*") if path.is_dir() and path.name < self.run_id), reverse=True
        )
        found = (load_manifest(path / STAGES[stage], manifest_type) for path in earlier)
        return next((manifest for manifest in found if manifest is not None and where(manifest)), None)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps a second process out of this run; InputError if one is already in it, or nightjar did not make its folder."""
        own(self.folder)
        lock = FileLock(self.folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise InputError(
                f"{self.folder}: another process is working on run {self.run_id}; wait for it, or start a new run"
            ) from None
        try:
            yield
        finally:
            lock.release()


@contextmanager
def workspace_lock(workspace: Path, *, run_id: str) -> Iterator[None]:
    """Keeps a second command out of `workspace`; InputError names the first by its pid and run.

    The kernel releases the lock of a process that died, however it died.
    """
    workspace.mkdir(parents=True, exist_ok=True)
    lock, holder = FileLock(workspace / ".command.lock"), workspace / ".command.json"
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"{workspace}: {_holder(holder)} works in this workspace; wait for it, or set workspace to another folder"
        ) from None
    try:
        holder.write_text(json.dumps({"pid": os.getpid(), "run_id": run_id}))
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _holder(file: Path) -> str:
    try:
        found = json.loads(file.read_text())
        return f"process {found['pid']} with run {found['run_id']}"
    except (OSError, ValueError):  # it has just begun, or just ended
        return "another process"


def new_run_id() -> str:
    """UTC time and four random hex digits, so that names sort by time: 20261121-070312-ab12."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
