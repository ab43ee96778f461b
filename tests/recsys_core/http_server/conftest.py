"""A small served model, and clients of its HTTP application."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from recsys_core.http_server.app import create_app
from recsys_core.http_server.config import ServeConfig
from recsys_core.http_server.follower import ReleaseFollower
from recsys_core.http_server.release import RELEASE_FILE_NAME, Champion, Release
from recsys_core.manifests import PackageManifest
from recsys_core.serving.description import description_sha256
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.serving.conftest import ITEM_FILES, ModelBuilder
from tests.recsys_core.serving.conftest import build_packaged_model as build_packaged_model  # a fixture

ClientStarter = Callable[..., TestClient]


def release_of(package: PackageManifest, *, version: str) -> Release:
    return Release(version=version, folder=package.folder / "package", sha256=description_sha256(package))


@pytest.fixture(scope="session")
def package(build_packaged_model: ModelBuilder) -> PackageManifest:
    return build_packaged_model(item_files=ITEM_FILES, features=("user.number",)).package


@pytest.fixture(scope="session")
def retriever(package: PackageManifest) -> Retriever:
    return Retriever.load(package.folder, version="7")


@pytest.fixture
def follower(package: PackageManifest, tmp_path: Path) -> Iterator[ReleaseFollower]:
    Champion(release=release_of(package, version="7"), registry_answered_at=0.0).write(tmp_path / RELEASE_FILE_NAME)
    follower = ReleaseFollower(tmp_path, state_path=tmp_path / "worker-0.json", pid=os.getpid())
    follower.start()
    yield follower
    follower.stop()


@pytest.fixture
def start_client(follower: ReleaseFollower) -> Iterator[ClientStarter]:
    """A function that starts an application and returns its client. `settings`: settings of `ServeConfig`."""
    with ExitStack() as stack:

        def start(*, token: str | None = None, **settings: object) -> TestClient:
            app = create_app(follower, limits=ServeConfig.model_validate(settings), token=token)
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield start
