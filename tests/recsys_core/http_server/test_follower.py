"""The replacement of the served version by a new version, unless the new version is damaged."""

import shutil
from pathlib import Path

import pytest

from recsys_core.errors import StageError
from recsys_core.http_server import metrics
from recsys_core.http_server.batching import ParsedRequest
from recsys_core.http_server.follower import ReleaseFollower
from recsys_core.http_server.release import RELEASE_FILE_NAME, Champion, Release, WorkerState
from recsys_core.manifests import PackageManifest
from recsys_core.serving.requests import parse
from tests.recsys_core.http_server.conftest import release_of


def write_release(release: Release, folder: Path) -> None:
    Champion(release=release, registry_answered_at=0.0).write(folder / RELEASE_FILE_NAME)


def version_of_answer(follower: ReleaseFollower) -> str:
    (answers,) = follower.respond([ParsedRequest(parse({"rows": [{}]}), is_similar=False)])
    assert not isinstance(answers, Exception)
    return answers[0].version


def write_damaged_package(package: PackageManifest, folder: Path, *, version: str) -> Release:
    """Write a copy of the package with a changed index, and return its release."""
    shutil.copytree(package.folder / "package", folder / "damaged")
    with (folder / "damaged" / "index.faiss").open("r+b") as file:
        file.seek(100)
        file.write(b"damaged")
    return release_of(package, version=version).model_copy(update={"folder": folder / "damaged"})


def test_another_version_replaces_the_served_version(
    follower: ReleaseFollower, package: PackageManifest, tmp_path: Path
) -> None:
    assert (version_of_answer(follower), follower.state.version) == ("7", "7")
    write_release(release_of(package, version="8"), tmp_path)
    follower.update()
    assert (version_of_answer(follower), follower.state.version) == ("8", "8")
    stored_state = WorkerState.read(tmp_path / "worker-0.json")
    assert stored_state is not None and (stored_state.version, stored_state.problem) == ("8", None)


def test_a_damaged_version_is_refused_once_and_the_served_version_stays(
    follower: ReleaseFollower, package: PackageManifest, tmp_path: Path
) -> None:
    served_model = follower._served_model
    write_release(write_damaged_package(package, tmp_path, version="9"), tmp_path)
    follower.update()
    assert follower._served_model is served_model and version_of_answer(follower) == "7"
    assert (follower.state.version, follower.state.refused_version) == ("7", "9")
    assert follower.state.problem is not None and "index.faiss" in follower.state.problem
    state_after_refusal = follower.state
    follower.update()  # the same version is not loaded again
    assert follower.state is state_after_refusal
    write_release(release_of(package, version="7"), tmp_path)
    follower.update()
    assert follower.state.problem is None


def test_the_state_of_the_registry_is_read_again_although_the_version_is_the_same(
    follower: ReleaseFollower, package: PackageManifest, tmp_path: Path
) -> None:
    for problem, is_registry_up in (("no answer", 0), (None, 1)):
        champion = Champion(release=release_of(package, version="7"), registry_problem=problem, registry_answered_at=0.0)
        champion.write(tmp_path / RELEASE_FILE_NAME)
        follower.update()
        assert follower.champion == champion
        (sample,) = metrics.REGISTRY_UP.collect()[0].samples
        assert sample.value == is_registry_up


def test_the_start_fails_if_the_champion_does_not_load(
    package: PackageManifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_release(write_damaged_package(package, tmp_path, version="9"), tmp_path)
    follower = ReleaseFollower(tmp_path, state_path=tmp_path / "worker-0.json", pid=1)
    with pytest.raises(StageError, match=r"index\.faiss"):
        follower.start()
    assert caplog.messages[-1].endswith("; no version is served")
