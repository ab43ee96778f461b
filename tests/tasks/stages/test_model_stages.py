"""The champion that a run starts from, read from a real MLflow, and the warning about an index with a low recall."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from recsys_core.manifests import ExportManifest
from recsys_core.retrieval.config import IndexConfig
from recsys_core.training.warm.starting_model import Champion
from tasks.registry.mlflow_client import RUN_ID_TAG, connect
from tasks.runs.context import StageContext
from tasks.runs.run import CHAMPION_FILE_NAME, Run
from tasks.stages.model_stages import build_index, starting_champion
from tests.recsys_core.evaluation.stage_folders import write_export_stage


@pytest.fixture
def run(workspace: Path) -> Run:
    return Run("20261121-020000-ab12", workspace=workspace)


@pytest.fixture(autouse=True)
def every_run_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open a champion as if the workspace had all stages of every run."""
    monkeypatch.setattr(
        Champion, "open", lambda run_id, *, export_folder, **_: SimpleNamespace(run_id=run_id, export=export_folder)
    )


@pytest.fixture
def set_champion(workspace: Path) -> Callable[[str], None]:
    """A function that registers a version of a run and makes this version champion of the model "shop"."""
    client = connect(workspace)

    def register_champion(run_id: str) -> None:
        if not client.search_registered_models():
            client.create_registered_model("shop")
        version = client.create_model_version("shop", f"file://{workspace}/model", tags={RUN_ID_TAG: run_id})
        client.set_registered_model_alias("shop", "champion", version.version)

    return register_champion


def test_a_first_run_has_no_starting_champion_even_if_it_is_resumed_after_a_promotion(
    run: Run, set_champion: Callable[[str], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("nightjar"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="nightjar"):
        assert starting_champion("shop", run=run) is None
    assert "training from scratch: shop had no champion when this run began" in caplog.messages
    set_champion("another")
    assert starting_champion("shop", run=run) is None


def test_a_resumed_run_starts_from_the_champion_that_it_began_with(run: Run, set_champion: Callable[[str], None]) -> None:
    set_champion("first")
    champion = starting_champion("shop", run=run)
    set_champion("newer")
    champion_after_resume = starting_champion("shop", run=run)
    assert champion is not None and champion_after_resume is not None
    assert champion.run_id == champion_after_resume.run_id == "first"
    assert champion.export == run.workspace / "runs/first/export"
    assert json.loads((run.folder / CHAMPION_FILE_NAME).read_bytes()) == {"run_id": "first"}


def test_a_run_does_not_start_from_a_champion_whose_stages_are_missing(
    run: Run, set_champion: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_champion("removed")
    monkeypatch.setattr(Champion, "open", lambda run_id, **folders: None)
    monkeypatch.setattr(logging.getLogger("nightjar"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="nightjar"):
        assert starting_champion("shop", run=run) is None
    (log_line,) = [record.getMessage() for record in caplog.records if record.name == "nightjar"]
    assert log_line.startswith("training from scratch: stages of run removed, which trained the champion, are missing in ")


def test_an_index_below_the_recall_target_causes_a_warning_in_the_log_and_in_the_summary(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("nightjar"), "propagate", True)
    context = StageContext(run)
    vector_ID = np.random.default_rng(0).normal(size=(500, 8))
    queries = {"test": (range(40), vector_ID[:40])}
    context.results.add(write_export_stage(context.folder(ExportManifest), item_vectors=vector_ID, queries=queries))
    config = IndexConfig.model_validate({"served": {"kind": "ivf_pq", "pq_m": 1, "pq_nbits": 1}, "recall_target": 0.9})
    index_manifest = build_index(context, config)
    assert index_manifest is not None
    warning, summary = (record.getMessage() for record in caplog.records if record.name == "nightjar")
    assert warning == f"index: {index_manifest.warning}"
    assert ", below the target of 0.9, " in summary
    assert (run.folder / "indexes.png").stat().st_size > 0
