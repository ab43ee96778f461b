"""A run: its options, its id, its folder, its stages, and the locks on the run and its workspace."""

import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

from filelock import FileLock, Timeout

from recsys_core.atomic import write_text
from recsys_core.errors import InputError, shown
from recsys_core.manifests import (
    DataReportManifest,
    EmbeddingsManifest,
    EvaluationManifest,
    ExportManifest,
    FeaturesManifest,
    IndexManifest,
    InteractionsManifest,
    Manifest,
    ManifestT,
    PackageManifest,
    PlanManifest,
    RegistrationManifest,
    TrainManifest,
    create_own_folder,
    load_manifest,
)

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
STAGES: dict[StageName, type[Manifest]] = {
    "ingest_embeddings": EmbeddingsManifest,
    "ingest_interactions": InteractionsManifest,
    "ingest_features": FeaturesManifest,
    "check_data": DataReportManifest,
    "plan_sharding": PlanManifest,
    "train": TrainManifest,
    "export": ExportManifest,
    "evaluate": EvaluationManifest,
    "build_index": IndexManifest,
    "package": PackageManifest,
    "register": RegistrationManifest,
}
"""The stages in their order, each with the type of the manifest in its folder."""

Promote = Literal["by_gate", "never", "force"]
"""by_gate: the comparison with the champion decides. never: the champion stays. force: the new version becomes champion."""
MAX_REASON_CHARACTERS = 200

RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""A run id is the name of one folder, never a path."""

LOCK_NAME = ".lock"
CHAMPION_FILE_NAME = "champion.json"
"""File in a run's folder with the id of the run whose model a warm start continues to train."""
REDUCED_FILE_NAME = "reduced.json"
"""File in the folder of a run whose large files retention has removed. The run cannot be resumed."""


def check_reason(reason: str) -> None:
    """Raise InputError unless `reason` is one printable line of at most MAX_REASON_CHARACTERS characters."""
    if len(reason) > MAX_REASON_CHARACTERS or not reason.isprintable():
        raise InputError(
            f"reason {shown(reason)}: a reason is one line of at most {MAX_REASON_CHARACTERS} characters, but this one has "
            f"{len(reason)} characters, or a control character such as a line break; change it"
        )


@dataclass(frozen=True)
class RunOptions:
    """Options of one run, which are not part of the config.

    Attributes:
        reason: why the run was started; empty for a scheduled run. It becomes a tag of the run in Prefect and MLflow.
        full_retrain: build the vocabularies again, read all input files and train from scratch.
        dry_run: execute all stages, but register no version.
        promote: rule that decides whether the new version becomes champion. `force` needs a reason, and the version must still
            pass the smoke test.
    """

    reason: str = ""
    full_retrain: bool = False
    dry_run: bool = False
    promote: Promote = "by_gate"

    def __post_init__(self) -> None:
        """Raise InputError for options that are invalid or contradict each other."""
        check_reason(self.reason)
        if self.promote not in get_args(Promote):
            raise InputError(f"promote is {shown(self.promote)}; set it to one of {', '.join(get_args(Promote))}")
        if self.promote == "force" and not self.reason.strip():
            raise InputError("promote is force, but there is no reason; give a reason, which is recorded on the new version")
        if self.promote == "force" and self.dry_run:
            raise InputError("promote is force, but a dry run registers no version; drop one of the two options")


