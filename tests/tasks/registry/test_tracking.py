"""One MLflow run per nightjar run, on a real sqlite database."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from recsys_core.errors import InputError
from recsys_core.manifests import PlanManifest, TrainManifest
from tasks.registry.mlflow_client import connect
from tasks.registry.tracking import (
    as_metrics,
    log_params,
    log_run_end,
    open_mlflow_run,
    require_own_experiment,
    run_address,
    server_address,
)
from tasks.runs.context import RunOptions, StageContext
from tasks.runs.run import Run
from tests.tasks.conftest import Stages
from tests.tasks.registration import prepare_run


def test_the_mlflow_run_is_found_again_and_its_artifacts_are_in_the_workspace(context: StageContext) -> None:
    client = connect(context.run.workspace)
    mlflow_run_id = open_mlflow_run(client, context)
    assert open_mlflow_run(connect(context.run.workspace), context) == mlflow_run_id
    mlflow_run = client.get_run(mlflow_run_id)
    assert mlflow_run.data.tags["nightjar.run_id"] == context.run.run_id
    assert mlflow_run.info.artifact_uri.startswith((context.run.workspace / "mlartifacts").as_uri())
    assert open_mlflow_run(client, replace(context, run=Run("another", workspace=context.run.workspace))) != mlflow_run_id


def test_a_run_in_a_moved_workspace_is_rejected(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    old_workspace = context.run.workspace
    require_own_experiment(context)  # the database does not exist yet
    open_mlflow_run(connect(old_workspace), context)
    require_own_experiment(context)
    new_workspace = old_workspace.with_name("moved")
    shutil.copytree(old_workspace, new_workspace)
    context_in_moved_workspace = replace(context, run=Run("another", workspace=new_workspace))
    with pytest.raises(InputError, match=f"are in {old_workspace / 'mlartifacts'}.*, which is not below {new_workspace}"):
        require_own_experiment(context_in_moved_workspace)
    require_own_experiment(replace(context_in_moved_workspace, experiment="another"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{old_workspace}/mlflow.db")  # shared by several workspaces
    require_own_experiment(context_in_moved_workspace)


def test_the_tags_have_the_pipeline_the_reason_and_the_last_flow_run(context: StageContext) -> None:
    client = connect(context.run.workspace)
    flow_context = replace(
        context, pipeline="films", flow_run_id="1", flow_run_url="http://prefect/1", options=RunOptions("new items")
    )
    mlflow_run_id = open_mlflow_run(client, flow_context)
    assert open_mlflow_run(client, replace(flow_context, flow_run_id="2", flow_run_url=None)) == mlflow_run_id
    assert open_mlflow_run(client, context) == mlflow_run_id  # outside of a flow
    tags = client.get_run(mlflow_run_id).data.tags
    assert (tags["nightjar.pipeline"], tags["nightjar.run_reason"]) == ("films", "new items")
    assert (tags["nightjar.prefect_flow_run"], tags["nightjar.prefect_url"]) == ("2", "http://prefect/1")


def test_the_address_of_an_mlflow_run_is_a_page_of_the_ui_and_has_no_password(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(context.run.workspace)
    mlflow_run_id = open_mlflow_run(client, context)
    assert run_address(client, mlflow_run_id) == f"sqlite:///{context.run.workspace}/mlflow.db, run {mlflow_run_id}"
    monkeypatch.setenv("NIGHTJAR_MLFLOW_UI_URL", "http://me:secret@mlflow:5000/")
    assert run_address(client, mlflow_run_id) == f"http://mlflow:5000/#/experiments/1/runs/{mlflow_run_id}"
    assert server_address("https://me:secret@mlflow:5000/base/") == "https://mlflow:5000/base"


def test_a_param_keeps_its_first_value_and_the_changes_of_a_resumed_run_are_in_a_tag(context: StageContext) -> None:
    client = connect(context.run.workspace)
    mlflow_run_id = open_mlflow_run(client, context)
    log_params(client, mlflow_run_id, config_file=context.run.config_file)
    context.run.config_file.write_text("training: {epochs: 5}\nname: nightly\n")
    log_params(client, mlflow_run_id, config_file=context.run.config_file)
    run_data = client.get_run(mlflow_run_id).data
    assert run_data.params["training.epochs"] == "3"
    assert run_data.tags["nightjar.changed_on_resume"] == '{"training.epochs": "5"}'


def test_metric_names_lose_the_at_sign_and_undefined_values_are_left_out() -> None:
    metrics = as_metrics({"test/recall@20": 0.25, "test/slice/new_users/recall@20": float("nan")})
    assert [(metric.key, metric.value) for metric in metrics] == [("test/recall_at_20", 0.25)]


def test_an_mlflow_run_has_the_end_of_the_run_and_the_duration_and_size_of_each_stage(
    workspace: Path, build_stages: Callable[..., Stages]
) -> None:
    context, stages = prepare_run(workspace, "one"), build_stages()
    context.folder(PlanManifest).symlink_to(stages.plan.folder)
    log_run_end(context, state="Failed", message="rank 1 died")
    client = connect(workspace)
    mlflow_run_id = open_mlflow_run(client, context)
    failed_run = client.get_run(mlflow_run_id)
    assert (failed_run.info.status, failed_run.data.metrics["stage/plan_sharding/seconds"]) == (
        "FAILED",
        stages.plan.seconds,
    )

    context.folder(TrainManifest).symlink_to(stages.train_manifest.folder)
    log_run_end(replace(context, flow_run_url="http://prefect/1"), state="NotPromoted", message="recall is less")
    ended_run = client.get_run(mlflow_run_id)
    assert (ended_run.info.status, ended_run.data.tags["nightjar.state"]) == ("FINISHED", "NotPromoted")
    description = "**NotPromoted**: recall is less\n\n[Flow run in Prefect](http://prefect/1)"
    assert ended_run.data.tags["mlflow.note.content"] == description
    assert ended_run.data.metrics["stage/train/bytes"] == sum(file.size_bytes for file in stages.train_manifest.files.values())


def test_a_setting_that_is_too_long_for_a_param_is_cut_off_and_does_not_count_as_changed(context: StageContext) -> None:
    client = connect(context.run.workspace)
    mlflow_run_id = open_mlflow_run(client, context)
    input_paths = [f"/data/{index:010}.parquet" for index in range(1_000)]
    context.run.config_file.write_text(f"interactions: {{paths: {input_paths}}}\n")
    for _ in range(2):  # by the training, and by the registration
        log_params(client, mlflow_run_id, config_file=context.run.config_file)
    run_data = client.get_run(mlflow_run_id).data
    logged_value = run_data.params["interactions.paths"]
    assert len(logged_value) == 6_000 and str(input_paths).startswith(logged_value)
    assert "nightjar.changed_on_resume" not in run_data.tags
