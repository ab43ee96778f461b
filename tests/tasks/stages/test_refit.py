"""The champion after a refit that a kill or a refresh has interrupted; tests/flows/test_nightly.py trains refits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from recsys_core.manifests import RegistrationManifest, TrainManifest, create_own_folder
from recsys_core.models.config import PackageConfig
from recsys_core.refresh.config import RefreshConfig
from recsys_core.retrieval.config import IndexConfig
from tasks.refresh.refreshed_version import RefreshedVersion, refresh_champion
from tasks.registry.config import RegistryConfig
from tasks.registry.loading import load_version
from tasks.registry.mlflow_client import RUN_ID_TAG, connect
from tasks.registry.releases import PARENT_TAG, REFIT_OF_TAG
from tasks.registry.versions import register_package
from tasks.runs.run import REFIT_FILE_NAME, REFIT_FOLDER_NAME
from tasks.stages import refit as refit_module
from tasks.stages.refit import refit
from tests.recsys_core.refresh.small_pipeline import SmallPipeline
from tests.tasks.conftest import Stages
from tests.tasks.refresh.test_refreshed_version import client as client  # fixtures
from tests.tasks.refresh.test_refreshed_version import make_champion, refresh, set_items
from tests.tasks.refresh.test_refreshed_version import parent as parent
from tests.tasks.registration import prepare_run, register_version, version_by_alias


@pytest.mark.usefixtures("empty_plots", "in_process_predictions")
def test_a_refit_that_was_killed_after_it_became_champion_is_completed(
    workspace: Path, build_stages: Callable[..., Stages]
) -> None:
    context = prepare_run(workspace, "one")
    context.results.add(register_version(build_stages(), context))
    register_version(build_stages(), prepare_run(workspace, "refit"))
    connect(workspace).set_model_version_tag("m", "2", REFIT_OF_TAG, "1")
    create_own_folder(context.run.folder / REFIT_FOLDER_NAME)
    unused_argument: Any = None
    for _ in range(2):  # a later resume keeps the file
        sentence = refit(
            context,
            unused_argument,
            package_config=PackageConfig(),
            index_config=IndexConfig(),
            registry_config=RegistryConfig(model_name="m"),
            refresh_config=RefreshConfig(),
            inputs=unused_argument,
        )
        assert sentence == "version 2, its refit, is champion"
        assert json.loads((context.run.folder / REFIT_FILE_NAME).read_text()) == {"version": "2"}
        assert not (context.run.folder / REFIT_FOLDER_NAME).exists()


RUN_ID = "20261121-070312-ab12"
RunRefit = Callable[..., str]


@pytest.fixture
def run_refit(parent: SmallPipeline, client: MlflowClient, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> RunRefit:
    """A function that registers the package of `parent`, which is also the package of version 1, as the refit of version 1.

    No model is trained. Instead, the argument `during_training` is called.
    """

    def register_refit(*_: Any, **__: Any) -> ModelVersion:
        mlflow_run = client.create_run(client.get_experiment_by_name("tests").experiment_id)
        tags = {RUN_ID_TAG: RUN_ID, REFIT_OF_TAG: "1"}
        return register_package(
            parent.package, model_name="m", client=client, mlflow_run=mlflow_run, workspace=workspace, tags=tags, description=""
        )

    def refit_version_1(during_training: Callable[[], object] = lambda: None) -> str:
        results: Any = {RegistrationManifest: SimpleNamespace(version="1", mlflow_run_id="unused")}

        def train(*_: Any, **__: Any) -> Any:
            during_training()
            return results | {TrainManifest: SimpleNamespace(num_epochs=3)}

        monkeypatch.setattr(refit_module, "_train_on_all_events", train)
        monkeypatch.setattr(refit_module, "get_or_create_version", register_refit)
        monkeypatch.setattr(refit_module, "_smoke_test", lambda *_, **__: None)
        unused_argument: Any = None
        return refit(
            replace(prepare_run(workspace, RUN_ID), results=results),
            unused_argument,
            package_config=PackageConfig(),
            index_config=IndexConfig(),
            registry_config=RegistryConfig(model_name="m"),
            refresh_config=RefreshConfig(),
            inputs=parent.inputs,
        )

    return refit_version_1


@pytest.mark.usefixtures("empty_plots")
@pytest.mark.parametrize("is_refreshed_before", [True, False], ids=["before the refit", "during the refit"])
def test_a_refit_of_a_refreshed_version_has_the_items_of_the_refresh(
    parent: SmallPipeline,
    client: MlflowClient,
    workspace: Path,
    run_refit: RunRefit,
    is_refreshed_before: bool,
) -> None:
    def refresh_version_1() -> None:
        set_items(parent, range(1003, 1310))
        refresh(parent, workspace)
        assert version_by_alias(client) == {"champion": "2"}

    if is_refreshed_before:
        refresh_version_1()
        sentence = run_refit()
    else:
        sentence = run_refit(refresh_version_1)
    assert sentence == "version 4, its refit, is champion" and version_by_alias(client) == {"champion": "4"}
    tags = client.get_model_version("m", "4").tags
    assert (tags[PARENT_TAG], tags[REFIT_OF_TAG]) == ("3", "1")
    assert load_version(workspace, model_name="m").retriever.item_ids.rows([1002, 1309]).tolist() == [-1, 306]  # 1003 to 1309
    assert json.loads((workspace / "runs" / RUN_ID / REFIT_FILE_NAME).read_text()) == {"version": "4"}
    assert run_refit() == "version 4, its refit, is champion"  # a resumed run calls `refit` again


@pytest.mark.usefixtures("empty_plots")
def test_a_refit_replaces_a_refreshed_version_whose_new_items_are_gone(
    parent: SmallPipeline, client: MlflowClient, workspace: Path, run_refit: RunRefit
) -> None:
    set_items(parent, range(1000, 1310))
    refresh(parent, workspace)
    set_items(parent, range(1000, 1300))
    assert run_refit() == "version 3, its refit, is champion" and version_by_alias(client) == {"champion": "3"}


@pytest.mark.usefixtures("empty_plots")
def test_a_refit_does_not_replace_the_version_of_another_run(
    parent: SmallPipeline, client: MlflowClient, workspace: Path, run_refit: RunRefit
) -> None:
    sentence = run_refit(lambda: make_champion(client, workspace, parent, run_id="20261122-070312-ab12"))
    assert sentence == "another version became champion before version 3, the refit of version 1"
    assert version_by_alias(client) == {"champion": "2"}
    assert run_refit() == "version 1 is not champion any more, so it gets no refit"


@pytest.mark.usefixtures("empty_plots")
def test_a_refit_that_waits_for_a_refresh_replaces_the_version_of_this_refresh(
    parent: SmallPipeline,
    client: MlflowClient,
    workspace: Path,
    run_refit: RunRefit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refresh_after_another_refresh(*arguments: Any, **options: Any) -> RefreshedVersion | None:
        set_items(parent, range(1003, 1312))
        refresh(parent, workspace)
        return refresh_champion(*arguments, **options)

    monkeypatch.setattr(refit_module, "refresh_champion", refresh_after_another_refresh)
    set_items(parent, range(1003, 1310))
    refresh(parent, workspace)
    assert run_refit() == "version 5, its refit, is champion" and version_by_alias(client) == {"champion": "5"}
