"""The replacement of the served version: by another one, and not by a damaged one."""

import shutil
from pathlib import Path

import pytest

from recsys_core.errors import StageError
from recsys_core.http_server.follower import Follower
from recsys_core.http_server.release import RELEASE_NAME, Champion, Release, WorkerState
from recsys_core.http_server.served_model import Query
from recsys_core.manifests import PackageManifest
from recsys_core.serving.requests import parse
from tests.recsys_core.http_server.conftest import release_of


def write(release: Release, folder: Path) -> None:
    Champion(release=release, registry_answered_at=0.0).write(folder / RELEASE_NAME)


def answering_version(follower: Follower) -> str:
    (answers,) = follower.respond([Query(parse({"rows": [{}]}), is_similar=False)])
    assert not isinstance(answers, Exception)
    return answers[0].version


def damaged(package: PackageManifest, folder: Path, *, version: str) -> Release:
    shutil.copytree(package.folder / "package", folder / "damaged")
    with (folder / "damaged" / "index.faiss").open("r+b") as file:
        file.seek(100)
        file.write(b"damaged")
    return release_of(package, version=version).model_copy(update={"folder": folder / "damaged"})


def test_another_version_replaces_the_served_one(follower: Follower, package: PackageManifest, tmp_path: Path) -> None:
    assert (answering_version(follower), follower.state.version) == ("7", "7")
    write(release_of(package, version="8"), tmp_path)
    follower.check()
    assert (answering_version(follower), follower.state.version) == ("8", "8")
    state = WorkerState.read(tmp_path / "worker-0.json")
    assert state is not None and (state.version, state.problem) == ("8", None)


def test_a_damaged_version_is_refused_once_and_the_served_one_stays(
    follower: Follower, package: PackageManifest, tmp_path: Path
) -> None:
    served = follower._model
    write(damaged(package, tmp_path, version="9"), tmp_path)
    follower.check()
    assert follower._model is served and answering_version(follower) == "7"
    assert (follower.state.version, follower.state.refused_version) == ("7", "9")
    assert follower.state.problem is not None and "index.faiss" in follower.state.problem
    state = follower.state
    follower.check()  # the same version is not loaded again
    assert follower.state is state
    write(release_of(package, version="7"), tmp_path)
    follower.check()
    assert follower.state.problem is None


def test_without_a_version_that_loads_the_start_fails(package: PackageManifest, tmp_path: Path) -> None:
    write(damaged(package, tmp_path, version="9"), tmp_path)
    follower = Follower(tmp_path, state_path=tmp_path / "worker-0.json", pid=1)
    with pytest.raises(StageError, match=r"index\.faiss"):
        follower.start()
