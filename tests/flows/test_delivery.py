"""The recommendations after a run: when they are written, and a delivery that fails."""

import json
import logging
from pathlib import Path
from unittest.mock import Mock

import pytest

from flows import delivery
from flows.settings.pipeline import PipelineConfig
from flows.settings.template import starter_config
from recsys_core.errors import StageError
from tasks.delivery.recommendations import SUMMARY_FILE_NAME, BatchSummary


def config_with_recommendations_in(folder: Path | None) -> PipelineConfig:
    """Return the starter config with this folder for recommendations, or without recommendations if `folder` is None."""
    config = starter_config()
    recommendations = config.delivery.recommendations.model_copy(update={"folder": folder})
    return config.model_copy(update={"delivery": config.delivery.model_copy(update={"recommendations": recommendations})})


@pytest.mark.parametrize(
    ("champion_version", "delivered_version", "delivered_k", "is_written"),
    [
        (None, None, 100, False),
        ("2", "2", 100, False),
        ("2", "1", 100, True),
        ("1", "2", 100, True),
        ("2", None, 100, True),
        ("2", "2", 50, True),
    ],
    ids=["no champion", "same version", "new champion", "rolled back", "first champion", "changed k"],
)
def test_recommendations_are_written_unless_the_folder_has_the_recommendations_of_the_champion(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    champion_version: str | None,
    delivered_version: str | None,
    delivered_k: int,
    is_written: bool,
) -> None:
    settings = {"k": delivered_k, "user_paths": [], "exclude_seen": True, "model_name": "nightjar"}
    summary = BatchSummary(
        version=delivered_version or "",
        space_id="",
        k=delivered_k,
        num_rows=0,
        columns=[],
        num_rows_by_fallback={"popularity": 0},
        settings=settings,
        num_bytes_by_file={},
    )
    if delivered_version is not None:
        (tmp_path / SUMMARY_FILE_NAME).write_text(json.dumps(summary._asdict()))
    written_folders = []
    monkeypatch.setattr(delivery, "version_number_with_alias", lambda workspace, model_name: champion_version)
    monkeypatch.setattr(delivery, "recommend_many", lambda config, folder: written_folders.append(folder) or summary)
    assert delivery.deliver(config_with_recommendations_in(None)) == [] and written_folders == []
    assert delivery.deliver(config_with_recommendations_in(tmp_path)) == []
    assert written_folders == ([tmp_path] if is_written else [])


def test_a_failed_delivery_is_logged_and_returned_but_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delivery, "version_number_with_alias", lambda workspace, model_name: "2")
    monkeypatch.setattr(delivery, "recommend_many", Mock(side_effect=StageError("index.faiss: the sha256 differs")))
    with caplog.at_level(logging.ERROR, logger="nightjar"):
        problems = delivery.deliver(config_with_recommendations_in(tmp_path / "recs"))
    expected_problem = (
        f"the recommendations in {tmp_path / 'recs'} do not come from the champion: index.faiss: the sha256 differs; "
        "repeat nightjar recommend"
    )
    assert problems == [expected_problem]
    assert caplog.messages == [expected_problem]
