"""The delivery of a new champion: what happens if it fails."""

import logging
from pathlib import Path

import pytest

from flows import delivery
from flows.settings.pipeline import PipelineConfig
from flows.settings.template import starter_config
from recsys_core.errors import StageError


def config_with(folder: Path | None) -> PipelineConfig:
    config = starter_config()
    recommendations = config.delivery.recommendations.model_copy(update={"folder": folder})
    return config.model_copy(update={"delivery": config.delivery.model_copy(update={"recommendations": recommendations})})


def test_without_a_folder_or_a_new_champion_nothing_is_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "load_retriever", lambda config: pytest.fail("the champion was loaded"))
    assert delivery.deliver(config_with(None), is_new_champion=True) == []
    assert delivery.deliver(config_with(tmp_path), is_new_champion=False) == []


def test_a_failed_delivery_is_logged_and_returned_but_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(config: PipelineConfig) -> None:
        raise StageError("index.faiss: the sha256 differs")

    monkeypatch.setattr(delivery, "load_retriever", load)
    with caplog.at_level(logging.ERROR, logger="nightjar"):
        problems = delivery.deliver(config_with(tmp_path / "recs"), is_new_champion=True)
    expected_problem = (
        f"the recommendations in {tmp_path / 'recs'} are not those of the new champion: index.faiss: the sha256 differs; "
        "repeat nightjar recommend"
    )
    assert problems == [expected_problem]
    assert caplog.messages == [expected_problem]
