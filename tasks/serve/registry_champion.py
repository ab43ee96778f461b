"""The champion of a registry, with its package on a local disk."""

import logging
import shutil
import time
from pathlib import Path

from recsys_core.errors import InputError, NightjarError, StageError, TrackingServerError, first_line, redacted
from recsys_core.http_server.release import Champion, Release
from recsys_core.serving.description import is_unchanged, verify_users
from tasks.registry.loading import PACKAGE_SHA256_KEY, fetch_model
from tasks.registry.mlflow_client import call_with_deadline, connect
from tasks.registry.releases import version_number_by_alias

LOG = logging.getLogger("nightjar")
FETCH_TIMEOUT_S = 3_600.0
FIRST_REFUSAL_S, MAX_REFUSAL_S = 30.0, 600.0
"""Time after which a version that did not load is tried again, at first and at most. The time doubles with each refusal.

The download may have been damaged, or the memory or the disk may have been full.
"""


class RegistryChampion:
    """The version with an alias of a registered model, and the package of the version on this machine.

    Args:
        workspace: workspace of the pipeline, whose MLflow is used unless MLFLOW_TRACKING_URI is set.
        alias: alias of the version to serve.
        folder: folder for copies of versions from another MLflow.
    """

    def __init__(self, workspace: Path, *, model_name: str, alias: str, folder: Path) -> None:
        self._workspace, self._model_name, self._alias, self._folder = workspace, model_name, alias, folder
        self._champion: Champion | None = None
        self._former_release: Release | None = None
        self._refused_version: str | None = None
        self._refusal_s, self._refused_until_s = 0.0, 0.0
        self._release_by_version: dict[str, Release] = {}

    def poll(self) -> Champion:
        """Return the version to serve: the champion, or the current version if the registry or the download fails.

        Raises:
            TrackingServerError, StageError, InputError: at the first call, when there is no current version.
        """
        try:
            version_number = self._champion_number()
        except Exception as error:  # any error of the registry, or of the disk with its database
            if self._champion is None:
                raise
            down_since = self._champion.registry_down_since or time.time()
            if self._champion.registry_problem is None:
                LOG.warning("%s; version %s is still served", redacted(first_line(error)), self._champion.release.version)
            problem_fields = {"registry_problem": redacted(first_line(error)), "registry_down_since": down_since}
            self._champion = self._champion.model_copy(update=problem_fields)
            return self._champion
        if self._champion is not None and self._champion.registry_problem is not None:
            LOG.info("the registry answers again")
        self._champion = self._champion_for(version_number)
        return self._champion

    def accept(self) -> None:
        """Forget the former version and a refusal of the current version, because all processes serve the current version."""
        self._former_release = None
        if self._champion is not None and self._champion.release.version == self._refused_version:
            self._refused_version = None

    def refuse(self, problem: str) -> Champion | None:
        """Serve the former version, because a process cannot serve the current version. Return None without a former version.

        The refused version is tried again after FIRST_REFUSAL_S, with a new copy of its package if the copy is damaged. If it
        is refused again, the time doubles, up to MAX_REFUSAL_S. If another version was the champion in the meantime, the
        refused version is tried again as soon as it is the champion again.
        """
        if self._champion is None or self._former_release is None:
            return None
        self._refuse_for_a_while(self._champion.release.version)
        problem = f"version {self._refused_version} is not served: {problem}"
        LOG.error("%s; version %s is served again", problem, self._former_release.version)
        self._champion = self._champion.model_copy(update={"release": self._former_release, "problem": problem})
        self._former_release = None
        return self._champion

    def _refuse_for_a_while(self, version_number: str | None) -> None:
        is_repeated = version_number == self._refused_version
        self._refusal_s = min(2 * self._refusal_s, MAX_REFUSAL_S) if is_repeated else FIRST_REFUSAL_S
        self._refused_version, self._refused_until_s = version_number, time.monotonic() + self._refusal_s

    def _champion_number(self) -> str | None:
        client = connect(self._workspace)
        number_by_alias = call_with_deadline(lambda: version_number_by_alias(client, self._model_name), uri=client.tracking_uri)
        return (number_by_alias or {}).get(self._alias)

    def _champion_for(self, version_number: str | None) -> Champion:
        """Return the version to serve after the registry has answered.

        Args:
            version_number: number of the version with the alias; None if no version has the alias.
        """
        now = time.time()
        current_champion = self._champion
        if version_number != self._refused_version:
            self._refused_version = None
        if current_champion is not None and version_number == current_champion.release.version:
            return Champion(release=current_champion.release, registry_answered_at=now)
        is_refused = version_number is not None and version_number == self._refused_version
        if current_champion is not None and is_refused and time.monotonic() < self._refused_until_s:
            return Champion(release=current_champion.release, problem=current_champion.problem, registry_answered_at=now)
        try:
            if is_refused and version_number is not None:
                self._remove_damaged_copy(version_number)
            release = self._release_of(version_number)
            # An older former release is kept, because perhaps not all processes have loaded the current release.
            if current_champion is not None and self._former_release is None:
                self._former_release = current_champion.release
            self._remove_other_versions(release)
            return Champion(release=release, registry_answered_at=now)
        except Exception as error:  # any error of MLflow, the artifact store or a damaged version
            if current_champion is None:
                raise
            if isinstance(error, StageError) and not isinstance(error, TrackingServerError):
                self._refuse_for_a_while(version_number)  # each attempt downloads the damaged version
            problem = redacted(first_line(error))
            if problem != current_champion.problem:
                LOG.error("%s; version %s is still served", problem, current_champion.release.version)
            return Champion(release=current_champion.release, problem=problem, registry_answered_at=now)

    def _release_of(self, version_number: str | None) -> Release:
        """Return the release of a version. The package is downloaded at the first call."""
        if version_number is None:
            fix = "list the aliases with `nightjar releases`"
            if self._alias == "champion":
                fix = "register one with `nightjar run`, or choose one with `nightjar promote`"
            raise InputError(f"the registered model {self._model_name!r} has no version with the alias {self._alias}; {fix}")
        if version_number not in self._release_by_version:
            download_folder = self._folder / version_number
            try:
                self._release_by_version[version_number] = self._download_release(version_number, download_folder)
            except Exception:
                shutil.rmtree(download_folder, ignore_errors=True)
                raise
        return self._release_by_version[version_number]

    def _download_release(self, version_number: str, download_folder: Path) -> Release:
        client = connect(self._workspace)
        uri = f"models:/{self._model_name}/{version_number}"
        download_folder.mkdir(parents=True, exist_ok=True)
        try:
            folder, model_config = call_with_deadline(
                lambda: fetch_model(
                    uri,
                    client=client,
                    workspace=self._workspace,
                    download_folder=download_folder,
                    copies_local_files=True,  # because the cleaning of another workspace may remove them
                ),
                uri=client.tracking_uri,
                timeout_s=FETCH_TIMEOUT_S,
            )
            verify_users(folder / "artifacts" / "package")  # all users, because a process verifies only the users that it reads
        except NightjarError as error:
            raise type(error)(f"version {version_number} cannot be fetched: {error}") from None
        return Release(version=version_number, folder=folder / "artifacts" / "package", sha256=model_config[PACKAGE_SHA256_KEY])

    def _remove_other_versions(self, release: Release) -> None:
        """Remove the copies of versions other than the current and the former version. A file that is mapped stays readable."""
        kept_versions = {release.version, self._former_release and self._former_release.version}
        for version in [version for version in self._release_by_version if version not in kept_versions]:
            self._remove_copy(version)

    def _remove_damaged_copy(self, version_number: str) -> None:
        release = self._release_by_version.get(version_number)
        if release is None or not is_unchanged(release.folder, sha256=release.sha256):
            self._remove_copy(version_number)

    def _remove_copy(self, version_number: str) -> None:
        self._release_by_version.pop(version_number, None)
        shutil.rmtree(self._folder / version_number, ignore_errors=True)
