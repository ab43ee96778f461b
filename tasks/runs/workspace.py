"""A workspace: the folder of all runs, and the lock on it."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from recsys_core.disk import write_text
from recsys_core.errors import InputError
from recsys_core.manifests import ManifestT, load_manifest
from tasks.runs.run import RUN_ID_PATTERN, RUNS_FOLDER_NAME, TIMED_ID_PATTERN, Run, new_run_id

UP_LOCK_NAME = ".up.lock"
"""Name of the lock file that `nightjar up` holds in its workspace."""


@dataclass(frozen=True)
class Workspace:
    """The folder that holds the runs of a pipeline and the files of the embedded MLflow."""

    folder: Path

    def run(self, run_id: str) -> Run:
        """Return the run with this id, whether or not its folder exists. Raise InputError if the id is invalid."""
        return Run(run_id, workspace=self.folder)

    def runs(self) -> list[Run]:
        """Return the runs whose folder exists, the oldest first.

        The runs are sorted by id. This is their order in time, even if the clock was set back: see `new_run_id`.
        """
        folder_names = sorted(
            path.name for path in (self.folder / RUNS_FOLDER_NAME).glob("*") if path.is_dir() and not path.is_symlink()
        )
        return [self.run(name) for name in folder_names if RUN_ID_PATTERN.fullmatch(name)]

    def new_run_id(self, *, at: datetime | None = None) -> str:
        """Return an id that sorts after the ids of all runs of the workspace, also if the clock was set back.

        An id that does not begin with a time is ignored. Only a caller of the Python functions can choose such an id.
        """
        newest_id = max(filter(TIMED_ID_PATTERN.match, (run.run_id for run in self.runs())), default="")
        try:
            return new_run_id(after=newest_id, at=at)
        except (ValueError, OverflowError):
            folder = self.run(newest_id).folder
            raise InputError(f"{folder}: no later run id exists; move this folder out of {folder.parent}") from None

    def newest_run(self) -> Run | None:
        """Return the newest run; None if there is none."""
        return next(reversed(self.runs()), None)

    def newest_manifest(
        self,
        manifest_type: type[ManifestT],
        *,
        before: Run | None = None,
        where: Callable[[ManifestT], bool] = lambda _: True,
    ) -> ManifestT | None:
        """Return the manifest of the newest run that has completed the stage of `manifest_type`; None if there is none.

        Args:
            before: only runs that are older than this run are searched.
            where: condition that the manifest must meet.
        """
        runs = [run for run in self.runs() if before is None or run.run_id < before.run_id]
        manifests = (load_manifest(run.stage_folder(manifest_type), manifest_type) for run in reversed(runs))
        return next((manifest for manifest in manifests if manifest is not None and where(manifest)), None)

    @contextmanager
    def lock(self, *, run_id: str) -> Iterator[None]:
        """Lock the workspace for one command.

        If another command holds the lock, raise InputError with the process, host, run and start time of that command. The
        kernel releases the lock when the process of the command ends. On a network file system, the file server releases
        the lock of a host that has died.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock, holder_path = FileLock(self.folder / ".command.lock"), self.folder / ".command.json"
        try:
            lock.acquire(timeout=0)
        except PermissionError:
            raise InputError(
                f"{lock.lock_file}: permission denied; run nightjar as the user who created this file, or set workspace to "
                "another folder"
            ) from None
        except Timeout:
            raise InputError(
                f"{self.folder}: {_describe_holder(holder_path)} is using this workspace; wait for it to end, or set "
                "workspace to another folder"
            ) from None
        try:
            start_time = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "run_id": run_id, "started": start_time}
            try:
                write_text(holder_path, json.dumps(holder))
            except OSError:  # `nightjar clean` must start on a full disk too
                holder_path.unlink(missing_ok=True)
            yield
        finally:
            holder_path.unlink(missing_ok=True)
            lock.release()


def _describe_holder(holder_path: Path) -> str:
    try:
        holder = json.loads(holder_path.read_text())
        return f"process {holder['pid']} on {holder['host']} with run {holder['run_id']}, since {holder['started']},"
    except (OSError, ValueError, KeyError):  # the process has just started or just ended
        return "another process"