@dataclass(frozen=True)
class Run:
    """One run of the pipeline.

    Attributes:
        run_id: name of the run's folder.
        workspace: folder of all runs and of the embedded MLflow.
        experiment: MLflow experiment of the run.
        parent: name of the folder in the workspace that contains the run's folder.
        until: last stage to run; None: all stages.
        options: options of this run, which are not part of the config.
        pipeline: name of the pipeline; empty outside a flow.
        flow_run_id: id of the Prefect flow run; None outside a flow.
        flow_run_url: address of the flow run in the Prefect UI; None without a UI.
    """

    run_id: str
    workspace: Path
    experiment: str
    parent: str = "runs"
    until: StageName | None = None
    options: RunOptions = RunOptions()
    pipeline: str = ""
    flow_run_id: str | None = None
    flow_run_url: str | None = None

    def __post_init__(self) -> None:
        """Raise InputError for an invalid run id, or if a run with a forced promotion ends before the promotion."""
        if RUN_ID_PATTERN.fullmatch(self.run_id) is None:
            raise InputError(
                f"run id {shown(self.run_id)}: a run id consists of letters, digits, - and _, such as 20261121-070312-ab12; "
                f"use the name of a folder in {self.workspace / self.parent}"
            )
        if self.options.promote == "force" and self.until not in (None, "register"):
            raise InputError(
                f"promote is force, but the run ends after {self.until} and registers no version; drop one of the two options"
            )

    @property
    def folder(self) -> Path:
        """`<workspace>/<parent>/<run_id>`."""
        return self.workspace / self.parent / self.run_id

    @property
    def config_file(self) -> Path:
        """Path of the config file, written at each start of the run."""
        return self.folder / "config.yaml"

    def stage_folder(self, stage: StageName) -> Path:
        """Return the folder of the stage's files and manifest."""
        return self.folder / stage

    def previous_manifest(
        self, stage: StageName, manifest_type: type[ManifestT], *, where: Callable[[ManifestT], bool] = lambda _: True
    ) -> ManifestT | None:
        """Return the manifest of `stage` from the newest earlier run whose manifest `where` accepts; None if there is none."""
        earlier_folders = sorted(
            (path for path in self.folder.parent.glob("*") if path.is_dir() and path.name < self.run_id), reverse=True
        )
        manifests = (load_manifest(path / stage, manifest_type) for path in earlier_folders)
        return next((manifest for manifest in manifests if manifest is not None and where(manifest)), None)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run's folder.

        Raises InputError if another process has locked the folder, if nightjar did not create the folder, or if retention has
        reduced the run.
        """
        create_own_folder(self.folder)
        if (self.folder / REDUCED_FILE_NAME).exists():
            raise InputError(
                f"{self.folder}: only the manifests and reports of run {self.run_id} are left, because it is older than the "
                "runs that retention.keep_full_runs keeps; start a new run"
            )
        lock = FileLock(self.folder / LOCK_NAME)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise InputError(
                f"{self.folder}: another process is working on run {self.run_id}; wait for it to end, or start a new run"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def is_locked(self) -> bool:
        """Return whether a process is working on the run: the kernel releases the lock of a dead process."""
        lock_file = self.folder / LOCK_NAME
        if not lock_file.is_file():
            return False
        lock = FileLock(lock_file)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        lock.release()
        return False


@contextmanager
def workspace_lock(workspace: Path, *, run_id: str) -> Iterator[None]:
    """Lock `workspace` for one command.

    If another command holds the lock, raise InputError with the process, host, run and start time of that command.

    The kernel releases the lock when the process of the command ends. On a network file system, the file server releases the
    lock of a host that has died.
    """
    workspace.mkdir(parents=True, exist_ok=True)
    lock, holder_file = FileLock(workspace / ".command.lock"), workspace / ".command.json"
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"{workspace}: {_describe_holder(holder_file)} is using this workspace; wait for it to end, or set workspace to "
            "another folder"
        ) from None
    try:
        start_time = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "run_id": run_id, "started": start_time}
        write_text(holder_file, json.dumps(holder))
        yield
    finally:
        holder_file.unlink(missing_ok=True)
        lock.release()


def _describe_holder(holder_file: Path) -> str:
    try:
        holder = json.loads(holder_file.read_text())
        return f"process {holder['pid']} on {holder['host']} with run {holder['run_id']}, since {holder['started']},"
    except (OSError, ValueError, KeyError):  # the process has just started or just ended
        return "another process"


def new_run_id() -> str:
    """Return the UTC time and four random hex digits, e.g. 20261121-070312-ab12. Run ids sort by time."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
