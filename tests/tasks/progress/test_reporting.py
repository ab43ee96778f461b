"""Log lines and progress records of stages."""

import logging
import os
import re
import time
from collections.abc import Callable

import pytest

from recsys_core.manifests import MANIFEST_NAME, TrainManifest
from recsys_core.training.config import TrainingConfig
from tasks.progress.reporting import StageLog, show_bar, training_summary
from tests.tasks.conftest import Stages


@pytest.fixture
def train_manifest(build_stages: Callable[..., Stages]) -> TrainManifest:
    """The manifest of a training with one epoch and an ndcg@10 of 0.5."""
    return build_stages(shuffled=False).train_manifest


def test_the_log_line_of_a_training_has_its_best_epoch_and_chosen_temperature(train_manifest: TrainManifest) -> None:
    manifest_of_stopped_training = train_manifest.model_copy(update={"num_epochs": 5, "best_epoch": 2})
    summary = training_summary(manifest_of_stopped_training, config=TrainingConfig(epochs=10))
    assert "stopped early after epoch 5 of 10, best epoch 2: validation ndcg@10 0.5000" in summary
    assert "stopped early" not in training_summary(manifest_of_stopped_training, config=TrainingConfig(epochs=5))
    assert "temperature" not in summary
    manifest_with_temperature = manifest_of_stopped_training.model_copy(
        update={"temperature": 0.15, "temperature_trials": {"0.1": 0.2, "0.15": 0.3}}
    )
    assert "temperature 0.15 of 0.1, 0.15, stopped early" in training_summary(
        manifest_with_temperature, config=TrainingConfig(epochs=10)
    )
    manifest_without_validation = manifest_of_stopped_training.model_copy(update={"best_epoch": None, "validation": {}})
    assert "best epoch" not in training_summary(manifest_without_validation, config=TrainingConfig(epochs=5, validation=None))


def test_the_log_line_of_a_stage_has_its_seconds_or_says_that_it_was_kept_or_skipped(
    train_manifest: TrainManifest, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="nightjar.steps"):
        for summary, age_s in (("earlier", 60), ("new", -60)):
            log = StageLog("train")
            completion_s = time.time() - age_s
            os.utime(train_manifest.folder / MANIFEST_NAME, (completion_s, completion_s))
            assert log.finish(train_manifest, summary) is train_manifest
        assert StageLog("train").finish(None, "none") is None
        StageLog("step").finish_step("without a manifest")
    status_by_summary = {}
    for record in caplog.records:
        if record.name == "nightjar":
            _, summary, status = record.__dict__["stage_line"]
            status_by_summary[summary] = status
    assert (status_by_summary.pop("earlier"), status_by_summary.pop("none")) == ("(kept)", "(skipped)")
    assert [*status_by_summary] == ["new", "without a manifest"]
    assert all(re.fullmatch(r"\d+\.\d s", status) for status in status_by_summary.values())
    assert [record.__dict__["stage"] for record in caplog.records if record.name == "nightjar.steps"] == 3 * ["train"] + [
        "step"
    ]


def test_a_progress_bar_is_a_log_record_with_stage_done_and_total(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="nightjar.steps"):
        show_bar("evaluate", num_done=3, num_total=9, note="3 of 9 queries")
    (record,) = caplog.records
    assert (record.__dict__["stage"], record.__dict__["done"], record.__dict__["total"]) == ("evaluate", 3, 9)
