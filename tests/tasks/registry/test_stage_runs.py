"""Nested MLflow runs of stages, from real manifests on a real sqlite database."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mlflow.entities import Run as MlflowRun

from recsys_core.manifests import PlanManifest, TrainManifest
from tasks.registry.mlflow_client import connect
from tasks.registry.stage_runs import log_run_end
from tasks.registry.tracking import open_run
from tests.tasks.conftest import Stages
from tests.tasks.registration import run_of


def nested_runs(workspace: Path, parent_id: str) -> dict[str, MlflowRun]:
    runs = connect(workspace).search_runs(["1"], f"tags.`mlflow.parentRunId` = '{parent_id}'")
    return {run.info.run_name: run for run in runs}


def test_each_stage_is_a_nested_run_and_a_resumed_run_adds_the_missing_stages(
    workspace: Path, stages: Callable[..., Stages]
) -> None:
    context, manifests = run_of(workspace, "one"), stages()
    context.folder(PlanManifest).symlink_to(manifests.plan.folder)
    log_run_end(context, state="Failed", message="rank 1 died")
    client = connect(workspace)
    parent_id = open_run(client, context)
    assert client.get_run(parent_id).info.status == "FAILED"
    assert nested_runs(workspace, parent_id).keys() == {"plan_sharding"}

    context.folder(TrainManifest).symlink_to(manifests.train_manifest.folder)
    log_run_end(replace(context, flow_run_url="http://prefect/1"), state="NotPromoted", message="recall is less")
    parent, nested = client.get_run(parent_id), nested_runs(workspace, parent_id)
    assert (parent.info.status, parent.data.tags["nightjar.state"]) == ("FINISHED", "NotPromoted")
    description = "**NotPromoted**: recall is less\n\n[Flow run in Prefect](http://prefect/1)"
    assert parent.data.tags["mlflow.note.content"] == description
    assert nested.keys() == {"plan_sharding", "train"}
    train = nested["train"]
    assert train.data.metrics["steps"] == manifests.train_manifest.steps
    assert train.data.metrics["bytes_on_disk"] == sum(file.bytes for file in manifests.train_manifest.files.values())
    assert train.info.end_time - train.info.start_time == int(manifests.train_manifest.seconds * 1000)
    assert nested["plan_sharding"].data.params["device"] == "cpu"
