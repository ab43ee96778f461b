"""One MLflow run per nightjar run, on a real sqlite database; an outage costs no training."""

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.registry.mlflow_client import connect
from tasks.registry.tracking import (
    MetricRelay,
    as_metrics,
    log_params,
    log_training_metrics,
    open_run,
    run_address,
    server_address,
)
from tasks.runs.context import StageContext
from tasks.runs.options import RunOptions
from tasks.runs.run import Run
from tests.tasks.conftest import STEPS, progress


@pytest.fixture
def context(workspace: Path) -> StageContext:
    run = Run("20261121-070312-ab12", workspace=workspace)
    run.folder.mkdir(parents=True)
    run.config_file.write_text("training: {epochs: 3}\nname: nightly\n")
    return StageContext(run, experiment="tests")


def logged_steps(context: StageContext) -> list[int]:
    client = connect(context.run.workspace)
    return [metric.step for metric in client.get_metric_history(open_run(client, context), "train/loss")]


def test_the_mlflow_run_is_found_again_and_its_artifacts_are_in_the_workspace(context: StageContext) -> None:
    client = connect(context.run.workspace)
    first = open_run(client, context)
    assert open_run(connect(context.run.workspace), context) == first
    found = client.get_run(first)
    assert found.data.tags["nightjar.run_id"] == context.run.run_id
    assert found.info.artifact_uri.startswith((context.run.workspace / "mlartifacts").as_uri())
    assert open_run(client, replace(context, run=Run("another", workspace=context.run.workspace))) != first


def test_the_tags_refer_to_the_pipeline_the_reason_and_the_last_flow_run(context: StageContext) -> None:
    client = connect(context.run.workspace)
    first = replace(
        context, pipeline="films", flow_run_id="1", flow_run_url="http://prefect/1", options=RunOptions("new items")
    )
    mlflow_run_id = open_run(client, first)
    assert open_run(client, replace(first, flow_run_id="2", flow_run_url=None)) == mlflow_run_id
    assert open_run(client, context) == mlflow_run_id  # outside a flow
    tags = client.get_run(mlflow_run_id).data.tags
    assert (tags["nightjar.pipeline"], tags["nightjar.run_reason"]) == ("films", "new items")
    assert (tags["nightjar.prefect_flow_run"], tags["nightjar.prefect_url"]) == ("2", "http://prefect/1")


def test_the_address_of_an_mlflow_run_is_in_the_ui_and_has_no_password(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(context.run.workspace)
    mlflow_run_id = open_run(client, context)
    assert run_address(client, mlflow_run_id) == f"sqlite:///{context.run.workspace}/mlflow.db, run {mlflow_run_id}"
    monkeypatch.setenv("NIGHTJAR_MLFLOW_UI_URL", "http://me:secret@mlflow:5000/")
    assert run_address(client, mlflow_run_id) == f"http://mlflow:5000/#/experiments/1/runs/{mlflow_run_id}"
    assert server_address("https://me:secret@mlflow:5000/base/") == "https://mlflow:5000/base"


def test_relayed_metrics_arrive_and_a_resumed_training_logs_no_step_twice(context: StageContext) -> None:
    for steps in (STEPS[:2], STEPS[1:]):  # the second training repeats the last step of the first
        with MetricRelay(context) as relay:
            for step in steps:
                relay.send(progress(step))
    assert logged_steps(context) == list(STEPS)
    client = connect(context.run.workspace)
    found = client.get_run(open_run(client, context))
    assert found.data.params == {"training.epochs": "3", "name": "nightly"}
    assert found.info.status == "FINISHED"


def test_validation_metrics_are_logged_with_the_line_that_measured_them(context: StageContext) -> None:
    with MetricRelay(context) as relay:
        relay.send(progress(STEPS[0]))
        relay.send(progress(STEPS[1]).model_copy(update={"validation": {"ndcg@10": 0.25}}))
    client = connect(context.run.workspace)
    history = client.get_metric_history(open_run(client, context), "train/validation/ndcg_at_10")
    assert [(metric.step, metric.value) for metric in history] == [(STEPS[1], 0.25)]


def test_a_failed_training_leaves_a_failed_mlflow_run(context: StageContext) -> None:
    with pytest.raises(RuntimeError), MetricRelay(context):
        raise RuntimeError
    client = connect(context.run.workspace)
    assert client.get_run(open_run(client, context)).info.status == "FAILED"


def test_system_metrics_are_logged_during_the_training_and_continue_after_a_resume(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    client = connect(context.run.workspace)
    mlflow_run_id = open_run(client, context)

    def samples() -> list[int]:
        return [metric.step for metric in client.get_metric_history(mlflow_run_id, "system/cpu_utilization_percentage")]

    for num_samples in (1, 2):
        with MetricRelay(context):
            deadline = time.monotonic() + 60
            while len(samples()) < num_samples and time.monotonic() < deadline:
                time.sleep(0.1)
    assert len(samples()) >= 2
    assert samples() == list(range(len(samples())))


def test_an_outage_is_one_warning_and_lost_metrics_are_sent_later(
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
    lines = tmp_path / "metrics.jsonl"
    lines.write_text("".join(progress(step).model_dump_json() + "\n" for step in STEPS))
    client = connect(context.run.workspace)
    log_training_metrics(client, open_run(client, context), metrics_file=lines)
    assert sorted(logged_steps(context)) == list(STEPS)


def test_sending_never_waits_for_mlflow(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    reachable = threading.Event()
    monkeypatch.setattr("tasks.registry.tracking.connect", lambda workspace: reachable.wait() and connect(workspace))
    with MetricRelay(context) as relay:
        for step in STEPS:
            relay.send(progress(step))
        reachable.set()
    assert logged_steps(context) == list(STEPS)


def test_a_param_keeps_its_first_value_and_changes_of_a_resumed_run_are_tags(context: StageContext) -> None:
    client = connect(context.run.workspace)
    mlflow_run_id = open_run(client, context)
    log_params(client, mlflow_run_id, config_file=context.run.config_file)
    context.run.config_file.write_text("training: {epochs: 5}\nname: nightly\n")
    log_params(client, mlflow_run_id, config_file=context.run.config_file)
    found = client.get_run(mlflow_run_id).data
    assert found.params["training.epochs"] == "3"
    assert found.tags["nightjar.changed_on_resume"] == '{"training.epochs": "5"}'


def test_metric_names_lose_the_at_sign_and_undefined_values_are_left_out() -> None:
    metrics = as_metrics({"test/recall@20": 0.25, "test/slice/new_users/recall@20": float("nan")})
    assert [(metric.key, metric.value) for metric in metrics] == [("test/recall_at_20", 0.25)]
