"""Disk budget: the estimated size of a new run, compared with the budget of the workspace and the free space of the disk."""

import logging
import os
from contextlib import suppress
from pathlib import Path

from recsys_core.disk import free_bytes, used_bytes
from recsys_core.errors import InputError, TrackingServerError
from recsys_core.manifests import MARKER_NAME, PackageManifest, RegistrationManifest, read_unchecked_manifest
from recsys_core.units import GIB, format_gib
from tasks.retention.config import RetentionConfig
from tasks.retention.run_folders import own_runs
from tasks.runs.run import REDUCED_FILE_NAME, Run

LOG = logging.getLogger("nightjar")


def ensure_disk_space(config: RetentionConfig, run: Run, *, model_name: str) -> None:
    """Clean the workspace if `run` probably does not fit on the disk; raise InputError if it still does not fit."""
    try:
        require_disk_space(config, run)
    except InputError as error:
        from tasks.retention.clean import clean  # imports MLflow, which takes seconds

        LOG.warning("%s; the workspace is cleaned", error)
        try:
            clean(run.workspace, config, model_name=model_name)
        except TrackingServerError as tracking_error:
            LOG.warning("could not clean the workspace (%s)", tracking_error)
        require_disk_space(config, run)


def require_disk_space(config: RetentionConfig, run: Run) -> None:
    """Raise InputError if the files of `run` probably exceed the disk budget or the free space.

    See `estimated_bytes` for the estimate.
    """
    needed_bytes, num_free_bytes = estimated_bytes(run), free_bytes(run.workspace)
    problem = None
    if config.disk_budget_gb is not None:
        workspace_bytes = used_bytes(run.workspace)
        if workspace_bytes + needed_bytes > config.disk_budget_gb * GIB:
            problem = (
                f"and the workspace has {format_gib(workspace_bytes, digits=3)}, but retention.disk_budget_gb is "
                f"{config.disk_budget_gb:g}; raise it"
            )
    if problem is None and num_free_bytes < needed_bytes:
        problem = f"but the disk has {format_gib(num_free_bytes, digits=3)} free; free some"
    if problem is not None:
        raise InputError(
            f"{run.workspace}: run {run.run_id} needs about {format_gib(needed_bytes, digits=3)}, like the last run, "
            f"{problem}, or lower retention.keep_full_runs or retention.keep_versions and run `nightjar clean`"
        )


def estimated_bytes(run: Run) -> int:
    """Return the size of the newest unreduced run with a registered version, minus the size of the files that `run` has.

    Return 0 if there is no such run. The package counts twice, because MLflow keeps a copy. Files that the run shares with
    earlier runs by hard links do not count.
    """
    for earlier_run in reversed(own_runs(run.workspace)):
        if earlier_run == run or (earlier_run.folder / REDUCED_FILE_NAME).exists():
            continue
        if read_unchecked_manifest(earlier_run.stage_folder(RegistrationManifest), RegistrationManifest) is not None:
            package = read_unchecked_manifest(earlier_run.stage_folder(PackageManifest), PackageManifest)
            package_bytes = sum(record.size_bytes for record in package.files.values()) if package is not None else 0
            return max(0, _new_file_bytes(earlier_run.folder) + package_bytes - _new_file_bytes(run.folder))
    return 0


def _new_file_bytes(folder: Path) -> int:
    """Return the size of the files in a run's folder that were modified after the start of the run.

    A file that another process removes in the meantime is left out.
    """
    num_bytes = 0
    with suppress(FileNotFoundError):
        start_ns = (folder / MARKER_NAME).stat().st_mtime_ns
        for folder_name, _, file_names in os.walk(folder):
            for file_name in file_names:
                with suppress(FileNotFoundError):
                    file_status = (Path(folder_name) / file_name).lstat()
                    num_bytes += file_status.st_size if file_status.st_mtime_ns >= start_ns else 0
    return num_bytes
