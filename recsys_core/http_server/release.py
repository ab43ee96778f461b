"""Files that `nightjar serve` and its workers exchange: the version to serve, and the version that each worker serves.

The command writes release.json, which all workers read. Worker I writes worker-I.json. Files are replaced atomically.
"""

import os
from pathlib import Path
from typing import Self

from recsys_core.config import Frozen

RELEASE_FILE_NAME, CONFIG_FILE_NAME = "release.json", "config.json"


class _StateFile(Frozen):
    def write(self, path: Path) -> None:
        """Replace the file at `path`."""
        temporary_path = path.with_name(f"{path.name}.{os.getpid()}")
        temporary_path.write_text(self.model_dump_json())
        temporary_path.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the content of the file; None if it does not exist."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None


class Release(Frozen):
    """A version of the registry on the disk of this machine.

    Attributes:
        folder: folder of the model package, whose files do not change.
        sha256: checksum of the package.json in this folder.
    """

    version: str
    folder: Path
    sha256: str


class Champion(_StateFile):
    """release.json: the version to serve, and the state of the registry.

    Attributes:
        problem: why a newer champion is not served; None if the champion is served.
        registry_problem: why the registry does not answer; None if it answers.
        registry_down_since: time of the first request without an answer, in seconds since 1970; None if the registry answers.
        registry_answered_at: time of the last answer, in seconds since 1970.
    """

    release: Release
    problem: str | None = None
    registry_problem: str | None = None
    registry_down_since: float | None = None
    registry_answered_at: float


class WorkerState(_StateFile):
    """worker-I.json: the version that a worker serves.

    Attributes:
        version: None until the first version is loaded.
        refused_version, problem: the version that the worker could not load, and why; None if no version was refused.
    """

    pid: int
    version: str | None
    refused_version: str | None = None
    problem: str | None = None


def worker_path(folder: Path, worker_index: int) -> Path:
    """Return the path of the state file of a worker."""
    return folder / f"worker-{worker_index}.json"
