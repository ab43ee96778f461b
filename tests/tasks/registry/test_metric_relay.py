"""Training metrics that are sent to a real sqlite database. An outage of MLflow does not stop the training."""

import logging
import threading
import time
from pathlib import Path

import pytest

from tasks.registry.metric_relay import MetricRelay, log_training_metrics
from tasks.registry.mlflow_client import connect
from tasks.registry.tracking import open_mlflow_run
from tasks.runs.context import StageContext
from tests.tasks.conftest import STEPS, progress


def logged_steps(context: StageContext) -> list[int]:
    client = connect(context.run.workspace)
    return [metric.step for metric in client.get_metric_history(open_mlflow_run(client, context), "train/loss")]


def test_sent_metrics_are_logged_and_a_resumed_training_logs_no_step_twice(context: StageContext) -> None:
    for steps in (STEPS[:2], STEPS[1:]):  # the second training repeats the last step of the first
        with MetricRelay(context) as relay:
            for step in steps:
                relay.send(progress(step))
    assert logged_steps(context) == list(STEPS)
    client = connect(context.run.workspace)
    mlflow_run = client.get_run(open_mlflow_run(client, context))
    assert mlflow_run.data.params == {"training.epochs": "3", "name": "nightly"}
    assert mlflow_run.info.status == "FINISHED"


def test_validation_metrics_are_logged_at_the_step_that_measured_them(context: StageContext) -> None:
    with MetricRelay(context) as relay:
        relay.send(progress(STEPS[0]))
        relay.send(progress(STEPS[1]).model_copy(update={"validation": {"ndcg@10": 0.25}}))
    client = connect(context.run.workspace)
    metric_history = client.get_metric_history(open_mlflow_run(client, context), "train/validation/ndcg_at_10")
    assert [(metric.step, metric.value) for metric in metric_history] == [(STEPS[1], 0.25)]


def test_a_failed_training_leaves_a_failed_mlflow_run(context: StageContext) -> None:
    with pytest.raises(RuntimeError), MetricRelay(context):
        raise RuntimeError
    client = connect(context.run.workspace)
    assert client.get_run(open_mlflow_run(client, context)).info.status == "FAILED"


def test_system_metrics_are_logged_during_the_training_and_continue_after_a_resume(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    client = connect(context.run.workspace)
    mlflow_run_id = open_mlflow_run(client, context)

    def sampled_steps() -> list[int]:
        return [metric.step for metric in client.get_metric_history(mlflow_run_id, "system/cpu_utilization_percentage")]

    for num_samples in (1, 2):
        with MetricRelay(context):
            deadline_s = time.monotonic() + 60
            while len(sampled_steps()) < num_samples and time.monotonic() < deadline_s:
                time.sleep(0.1)
    assert len(sampled_steps()) >= 2
    assert sampled_steps() == list(range(len(sampled_steps())))


def test_an_outage_causes_one_warning_and_the_lost_metrics_are_logged_later(
    context: StageContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # no process listens there
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(logging.getLogger("nightjar"), "propagate", True)
    with MetricRelay(context) as relay:
        relay.send(progress(STEPS[0]))
    assert [record.levelname for record in caplog.records if record.name == "nightjar"] == ["WARNING"]
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with MetricRelay(context) as relay:
        relay.send(progress(STEPS[1]))
    metrics_path = tmp_path / "metrics.jsonl"
    metrics_path.write_text("".join(progress(step).model_dump_json() + "\n" for step in STEPS))
    client = connect(context.run.workspace)
    log_training_metrics(client, open_mlflow_run(client, context), metrics_file=metrics_path)
    assert sorted(logged_steps(context)) == list(STEPS)


def test_sending_never_waits_for_mlflow(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    is_reachable = threading.Event()
    monkeypatch.setattr("tasks.registry.metric_relay.connect", lambda workspace: is_reachable.wait() and connect(workspace))
    with MetricRelay(context) as relay:
        for step in STEPS:
            relay.send(progress(step))
        is_reachable.set()
    assert logged_steps(context) == list(STEPS)
