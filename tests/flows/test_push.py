"""The push of registered versions to a vector store: with `nightjar push`, and after a run."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.tasks.conftest import NUM_ITEMS, Stages, build_stages, empty_plots, in_process_predictions, workspace  # noqa: F401
from tests.tasks.registration import prepare_run, register_version

pytestmark = pytest.mark.usefixtures("empty_plots")

CONFIG = """
workspace: .
interactions: {paths: log.parquet, timestamp_column: timestamp}
registry: {model_name: m}
"""
STORE_SETTING = "delivery: {stores: [{kind: lancedb, folder: vectors}]}"


@pytest.fixture
def registration(
    workspace: Path,  # noqa: F811
    build_stages: Callable[..., Stages],  # noqa: F811
    in_process_predictions: list[str],  # noqa: F811
) -> RegistrationManifest:
    """The registration of a first version, which is champion."""
    return register_version(build_stages(), prepare_run(workspace, "one"))


def alias_rows(config_path: Path) -> list[dict[str, Any]]:
    """Return the rows of the alias table in the vector store."""
    import lancedb  # a second of imports

    return lancedb.connect(config_path.parent / "vectors").open_table("nightjar_aliases").search().to_list()


@pytest.fixture
def config_path(workspace: Path) -> Path:  # noqa: F811
    path = workspace / "nightly.yaml"
    path.write_text(CONFIG + STORE_SETTING)
    return path


def test_the_command_loads_the_champion_and_a_second_push_loads_nothing(
    config_path: Path, registration: RegistrationManifest
) -> None:
    first_result = CliRunner().invoke(app, ["push", str(config_path)])
    assert first_result.exception is None
    assert "alias m names m_v1_" in first_result.output and f"{NUM_ITEMS} items loaded, overlap 100.0 %" in first_result.output
    (row,) = alias_rows(config_path)
    assert row["alias"] == "m" and row["collection"].startswith("m_v1_")
    second_result = CliRunner().invoke(app, ["push", str(config_path), "--version", "1"])
    assert f"{NUM_ITEMS} items, which the store already had" in second_result.output
    assert push_champion(load_config(config_path)) is None


def test_a_manual_promotion_pushes_the_version_and_reports_a_store_that_fails(
    config_path: Path,
    registration: RegistrationManifest,
    build_stages: Callable[..., Stages],  # noqa: F811
) -> None:
    users_folder = config_path.parent / "runs" / "20260102-000000-abcd" / "ingest_interactions"
    shutil.copytree(build_stages().dataset.interactions.folder, users_folder)  # the smoke test reads users from here
    client = connect(config_path.parent)
    for is_store_broken in (False, True):
        client.delete_registered_model_alias("m", "champion")
        if is_store_broken:
            shutil.rmtree(config_path.parent / "vectors")
            (config_path.parent / "vectors").write_text("a file, not a folder")
        state = promote.fn(str(config_path), version=1, reason="prices")
        assert state.name == "Promoted" and state.message is not None
        assert ("version 1 was not pushed" in state.message) == is_store_broken
        if not is_store_broken:
            assert len(alias_rows(config_path)) == 1


def test_a_store_that_fails_changes_the_message_but_not_the_state_of_a_run(
    config_path: Path, registration: RegistrationManifest
) -> None:
    (config_path.parent / "vectors").write_text("a file, not a folder")
    alarm = push_champion(load_config(config_path))
    assert alarm is not None and alarm.startswith(f"version 1 was not pushed: lancedb {config_path.parent / 'vectors'}: ")
    assert "Remove the cause, and repeat the push with `nightjar push`" in alarm
    state = end_state(registration, run=prepare_run(config_path.parent, "one").run, notes=[alarm])
    assert state.name == "Promoted" and state.message is not None
    assert state.message.startswith("m version 1 is champion: ") and state.message.endswith(alarm)
    result = CliRunner().invoke(app, ["push", str(config_path)])
    assert isinstance(result.exception, StageError) and str(result.exception) == alarm


def test_without_a_store_a_run_pushes_nothing_and_the_command_names_the_setting(config_path: Path) -> None:
    config_path.write_text(CONFIG)
    assert push_champion(load_config(config_path)) is None
    result = CliRunner().invoke(app, ["push", str(config_path)])
    assert isinstance(result.exception, InputError) and "add one to delivery.stores" in str(result.exception)


def test_a_push_without_a_champion_returns_an_alarm(config_path: Path, registration: RegistrationManifest) -> None:
    config = load_config(config_path, overrides=["registry.model_name=other"])
    alarm = push_champion(config)
    assert alarm is not None and alarm.startswith("the champion was not pushed: the registered model 'other' has no champion")
