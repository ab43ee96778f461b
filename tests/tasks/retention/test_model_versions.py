"""Retention of model versions: which versions and files are deleted, and which runs are kept for their versions."""

import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlparse

import mlflow
import pytest
from mlflow import MlflowClient

from recsys_core.errors import TrackingServerError
from tasks.registry.mlflow_client import RUN_ID_TAG, connect
from tasks.registry.releases import FORMER_CHAMPION_TAG, REASONS_TAG, REFIT_OF_TAG
from tasks.retention.clean import clean
from tasks.retention.config import RetentionConfig
from tasks.retention.model_versions import delete_versions, find_aliased_run_ids, find_old_versions
from tasks.runs.run import Run
from tests.tasks.retention.run_folders_by_hand import run_ids

AddRun = Callable[..., Run]


@pytest.fixture
def client(workspace: Path) -> MlflowClient:
    """A client of an MLflow with the registered model m, which has no versions."""
    client = connect(workspace)
    mlflow.set_tracking_uri(client.tracking_uri)  # create_model_version reads the logged model from this server
    client.create_experiment("e", artifact_location=(workspace / "mlartifacts").as_uri())
    client.create_registered_model("m")
    return client


def add_version(client: MlflowClient, run_id: str | None, *, tags: dict[str, str] | None = None) -> Path:
    """Register a version of m, by a person if `run_id` is None. Return the folder of the version's files."""
    experiment = client.get_experiment_by_name("e")
    assert experiment is not None
    logged_model = client.create_logged_model(experiment.experiment_id, name="retriever")
    folder = Path(urlparse(logged_model.artifact_location).path)
    folder.mkdir(parents=True)
    (folder / "values.npy").write_bytes(bytes(10_000))
    tags = ({RUN_ID_TAG: run_id, REASONS_TAG: "r"} if run_id else {}) | (tags or {})
    client.create_model_version("m", f"models:/{logged_model.model_id}", model_id=logged_model.model_id, tags=tags)
    return folder


def version_numbers(client: MlflowClient) -> set[int]:
    return {int(version.version) for version in client.search_model_versions("name = 'm'")}


def test_only_old_versions_that_are_not_used_are_deleted_with_their_files(client: MlflowClient) -> None:
    folder_by_number = {version_number: add_version(client, f"2026{version_number:02}") for version_number in range(1, 11)}
    add_version(client, None)  # version 11
    client.set_registered_model_alias("m", "champion", "2")
    for version_number in (3, 4, 5, 6, 7):
        client.set_model_version_tag("m", str(version_number), FORMER_CHAMPION_TAG, str(version_number))
    client.delete_model_version_tag("m", "8", REASONS_TAG)  # a version in the gate has no reasons yet
    client.set_registered_model_alias("m", "shadow", "1")
    old_versions = find_old_versions(client, "m", num_newest=2)
    assert [str(version.version) for version in old_versions] == ["3", "4", "9"]
    client.set_registered_model_alias("m", "shadow", "4")  # a person moves the alias after the search
    assert [str(version.version) for version in delete_versions(client, old_versions)] == ["3", "9"]
    assert version_numbers(client) == {1, 2, 4, 5, 6, 7, 8, 10, 11}
    assert {version_number for version_number, folder in folder_by_number.items() if not folder.exists()} == {3, 9}
    assert client.get_model_version_by_alias("m", "champion").version == 2
    assert [str(version.version) for version in find_old_versions(client, "m", num_newest=2)] == ["1"]


def test_the_version_that_a_kept_refit_repeats_is_kept_after_many_refreshes(client: MlflowClient) -> None:
    add_version(client, "1")
    for version_number in range(2, 8):  # a refit of version 1, which was refreshed five times
        add_version(client, "1", tags={REFIT_OF_TAG: "1"})
        client.set_model_version_tag("m", str(version_number - 1), FORMER_CHAMPION_TAG, str(version_number))
    client.set_registered_model_alias("m", "champion", "7")
    assert [str(version.version) for version in find_old_versions(client, "m", num_newest=1)] == ["2", "3"]


def test_the_former_champions_of_other_runs_are_kept_after_many_refreshes(client: MlflowClient) -> None:
    for run_id in ("1", "2", "3", "4"):
        for _ in range(5):  # the version of a run, which was refreshed four times
            add_version(client, run_id)
    for version_number in range(1, 21):
        client.set_model_version_tag("m", str(version_number), FORMER_CHAMPION_TAG, str(version_number))
    add_version(client, "4")
    client.set_registered_model_alias("m", "champion", "21")
    removed_numbers = {int(version.version) for version in find_old_versions(client, "m", num_newest=1)}
    # The latest version of each of the other runs, the three latest former champions, and the champion are kept.
    assert {*range(1, 22)} - removed_numbers == {5, 10, 15, 18, 19, 20, 21}


