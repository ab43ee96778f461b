"""Artifacts in Prefect: their keys, the progress of training, and a server that does not answer."""

import logging
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from recsys_core.training.job import Progress
from tasks.progress import artifacts
from tasks.progress.artifacts import TrainingProgress, artifact_key, show_markdown
from tasks.runs.context import StageContext
from tasks.runs.run import Run

CONTEXT = StageContext(Run("r", workspace=Path("workspace")), pipeline="films", flow_run_id="f")


def test_no_two_pipelines_share_a_key_and_each_key_is_valid_in_prefect() -> None:
    pipeline_names = ["films", "Films", "films ", "films-", "films.eu", "films-eu", "映画", "ドラマ", "-"]
    keys = [artifact_key(name, "metrics") for name in pipeline_names]
    assert len(set(keys)) == len(pipeline_names)
    assert all(set(key) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for key in keys)
    assert keys[0] == "films-metrics"


@pytest.mark.filterwarnings("ignore:Artifact creation outside of a flow")
def test_a_prefect_server_that_does_not_answer_causes_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("nightjar"), "propagate", True)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):  # no process listens there
        show_markdown(CONTEXT, "metrics", "# Metrics")
    (record,) = [record for record in caplog.records if record.name == "nightjar"]
    assert "could not send the artifact films-metrics to Prefect (ConnectError" in record.getMessage()


def test_the_progress_artifact_ends_at_100_percent_if_training_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    sent_percentages: list[float] = []

    def send(percent_or_id: Any, percent: float | None = None, **_: str) -> str:
        sent_percentages.append(percent_or_id if percent is None else percent)
        return "id"

    monkeypatch.setattr(artifacts, "create_progress_artifact", send)
    monkeypatch.setattr(artifacts, "update_progress_artifact", send)
    progress = TrainingProgress(CONTEXT)
    progress.finish("kept")  # sends nothing, because no artifact exists
    assert sent_percentages == []
    progress.send(Progress(step=7, total_steps=10, epoch=7, loss=1.0, learning_rate=0.1, samples_per_s=10.0))
    progress.finish("stopped early")
    assert sent_percentages == [70.0, 100.0]


def test_the_progress_artifact_is_sent_again_after_an_outage_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("nightjar"), "propagate", True)
    monkeypatch.setattr(artifacts, "_PROGRESS_PAUSE_S", 0.0)
    attempted_percentages: list[float] = []

    def fail_twice(percent: float, **_: str) -> str:
        attempted_percentages.append(percent)
        if len(attempted_percentages) <= 2:
            raise ConnectionError("refused")
        return "id"

    monkeypatch.setattr(artifacts, "create_progress_artifact", fail_twice)
    progress = TrainingProgress(CONTEXT)
    for step in (1, 2, 3):
        progress.send(Progress(step=step, total_steps=4, epoch=1, loss=1.0, learning_rate=0.1, samples_per_s=10.0))
    assert attempted_percentages == [25.0, 50.0, 75.0]
    assert [record.levelname for record in caplog.records if "training-progress" in record.getMessage()] == ["WARNING"]


def test_the_bar_of_training_keeps_the_last_validation_metric(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(artifacts, "create_progress_artifact", lambda *_, **__: "id")
    progress = TrainingProgress(CONTEXT)
    epoch_progress = Progress(step=5, total_steps=10, epoch=1, loss=1.0, learning_rate=0.1, samples_per_s=10.0)
    with caplog.at_level(logging.DEBUG, logger="nightjar.steps"):
        progress.send(epoch_progress.model_copy(update={"validation": {"ndcg@10": 0.25, "recall@20": 0.5}}))
        progress.send(epoch_progress.model_copy(update={"step": 6, "epoch": 2}))
    assert [record.__dict__["note"] for record in caplog.records] == [
        "epoch 1  loss 1.0000  ndcg@10 0.2500",
        "epoch 2  loss 1.0000  ndcg@10 0.2500",
    ]
