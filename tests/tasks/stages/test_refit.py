"""The end of a refit that a kill has interrupted; tests/flows/test_nightly.py trains refits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recsys_core.manifests import create_own_folder
from recsys_core.models.config import PackageConfig
from recsys_core.retrieval.config import IndexConfig
from tasks.registry.config import RegistryConfig
from tasks.registry.mlflow_client import connect
from tasks.registry.releases import REFIT_OF_TAG
from tasks.runs.run import REFIT_FILE_NAME, REFIT_FOLDER_NAME
from tasks.stages.refit import refit
from tests.tasks.conftest import Stages
from tests.tasks.registration import context_of, register_version


@pytest.mark.usefixtures("empty_plots", "predicted_uris")
def test_a_refit_that_was_killed_after_it_became_champion_is_completed(workspace: Path, stages: Callable[..., Stages]) -> None:
    context = context_of(workspace, "one")
    context.results.add(register_version(stages(), context))
    register_version(stages(), context_of(workspace, "refit"))
    connect(workspace).set_model_version_tag("m", "2", REFIT_OF_TAG, "1")
    create_own_folder(context.run.folder / REFIT_FOLDER_NAME)
    unused_setup: Any = None
    for _ in range(2):  # a later resume keeps the file
        sentence = refit(
            context,
            unused_setup,
            package_config=PackageConfig(),
            index_config=IndexConfig(),
            registry_config=RegistryConfig(model_name="m"),
        )
        assert sentence == "version 2, its refit, is champion"
        assert json.loads((context.run.folder / REFIT_FILE_NAME).read_text()) == {"version": "2"}
        assert not (context.run.folder / REFIT_FOLDER_NAME).exists()