@pytest.mark.parametrize("num_levels_up", [0, 1], ids=["artifact folder", "parent folder"])
def test_a_version_whose_files_are_behind_a_link_is_kept(client: MlflowClient, tmp_path: Path, num_levels_up: int) -> None:
    artifact_folder = add_version(client, "1")
    add_version(client, "2")
    old_versions = find_old_versions(client, "m", num_newest=1)
    linked_folder, archive = (artifact_folder, *artifact_folder.parents)[num_levels_up], tmp_path / "archive"
    linked_folder.rename(archive)
    linked_folder.symlink_to(archive)
    assert find_old_versions(client, "m", num_newest=1) == []
    assert delete_versions(client, old_versions) == []  # planned before the folder became a link
    assert len([*archive.rglob("values.npy")]) == 1
    assert version_numbers(client) == {1, 2}


def test_a_version_whose_deletion_was_interrupted_is_deleted_by_the_next_clean(client: MlflowClient) -> None:
    folder = add_version(client, "1")
    add_version(client, "2")
    (old_version,) = find_old_versions(client, "m", num_newest=1)
    (folder / "values.npy").unlink()
    client.delete_logged_model(folder.parent.name)
    assert find_old_versions(client, "m", num_newest=1)[0].version in (1, "1")
    assert delete_versions(client, [old_version]) == delete_versions(client, [old_version]) == [old_version]
    assert version_numbers(client) == {2}


def test_a_version_that_has_been_in_the_gate_for_a_day_is_deleted(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run_id in ("1", "2"):
        add_version(client, run_id)
    client.delete_model_version_tag("m", "1", REASONS_TAG)
    assert find_old_versions(client, "m", num_newest=1) == []
    next_day_s = time.time() + 86_401
    monkeypatch.setattr(time, "time", lambda: next_day_s)
    assert [str(version.version) for version in find_old_versions(client, "m", num_newest=1)] == ["1"]


def test_the_aliased_runs_include_all_runs_with_a_version_that_is_in_no_registry(
    client: MlflowClient, workspace: Path, add_run: AddRun
) -> None:
    for index in range(3):
        add_run(workspace, f"2026{index}")
        add_version(client, f"2026{index}")
    client.set_registered_model_alias("m", "champion", "1")
    client.set_registered_model_alias("m", "challenger", "3")
    assert find_aliased_run_ids(client, workspace, model_name="m") == {"20260", "20262"}
    client.delete_registered_model("m")
    assert find_aliased_run_ids(client, workspace, model_name="other") == {"20260", "20261", "20262"}


def test_runs_with_a_version_stay_whole_if_the_registry_does_not_exist(
    tmp_path: Path, add_run: AddRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for index in range(4):
        add_run(tmp_path, f"2026{index}", end="complete" if index == 1 else "rejected")
    removals = clean(tmp_path, RetentionConfig(keep_full_runs=1, keep_report_runs=1), model_name="m")
    assert [removal.run_id for removal in removals.run_removals] == ["20260", "20262"]
    assert not (tmp_path / "mlflow.db").exists()


def test_nothing_is_removed_if_the_aliases_cannot_be_read(
    workspace: Path, add_run: AddRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(4):
        add_run(workspace, f"2026{index}")
    (workspace / "mlflow.db").write_bytes(b"no database, but longer than one hundred bytes: " * 10)
    with pytest.raises(TrackingServerError):
        clean(workspace, RetentionConfig(keep_full_runs=1, keep_report_runs=1), model_name="m")
    assert len(run_ids(workspace)) == 4
    assert not list(workspace.rglob("reduced.json"))


def test_a_clean_returns_its_removals_and_the_next_clean_finds_nothing(
    client: MlflowClient, workspace: Path, add_run: AddRun
) -> None:
    config = RetentionConfig(keep_full_runs=1, keep_report_runs=3, keep_versions=1)
    for index in range(5):
        add_run(workspace, f"2026{index}")
        add_version(client, f"2026{index}")
    client.set_registered_model_alias("m", "champion", "1")
    removals = clean(workspace, config, model_name="m")
    assert {removal.run_id: removal.action for removal in removals.run_removals} == {
        "20261": "remove",
        "20262": "reduce",
        "20263": "reduce",
    }
    assert [str(version.version) for version in removals.versions] == ["2", "3", "4"]
    assert removals.freed_bytes > 100_000
    second_removals = clean(workspace, config, model_name="m")
    assert (second_removals.run_removals, second_removals.versions) == ([], [])
