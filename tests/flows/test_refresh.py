"""The command and the flow that refresh the champion."""

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.client.schemas.objects import State
from ruamel.yaml import YAML
from typer.testing import CliRunner

from flows import refresh as refresh_flow
from flows.cli.main import app
from flows.refresh import refresh
from recsys_core.errors import InputError, StageError
from recsys_core.refresh import package
from tasks.registry.mlflow_client import connect
from tests.recsys_core.refresh.small_pipeline import FEATURES, ITEMS, SmallPipeline, build_pipeline, write_items, write_vectors
from tests.tasks.conftest import workspace  # noqa: F401  a fixture
from tests.tasks.refresh.test_refreshed_version import make_champion, version_by_alias


@pytest.fixture(scope="module")
def parent_pipeline(tmp_path_factory: pytest.TempPathFactory) -> SmallPipeline:
    return build_pipeline(tmp_path_factory.mktemp("parent") / "files")


@pytest.fixture
def config_path(workspace: Path, parent_pipeline: SmallPipeline) -> Path:  # noqa: F811
    item_settings = {
        "paths": str(parent_pipeline.input_folder / "items.parquet"),
        "id_column": "item_id",
        "title_column": "title",
        "filter_columns": ["genre", "in_stock"],
        "features": [dict(feature) for feature in FEATURES],
    }
    settings = {
        "workspace": str(workspace),
        "interactions": {
            "paths": str(parent_pipeline.input_folder / "log.parquet"),
            "order_column": "position",
            "split": {"kind": "leave_last_out"},
        },
        "embeddings": {"paths": str(parent_pipeline.input_folder / "vectors.parquet"), "vector_column": "vector"},
        "features": {"items": item_settings},
        "registry": {"model_name": "m"},
    }
    path = workspace / "nightly.yaml"
    YAML().dump(settings, path)
    return path


@pytest.fixture
def client(config_path: Path, parent_pipeline: SmallPipeline) -> MlflowClient:
    """A client of MLflow, in which the parent is champion. The input files have the items of the parent."""
    client = connect(config_path.parent)
    make_champion(client, config_path.parent, parent_pipeline)
    set_items(parent_pipeline, ITEMS)
    return client


def set_items(parent_pipeline: SmallPipeline, item_ids: Any) -> None:
    """Replace the item file and the vector file by files with these item ids."""
    write_vectors(parent_pipeline.input_folder, item_ids)
    write_items(parent_pipeline.input_folder, item_ids)


def test_the_command_refreshes_the_champion_and_the_releases_show_the_lineage(
    config_path: Path, client: MlflowClient, parent_pipeline: SmallPipeline
) -> None:
    set_items(parent_pipeline, range(ITEMS.start + 2, ITEMS.stop + 10))
    refresh_result = CliRunner().invoke(app, ["refresh", str(config_path)])
    assert refresh_result.exit_code == 0, refresh_result.output
    expected_summary = (
        "m version 2, refreshed from version 1 (10 items added, 2 removed, 0 changed), is champion; changed vectors: runs:/"
    )
    assert expected_summary in " ".join(refresh_result.output.split())
    assert "duration" in refresh_result.output
    releases_output = " ".join(CliRunner().invoke(app, ["releases", str(config_path)]).output.split())
    assert (
        "Refreshed from version 1: 10 items added, 2 removed, 0 changed" in releases_output
        and "2 (from 1) champion" in releases_output
    )
    query_result = CliRunner().invoke(app, ["query", str(config_path), "--item", "1305", "-k", "3"])
    assert query_result.exit_code == 0 and "m version 2, item 1305" in query_result.output


def test_a_refresh_without_changed_items_succeeds_and_registers_nothing(config_path: Path, client: MlflowClient) -> None:
    result = CliRunner().invoke(app, ["refresh", str(config_path)])
    assert result.exit_code == 0 and "no item has changed, so no version is registered" in result.output
    state: State[Any] = refresh.fn(str(config_path))
    assert (state.name, version_by_alias(client)) == ("Unchanged", {"champion": "1"})


def test_a_promoted_refresh_is_delivered_and_its_state_names_the_delivery_problems(
    config_path: Path, client: MlflowClient, parent_pipeline: SmallPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivered_pipelines = []
    monkeypatch.setattr(
        refresh_flow, "deliver", lambda config: delivered_pipelines.append(config.name) or ["the store is full"]
    )
    set_items(parent_pipeline, range(ITEMS.start, ITEMS.stop + 10))
    state: State[Any] = refresh.fn(str(config_path))
    assert state.name == "Promoted" and len(delivered_pipelines) == 1
    assert str(state.message).endswith("; the store is full")


def test_a_refused_refresh_fails_and_names_the_failed_check(
    config_path: Path, client: MlflowClient, parent_pipeline: SmallPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_index = package.write_index
    monkeypatch.setattr(package, "write_index", lambda kind, vector_ID, paths: write_index(kind, vector_ID[::-1].copy(), paths))
    monkeypatch.setattr(refresh_flow, "deliver", lambda *_, **__: pytest.fail("the refused version was delivered"))
    set_items(parent_pipeline, range(ITEMS.start, ITEMS.stop + 10))
    state: State[Any] = refresh.fn(str(config_path))
    assert (state.name, state.is_failed()) == ("Refused", True)
    with pytest.raises(StageError, match=r"m version 2, .* does not become champion: .*recall@100 of the index"):
        state.result()
    set_items(parent_pipeline, range(ITEMS.start, ITEMS.stop + 11))
    result = CliRunner().invoke(app, ["refresh", str(config_path)])
    assert isinstance(result.exception, StageError) and result.exception.exit_code == 1


def test_without_a_champion_the_command_raises_an_input_error(config_path: Path) -> None:
    result = CliRunner().invoke(app, ["refresh", str(config_path)])
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == "m has no champion to refresh; train one with `nightjar run`"


def test_the_form_has_titles_and_descriptions() -> None:
    fields: dict[str, dict[str, Any]] = refresh.parameters.model_dump()["properties"]
    assert set(fields) == {"pipeline", "overrides"}
    for name, field in fields.items():
        assert field["title"] != name and field["title"][0].isupper() and field["description"].endswith("."), name
