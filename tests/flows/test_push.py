"""The push of registered versions to a vector store: with `nightjar push`, and after a run."""

import shutil
from collections.abc import Callable
from pathlib import Path

import lancedb
import pytest
from typer.testing import CliRunner

from flows.champion import promote
from flows.cli.main import app
from flows.nightly import end_state
from flows.push import push_champion
from flows.settings.config_file import load_config
from recsys_core.errors import InputError, StageError
from recsys_core.manifests import RegistrationManifest
from tasks.registry.mlflow_client import connect
from tests.tasks.conftest import NUM_ITEMS, Stages, empty_plots, predicted_uris, stages, workspace  # noqa: F401  fixtures
from tests.tasks.registration import context_of, register_version

pytestmark = pytest.mark.usefixtures("empty_plots")

CONFIG = """
workspace: .
interactions: {paths: log.parquet, timestamp_column: timestamp}
registry: {model_name: m}
"""
STORE = "delivery: {stores: [{kind: lancedb, folder: vectors}]}"


@pytest.fixture
def registration(workspace: Path, stages: Callable[..., Stages], predicted_uris: list[str]) -> RegistrationManifest:  # noqa: F811
    return register_version(stages(), context_of(workspace, "one"))


@pytest.fixture
def file(workspace: Path) -> Path:  # noqa: F811
    path = workspace / "nightly.yaml"
    path.write_text(CONFIG + STORE)
    return path


def test_the_command_loads_the_champion_and_a_second_push_loads_nothing(file: Path, registration: RegistrationManifest) -> None:
    result = CliRunner().invoke(app, ["push", str(file)])
    assert result.exception is None
    assert "alias m names m_v1_" in result.output and f"{NUM_ITEMS} items loaded, overlap 100.0%" in result.output
    aliases = lancedb.connect(file.parent / "vectors").open_table("nightjar_aliases")
    (row,) = aliases.search().to_list()
    assert row["alias"] == "m" and row["collection"].startswith("m_v1_")
    again = CliRunner().invoke(app, ["push", str(file), "--version", "1"])
    assert f"{NUM_ITEMS} items, which were there" in again.output
    assert push_champion(load_config(file)) is None


def test_a_promotion_by_hand_reaches_the_store_and_reports_one_that_fails(
    file: Path,
    registration: RegistrationManifest,
    stages: Callable[..., Stages],  # noqa: F811
) -> None:
    folder = file.parent / "runs" / "20260102-000000-abcd" / "ingest_interactions"
    shutil.copytree(stages().dataset.interactions.folder, folder)  # the smoke test needs users
    client = connect(file.parent)
    for is_broken in (False, True):
        client.delete_registered_model_alias("m", "champion")
        if is_broken:
            shutil.rmtree(file.parent / "vectors")
            (file.parent / "vectors").write_text("a file, not a folder")
        state = promote.fn(str(file), version=1, reason="prices")
        assert state.name == "Promoted" and state.message is not None
        assert ("version 1 was not pushed" in state.message) == is_broken
        if not is_broken:
            assert lancedb.connect(file.parent / "vectors").open_table("nightjar_aliases").count_rows() == 1


def test_a_store_that_fails_does_not_change_the_end_of_the_run(file: Path, registration: RegistrationManifest) -> None:
    (file.parent / "vectors").write_text("a file, not a folder")
    alarm = push_champion(load_config(file))
    assert alarm is not None and alarm.startswith(f"version 1 was not pushed: lancedb {file.parent / 'vectors'}: ")
    assert "Remove the cause, and repeat the push with `nightjar push`" in alarm
    state = end_state(registration, run=context_of(file.parent, "one").run, notes=[alarm])
    assert state.name == "Promoted" and state.message is not None
    assert state.message.startswith("m version 1 is champion: ") and state.message.endswith(alarm)
    result = CliRunner().invoke(app, ["push", str(file)])
    assert isinstance(result.exception, StageError) and str(result.exception) == alarm


def test_without_a_store_a_run_pushes_nothing_and_the_command_names_the_setting(file: Path) -> None:
    file.write_text(CONFIG)
    assert push_champion(load_config(file)) is None
    result = CliRunner().invoke(app, ["push", str(file)])
    assert isinstance(result.exception, InputError) and "add one to delivery.stores" in str(result.exception)


def test_a_version_that_does_not_exist_is_an_alarm_after_a_run(file: Path, registration: RegistrationManifest) -> None:
    config = load_config(file, overrides=["registry.model_name=other"])
    alarm = push_champion(config)
    assert alarm is not None and alarm.startswith("the champion was not pushed: the registered model 'other' has no champion")
