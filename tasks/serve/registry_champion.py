"""The champion of a registry, as a package on the disk of this machine."""

import logging
import shutil
import time
from pathlib import Path

from recsys_core.errors import NightjarError, StageError, first_line, redacted
from recsys_core.http_server.release import Champion, Release
from recsys_core.serving.description import verify_users
from tasks.registry.loading import PACKAGE_SHA256_KEY, fetch_model
from tasks.registry.mlflow_client import call_with_deadline, connect
from tasks.registry.releases import version_number_by_alias

LOG = logging.getLogger("nightjar")
FETCH_TIMEOUT_S = 3_600.0
REFUSAL_S = 600.0
"""Seconds after which a version that did not load is tried again, because the memory or the disk may have been full."""


class RegistryChampion:
    """The version with an alias.

    Args:
        workspace: workspace of the pipeline, whose MLflow is used unless MLFLOW_TRACKING_URI is set.
        alias: alias of the version to serve.
        folder: folder for the versions of another MLflow, which are copied there.
    """

    def __init__(self, workspace: Path, *, model_name: str, alias: str, folder: Path) -> None:
        self._workspace, self._model_name, self._alias, self._folder = workspace, model_name, alias, folder
        self._champion: Champion | None = None
        self._former_release: Release | None = None
        self._refused_version: str | None = None
        self._refused_until_s = 0.0
        self._release_by_version: dict[str, Release] = {}

    def poll(self) -> Champion:
        """Return the version to serve. If the registry does not answer or its champion cannot be fetched, keep the version.

        Raises:
            TrackingServerError, StageError, InputError: at the first call, when there is no version to keep.
        """
        try:
            number = self._champion_number()
        except Exception as error:  # any error of the registry, or of the disk with its database
            if self._champion is None:
                raise
            down_since = self._champion.registry_down_since or time.time()
            if self._champion.registry_problem is None:
                LOG.warning("%s; version %s is still served", redacted(first_line(error)), self._champion.release.version)
            update = {"registry_problem": redacted(first_line(error)), "registry_down_since": down_since}
            self._champion = self._champion.model_copy(update=update)
            return self._champion
        if self._champion is not None and self._champion.registry_problem is not None:
            LOG.info("the registry answers again")
        self._champion = self._following(number)
        return self._champion

    def accept(self) -> None:
        """Forget the version before, because all processes serve this one."""
        self._former_release = None

    def refuse(self, problem: str) -> Champion | None:
        """Return to the version before, because a process cannot serve this one. Return None if there is no version before.

        The version is tried again after REFUSAL_S, and at once if another version was the champion in between.
        """
        if self._champion is None or self._former_release is None:
            return None
        self._refused_version = self._champion.release.version
        self._refused_until_s = time.monotonic() + REFUSAL_S
        problem = f"version {self._refused_version} is not served: {problem}"
        LOG.error("%s; version %s is served again", problem, self._former_release.version)
        self._champion = self._champion.model_copy(update={"release": self._former_release, "problem": problem})
        self._former_release = None
        return self._champion

    def _champion_number(self) -> str | None:
        client = connect(self._workspace)
        numbers = call_with_deadline(lambda: version_number_by_alias(client, self._model_name), uri=client.tracking_uri)
        return (numbers or {}).get(self._alias)

    def _following(self, number: str | None) -> Champion:
        """Return the champion after an answer of the registry."""
        now = time.time()
        current_champion = self._champion
        if current_champion is not None and number == current_champion.release.version:
            self._refused_version = None
            return Champion(release=current_champion.release, registry_answered_at=now)
        if current_champion is not None and number == self._refused_version and time.monotonic() < self._refused_until_s:
            return Champion(release=current_champion.release, problem=current_champion.problem, registry_answered_at=now)
        try:
            release = self._fetch(number)
            # With a former release, no process has proved the current release yet, so it does not become the former one.
            if current_champion is not None and self._former_release is None:
                self._former_release = current_champion.release
            self._refused_version = None
            self._remove_other_versions(release)
            return Champion(release=release, registry_answered_at=now)
        except Exception as error:  # any error of MLflow, the artifact store or a damaged version
            if current_champion is None:
                raise
            problem = redacted(first_line(error))
            if problem != current_champion.problem:
                LOG.error("%s; version %s is still served", problem, current_champion.release.version)
            return Champion(release=current_champion.release, problem=problem, registry_answered_at=now)

    def _fetch(self, number: str | None) -> Release:
        """Return the package of a version. A version that was fetched before is not fetched again."""
        if number is None:
            raise StageError(
                f"the registered model {self._model_name!r} has no version with the alias {self._alias}; register one with "
                "`nightjar run`, or choose one with `nightjar promote`"
            )
        if number not in self._release_by_version:
            download_folder = self._folder / number
            try:
                self._release_by_version[number] = self._fetched(number, download_folder)
            except Exception:
                shutil.rmtree(download_folder, ignore_errors=True)
                raise
        return self._release_by_version[number]

    def _fetched(self, number: str, download_folder: Path) -> Release:
        client = connect(self._workspace)
        uri = f"models:/{self._model_name}/{number}"
        download_folder.mkdir(parents=True, exist_ok=True)
        try:
            folder, model_config = call_with_deadline(
                lambda: fetch_model(uri, client=client, workspace=self._workspace, download_folder=download_folder),
                uri=client.tracking_uri,
                timeout_s=FETCH_TIMEOUT_S,
            )
            verify_users(folder / "artifacts" / "package")  # once, because each process verifies only what it reads of them
        except NightjarError as error:
            raise type(error)(f"version {number} cannot be fetched: {error}") from None
        return Release(version=number, folder=folder / "artifacts" / "package", sha256=model_config[PACKAGE_SHA256_KEY])

    def _remove_other_versions(self, release: Release) -> None:
        """Remove the copies of versions that are neither served nor the version before. A mapped file stays readable."""
        kept_versions = {release.version, self._former_release and self._former_release.version}
        for version in [version for version in self._release_by_version if version not in kept_versions]:
            del self._release_by_version[version]
            shutil.rmtree(self._folder / version, ignore_errors=True)
