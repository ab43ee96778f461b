"""Which run a night starts from: asked once, written down, and never in the way of the night."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from recsys_core.training.champion import Champion
from tasks.registry import champion
from tasks.registry.champion import CHOICE_NAME, starting_champion
from tasks.registry.mlflow_client import RUN_ID_TAG
from tasks.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run("20261121-020000-ab12", workspace=tmp_path, experiment="e")


@pytest.fixture
def crowned(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """What the registry says: the run of the champion, None for no champion; every run has left all its stages."""
    says: dict[str, str | None] = {"run": None}

    def champion_of(client: object, model_name: str) -> SimpleNamespace | None:
        return None if says["run"] is None else SimpleNamespace(tags={RUN_ID_TAG: says["run"]})

    monkeypatch.setattr(champion, "connect", lambda workspace: None)  # a new MLflow database takes seconds
    monkeypatch.setattr(champion, "champion_of", champion_of)
    monkeypatch.setattr(Champion, "open", lambda run_id, **folders: SimpleNamespace(run_id=run_id, **folders))
    return says


def test_a_first_night_is_a_full_training_and_stays_one_when_it_is_resumed(
    run: Run, crowned: dict[str, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="nightjar"):
        assert starting_champion("shop", run=run) is None
    assert "full training: shop has no champion yet, or had none when this run began" in caplog.messages
    crowned["run"] = "another"
    assert starting_champion("shop", run=run) is None


def test_a_resumed_run_starts_from_the_champion_that_it_began_with(run: Run, crowned: dict[str, str | None]) -> None:
    crowned["run"] = "last"
    first = starting_champion("shop", run=run)
    crowned["run"] = "newer"
    again = starting_champion("shop", run=run)
    assert first is not None and again is not None
    assert first.run_id == again.run_id == "last"
    assert first.export == run.workspace / "runs/last/export"
    assert json.loads((run.folder / CHOICE_NAME).read_bytes()) == {"run_id": "last"}


def test_a_champion_whose_folder_is_gone_means_a_full_training_and_one_line_in_the_log(
    run: Run, crowned: dict[str, str | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    crowned["run"] = "removed"
    monkeypatch.setattr(Champion, "open", lambda run_id, **folders: None)
    with caplog.at_level(logging.INFO, logger="nightjar"):
        assert starting_champion("shop", run=run) is None
    (line,) = caplog.messages
    assert line.startswith("full training: the champion is of run removed, of which ")


def test_a_registry_without_the_model_has_no_champion(run: Run) -> None:
    assert starting_champion("shop", run=run) is None
