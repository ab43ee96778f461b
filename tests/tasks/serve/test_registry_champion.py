"""The champion of a registry outside of the server's workspace: copies of versions, and the last served version."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from recsys_core.errors import InputError, StageError, TrackingServerError
from recsys_core.serving.retriever import Retriever
from tasks.registry.mlflow_client import connect, tracking_uri
from tasks.serve import registry_champion
from tasks.serve.registry_champion import RegistryChampion
from tests.tasks.conftest import AddVersions


@pytest.fixture
def set_champion(workspace: Path, add_versions: AddVersions, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that makes one of three versions champion. The MLflow of the versions is not in the server's workspace."""
    add_versions("good", "good", "good")
    client = connect(workspace)
    client.delete_registered_model_alias("m", "champion")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri(workspace))
    return lambda version: client.set_registered_model_alias("m", "champion", version)


def champion_in(server_folder: Path) -> RegistryChampion:
    return RegistryChampion(server_folder / "workspace", model_name="m", alias="champion", folder=server_folder / "versions")


def test_only_copies_of_versions_that_are_no_longer_needed_are_removed(
    set_champion: Callable[[str], None], workspace: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server_folder = tmp_path_factory.mktemp("server")
    champion = champion_in(server_folder)
    artifact_paths = sorted((workspace / "mlartifacts").rglob("*"))
    for version in ("1", "2", "3"):
        set_champion(version)
        release = champion.poll().release
        assert release.version == version and release.folder.is_relative_to(server_folder / "versions" / version)
        Retriever.load(release.folder, sha256=release.sha256)
        champion.accept()
    assert sorted(path.name for path in (server_folder / "versions").iterdir()) == ["2", "3"]
    assert sorted((workspace / "mlartifacts").rglob("*")) == artifact_paths


def test_after_a_refused_version_the_last_served_version_is_served_again(
    set_champion: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_champion, "FIRST_REFUSAL_S", 0.0)
    champion = champion_in(tmp_path_factory.mktemp("server"))
    set_champion("1")
    served_release = champion.poll().release
    champion.accept()
    set_champion("2")
    champion.poll()
    set_champion("3")  # before version 2 is served
    assert champion.poll().release.version == "3"
    for _ in range(3):
        former_champion = champion.refuse("it does not load")
        assert former_champion is not None and former_champion.problem is not None
        assert former_champion.release == served_release
        Retriever.load(served_release.folder, sha256=served_release.sha256)
        assert champion.poll().release.version == "3"  # the refused version is tried again


def test_a_version_with_a_damaged_file_is_not_served_and_not_downloaded_again_at_once(
    set_champion: Callable[[str], None],
    workspace: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    champion = champion_in(tmp_path_factory.mktemp("server"))
    set_champion("1")
    served_release = champion.poll().release
    for users_path in (workspace / "mlartifacts").rglob("users.arrow"):
        users_bytes = bytearray(users_path.read_bytes())
        users_bytes[len(users_bytes) // 2] ^= 1
        users_path.write_bytes(users_bytes)
    set_champion("2")
    served_champion = champion.poll()
    assert served_champion.release == served_release and served_champion.problem is not None
    assert "version 2 cannot be fetched" in served_champion.problem
    assert "users.arrow: the file was changed" in served_champion.problem
    with monkeypatch.context() as patch:
        patch.setattr(registry_champion, "fetch_model", Mock(side_effect=AssertionError("a second download")))
        repeated_poll = champion.poll()
    assert (repeated_poll.release, repeated_poll.problem) == (served_champion.release, served_champion.problem)


def test_a_refused_version_is_downloaded_again_only_if_its_copy_is_damaged(
    set_champion: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_champion, "FIRST_REFUSAL_S", 0.0)
    champion = champion_in(tmp_path_factory.mktemp("server"))
    set_champion("1")
    champion.poll()
    champion.accept()
    set_champion("2")
    refused_release = champion.poll().release
    assert champion.refuse("not enough memory") is not None
    with monkeypatch.context() as patch:
        patch.setattr(registry_champion, "fetch_model", Mock(side_effect=AssertionError("a second download")))
        assert champion.poll().release == refused_release
    damaged_file = refused_release.folder / "index.faiss"
    damaged_file.write_bytes(damaged_file.read_bytes()[:-1])  # as after a download that the store cut short
    assert champion.refuse("index.faiss: the file was changed") is not None
    release = champion.poll().release
    assert Retriever.load(release.folder, sha256=release.sha256, version="2").version == "2"


def test_the_time_until_the_next_attempt_doubles_until_the_version_is_served(
    set_champion: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(registry_champion.time, "monotonic", lambda: now_s)
    champion = champion_in(tmp_path_factory.mktemp("server"))
    set_champion("1")
    champion.poll()
    champion.accept()
    set_champion("2")
    for wait_s in (30, 60, 120, 240, 480, 600, 600):
        assert champion.poll().release.version == "2"
        assert champion.poll().release.version == "2"  # while the processes load the version
        assert champion.refuse("it does not load") is not None
        champion.accept()  # all processes serve version 1 again
        now_s += wait_s - 1
        served_champion = champion.poll()
        assert (served_champion.release.version, served_champion.problem) == ("1", "version 2 is not served: it does not load")
        now_s += 1
    champion.poll()
    champion.accept()
    set_champion("1")
    champion.poll()
    champion.accept()
    set_champion("2")
    champion.poll()
    champion.refuse("it does not load")
    now_s += 30
    assert champion.poll().release.version == "2"


@pytest.mark.parametrize("error_type", [TrackingServerError, OSError])
def test_a_download_that_fails_for_a_while_is_repeated_by_the_next_poll(
    set_champion: Callable[[str], None],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    error_type: type[Exception],
) -> None:
    champion = champion_in(tmp_path_factory.mktemp("server"))
    set_champion("1")
    champion.poll()
    set_champion("2")
    with monkeypatch.context() as patch:
        patch.setattr(registry_champion, "fetch_model", Mock(side_effect=error_type("no connection")))
        served_champion = champion.poll()
    assert served_champion.release.version == "1" and "no connection" in (served_champion.problem or "")
    assert champion.poll().release.version == "2"


def test_a_removed_alias_is_a_problem_also_after_a_refusal(
    set_champion: Callable[[str], None], workspace: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    champion = champion_in(tmp_path_factory.mktemp("server"))
    for version in ("1", "2"):
        set_champion(version)
        champion.poll()
    champion.refuse("it does not load")
    set_champion("1")
    assert champion.poll().problem is None
    connect(workspace).delete_registered_model_alias("m", "champion")
    served_champion = champion.poll()
    assert served_champion.release.version == "1" and "no version with the alias" in (served_champion.problem or "")


def test_only_a_missing_champion_can_be_promoted(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    connect(workspace).create_registered_model("m")
    for alias, fix in (("champion", "or choose one with `nightjar promote`"), ("weekly", "list the aliases with `nightjar")):
        champion = RegistryChampion(workspace, model_name="m", alias=alias, folder=tmp_path_factory.mktemp("server"))
        with pytest.raises(InputError, match=f"has no version with the alias {alias}; .*{fix}"):
            champion.poll()


def test_a_failed_download_leaves_no_files(
    set_champion: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_folder = tmp_path_factory.mktemp("server")

    def fail_during_download(*_: object, download_folder: Path, **__: object) -> None:
        (download_folder / "half").write_text("half")
        raise StageError("the connection broke")

    monkeypatch.setattr(registry_champion, "fetch_model", fail_during_download)
    set_champion("1")
    with pytest.raises(StageError, match="version 1 cannot be fetched: the connection broke"):
        champion_in(server_folder).poll()
    assert list((server_folder / "versions").iterdir()) == []
