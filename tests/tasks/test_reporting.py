"""Progress of a running stage and the log line of a finished one."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from recsys_core.manifests import TrainManifest
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job_spec import Progress
from tasks import reporting
from tasks.reporting import TrainingProgress, show_bar, training_facts
from tests.tasks.conftest import Stages


@pytest.fixture
def trained(stages: Callable[..., Stages]) -> TrainManifest:
    """The manifest of a training of one epoch with an ndcg@10 of 0.5."""
    return stages(confused=False).trained


def test_the_log_line_of_training_has_early_stopping_and_the_best_epoch(trained: TrainManifest) -> None:
    stopped = trained.model_copy(update={"epochs": 5, "best_epoch": 2})
    facts = training_facts(stopped, config=TrainingConfig(epochs=10))
    assert "stopped early after epoch 5 of 10, best epoch 2: validation ndcg@10 0.5000" in facts
    assert "stopped early" not in training_facts(stopped, config=TrainingConfig(epochs=5))
    unmeasured = stopped.model_copy(update={"best_epoch": None, "validation": {}})
    assert "best epoch" not in training_facts(unmeasured, config=TrainingConfig(epochs=5, validation=None))


def test_the_progress_artifact_ends_at_100_percent_where_training_stopped_early(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[float] = []  # a Prefect server takes half a minute to start

    def send(first: Any, percent: float | None = None, **_: str) -> str:
        sent.append(first if percent is None else percent)
        return "id"

    monkeypatch.setattr(reporting, "create_progress_artifact", send)
    monkeypatch.setattr(reporting, "update_progress_artifact", send)
    progress = TrainingProgress()
    progress.finish("kept")  # no artifact, nothing to end
    assert sent == []
    progress.send(Progress(step=7, total_steps=10, epoch=7, loss=1.0, learning_rate=0.1, samples_per_s=10.0))
    progress.finish("stopped early")
    assert sent == [70.0, 100.0]


def test_the_bar_of_training_keeps_the_last_validation_metric(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reporting, "create_progress_artifact", lambda *_, **__: "id")
    progress = TrainingProgress()
    line = Progress(step=5, total_steps=10, epoch=1, loss=1.0, learning_rate=0.1, samples_per_s=10.0)
    with caplog.at_level(logging.DEBUG, logger="nightjar.steps"):
        progress.send(line.model_copy(update={"validation": {"ndcg@10": 0.25, "recall@20": 0.5}}))
        progress.send(line.model_copy(update={"step": 6, "epoch": 2}))
    assert [record.__dict__["note"] for record in caplog.records] == [
        "epoch 1  loss 1.0000  ndcg@10 0.2500",
        "epoch 2  loss 1.0000  ndcg@10 0.2500",
    ]


def test_a_bar_is_a_record_for_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="nightjar.steps"):
        show_bar("evaluate", done=3, total=9, note="3 of 9 queries")
    (record,) = caplog.records
    assert (record.__dict__["stage"], record.__dict__["done"], record.__dict__["total"]) == ("evaluate", 3, 9)
