"""The model of a worker, replaced whenever release.json has another version.

A new version is loaded while the current version is served. `Retriever.load` verifies its files and golden queries. Then the
new version replaces the current version between two batches, so that one version answers a whole request and no request waits.
If the new version does not load, the current version stays.
"""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from recsys_core.errors import NightjarError, StageError, first_line
from recsys_core.http_server import metrics
from recsys_core.http_server.batching import ParsedRequest, Result, ServedModel
from recsys_core.http_server.release import RELEASE_FILE_NAME, Champion, Release, WorkerState
from recsys_core.serving.retriever import Retriever

LOG = logging.getLogger("nightjar.serve")
CHECK_INTERVAL_S = 0.2


class ReleaseFollower:
    """The served model, and the thread that replaces it when release.json changes.

    Args:
        folder: folder of release.json.
        state_path: file for the state of this worker.
        pid: process id of this worker.

    Attributes:
        champion: content of release.json when it was last read; None before the first version is loaded.
    """

    def __init__(self, folder: Path, *, state_path: Path, pid: int) -> None:
        self._release_path, self._state_path = folder / RELEASE_FILE_NAME, state_path
        self._served_model: ServedModel | None = None
        self._served_release: Release | None = None
        self._state = WorkerState(pid=pid, version=None)
        self.champion: Champion | None = None
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    @property
    def state(self) -> WorkerState:
        """The version that this worker serves, and the version that it could not load."""
        return self._state

    def respond(self, parsed_requests: Sequence[ParsedRequest]) -> list[Result]:
        """Answer a batch with the current model."""
        assert self._served_model is not None  # the server starts after the first model is loaded
        return self._served_model.respond(parsed_requests)

    def start(self) -> None:
        """Load the version in release.json, and start the thread that follows the file.

        Raises:
            StageError: the version does not load.
        """
        self.update()
        if self._served_model is None:
            raise StageError(self._state.problem or f"{self._release_path}: no such file")
        self._thread.start()

    def stop(self) -> None:
        """Stop following release.json."""
        self._stop_event.set()

    def update(self) -> None:
        """Read release.json, and load its version if this version is not served."""
        champion = Champion.read(self._release_path)
        if champion is None:
            return
        self.champion = champion
        metrics.REGISTRY_UP.set(champion.registry_problem is None)
        if self._served_release is None or champion.release != self._served_release:
            if champion.release.version != self._state.refused_version:
                self._replace_model(champion.release)
        elif self._state.refused_version is not None:  # release.json has the served version again, so nothing is refused
            self._set_state(WorkerState(pid=self._state.pid, version=self._served_release.version))

    def _replace_model(self, release: Release) -> None:
        try:
            retriever = Retriever.load(release.folder, sha256=release.sha256, version=release.version)
            model = ServedModel(retriever)
            model.warm_up()
        except Exception as error:  # any error of a damaged version; the served version stays
            if not isinstance(error, NightjarError):
                LOG.exception("version %s does not load", release.version)
            metrics.SWAPS.labels("refused").inc()
            served_version = None if self._served_release is None else self._served_release.version
            problem = first_line(error)
            remaining_text = "no version is served" if served_version is None else f"version {served_version} remains"
            LOG.error("version %s is not served: %s; %s", release.version, problem, remaining_text)
            self._set_state(
                WorkerState(pid=self._state.pid, version=served_version, refused_version=release.version, problem=problem)
            )
            return
        self._served_model, self._served_release = model, release
        metrics.SWAPS.labels("served").inc()
        if release.version.isdecimal():
            metrics.VERSION.set(int(release.version))
        self._set_state(WorkerState(pid=self._state.pid, version=release.version))

    def _set_state(self, state: WorkerState) -> None:
        self._state = state
        state.write(self._state_path)

    def _follow(self) -> None:
        while not self._stop_event.wait(CHECK_INTERVAL_S):
            try:
                self.update()
            except Exception:  # the next check may succeed, if the file system works again
                LOG.exception("%s cannot be read", self._release_path)
