"""A run: its id, its folder with the stages, and the lock on the folder."""

import fcntl
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from filelock import FileLock, Timeout

from recsys_core.errors import InputError, shown
from recsys_core.manifests import Manifest, create_own_folder

RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""A run id is the name of one folder, never a path."""

_TIME_FORMAT = "%Y%m%d-%H%M%S"
TIMED_ID_PATTERN = re.compile(r"\d{4}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])-([01]\d|2[0-3])[0-5]\d[0-5]\d-")
"""Start of a run id from `new_run_id`: a time."""

RUNS_FOLDER_NAME = "runs"
LOCK_NAME = ".lock"
PROBE_WAIT_S = 0.5
"""Time to wait for the lock of a run, because a process that calls `Run.is_locked` holds a shared lock for a moment."""
CHAMPION_FILE_NAME = "champion.json"
"""File in a run's folder with the id of the run whose model a warm start continues to train."""
REFIT_FOLDER_NAME = "refit"
"""Folder in a run's folder for the stages of a refit. It is removed when the version of the refit is registered."""
REFIT_FILE_NAME = "refit.json"
"""File in a run's folder with the version number of its refit."""
REDUCED_FILE_NAME = "reduced.json"
"""File in the folder of a run whose large files retention has removed. The run cannot be resumed."""


@dataclass(frozen=True)
class Run:
    """One run of a pipeline: its folder with the stages, and the lock on it.

    Attributes:
        run_id: name of the run's folder.
        workspace: folder of all runs and of the embedded MLflow.
        parent_name: name of the folder in the workspace that contains the run's folder.
    """

    run_id: str
    workspace: Path
    parent_name: str = RUNS_FOLDER_NAME

    def __post_init__(self) -> None:
        """Raise InputError for an invalid run id."""
        if RUN_ID_PATTERN.fullmatch(self.run_id) is None:
            raise InputError(
                f"run id {shown(self.run_id)}: a run id consists of letters, digits, - and _, such as 20261121-070312-ab12; "
                f"use the name of a folder in {self.workspace / self.parent_name}"
            )

    @property
    def folder(self) -> Path:
        """`<workspace>/<parent_name>/<run_id>`."""
        return self.workspace / self.parent_name / self.run_id

    @property
    def config_file(self) -> Path:
        """Path of the config file, written at each start of the run."""
        return self.folder / "config.yaml"

    def stage_folder(self, manifest_type: type[Manifest]) -> Path:
        """Return the folder with the files and the manifest of the stage that `manifest_type` names."""
        return self.folder / manifest_type.stage

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
        problem = f"{self.folder}: another process is working on run {self.run_id}; wait for it to end, or start a new run"
        with exclusive_lock(self.folder / LOCK_NAME, problem=problem, wait_s=PROBE_WAIT_S):
            yield

    def is_locked(self) -> bool:
        """Return whether a process is working on the run. The lock of a dead process does not count: the kernel releases it."""
        try:
            # A shared lock needs no right to write, and several processes can hold it at the same time.
            with (self.folder / LOCK_NAME).open("rb") as lock_file:
                fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:  # the lock is held, or the file system has no locks, where FileLock removes its file at the release
            return True
        return False


@contextmanager
def exclusive_lock(lock_path: Path, *, problem: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock on `lock_path`; raise InputError with the message `problem` if another process holds it.

    Args:
        wait_s: time to wait until the other process releases the lock.
    """
    lock = FileLock(lock_path)
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        raise InputError(problem) from None
    try:
        yield
    finally:
        lock.release()


def new_run_id(*, after: str = "", at: datetime | None = None) -> str:
    """Return the UTC time and four random hex digits, e.g. 20261121-070312-ab12.

    Args:
        after: the newest run id. The time of the new id is at least one second later.
        at: time of the id in UTC; None: now.

    Raises:
        ValueError, OverflowError: the time of `after` is not a valid time, or no later time exists.
    """
    time_text = f"{at or datetime.now(UTC):{_TIME_FORMAT}}"
    if time_text <= after[: len(time_text)] and TIMED_ID_PATTERN.match(after):
        time_text = f"{datetime.strptime(after[: len(time_text)], _TIME_FORMAT) + timedelta(seconds=1):{_TIME_FORMAT}}"
    return f"{time_text}-{secrets.token_hex(2)}"
