"""The Python API: its names, and results that are read from the folder of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

import flows
import recsys_core
from flows import RunResults, open_run
from recsys_core.errors import InputError, StageError
from recsys_core.manifests import EvaluationManifest, PlanManifest, TrainManifest
from tasks.runs.run import REDUCED_FILE_NAME, Run
from tests.flows.run_folders import FIRST_START, past_run
from tests.recsys_core.manifests.committed_stage import commit_stage


def test_every_listed_name_of_the_api_exists_and_another_name_raises() -> None:
    for package in (flows, recsys_core):
        with pytest.raises(AttributeError, match="has no attribute 'absent'; it has ") as error_info:
            package.absent  # noqa: B018
        for name in str(error_info.value).split("; it has ")[1].split(", "):
            assert getattr(package, name).__name__ == name


def write_evaluated_run(workspace: Path, run_id: str) -> None:
    """Write a run whose only stage is the evaluation."""
    run = Run(run_id, workspace=workspace)
    commit_stage(
        run.stage_folder(EvaluationManifest),
        EvaluationManifest,
        inputs=["f"],
        build=lambda folder: {"metrics": {"test/ndcg@10": 0.5}},
    )


def test_open_run_reads_the_newest_run_or_the_named_run(tmp_path: Path) -> None:
    write_evaluated_run(tmp_path, "20261121-000000-aaaa")
    write_evaluated_run(tmp_path, "20261122-000000-aaaa")
    assert open_run(tmp_path).run.run_id == "20261122-000000-aaaa"
    results = open_run(str(tmp_path), "20261121-000000-aaaa")
    assert isinstance(results, RunResults) and results.metrics == {"test/ndcg@10": 0.5}
    assert '"metrics": {"test/ndcg@10": 0.5}' in results.as_json()


def test_a_run_has_its_training_log_as_a_table_and_the_paths_of_its_pages(tmp_path: Path) -> None:
    run = past_run(tmp_path, FIRST_START, state="Promoted")
    logged_steps = [{"step": 5, "loss": 0.7, "validation": {}}, {"step": 9, "loss": 0.5, "validation": {"ndcg@10": 0.25}}]
    log_path = run.stage_folder(TrainManifest) / "metrics.jsonl"
    log_path.parent.mkdir()
    log_path.write_text("".join(json.dumps(step) + "\n" for step in logged_steps))
    results = open_run(tmp_path)
    assert results.training_log[["step", "loss"]].to_numpy().tolist() == [[5, 0.7], [9, 0.5]]
    assert results.training_log["validation.ndcg@10"].fillna(-1).tolist() == [-1, 0.25]
    assert results.report_path == run.folder / "check_data" / "report.html"
    assert {"report.html", "plan.html", "loss.png", "indexes.png"} <= results.page_paths.keys()
    assert all(path.is_file() for path in results.page_paths.values())


def test_a_run_that_is_resumed_with_other_settings_has_no_results_of_its_earlier_settings(tmp_path: Path) -> None:
    run = Run("20261121-000000-aaaa", workspace=tmp_path)

    def run_stages(world_size: int, *, until: str) -> None:
        plan_fields = {"world_size": world_size, "device": "cpu"}
        plan = commit_stage(run.stage_folder(PlanManifest), PlanManifest, inputs=[world_size], build=lambda folder: plan_fields)
        if until == "evaluate":
            evaluation_fields = {"metrics": {"test/ndcg@10": 0.5 / world_size}}
            commit_stage(
                run.stage_folder(EvaluationManifest), EvaluationManifest, inputs=[plan], build=lambda folder: evaluation_fields
            )

    run_stages(1, until="evaluate")
    assert open_run(tmp_path).metrics == {"test/ndcg@10": 0.5}
    run_stages(2, until="plan_sharding")
    assert (open_run(tmp_path).metrics, open_run(tmp_path).manifests.keys()) == ({}, {"plan_sharding"})
    run_stages(2, until="evaluate")
    assert open_run(tmp_path).metrics == {"test/ndcg@10": 0.25}


def test_a_run_keeps_its_metrics_after_retention_has_removed_its_large_files(tmp_path: Path) -> None:
    def write_positions(folder: Path) -> dict[str, Any]:
        (folder / "positions.parquet").touch()
        return {"metrics": {"test/ndcg@10": 0.5}}

    run = Run("20261121-000000-aaaa", workspace=tmp_path)
    evaluation_folder = run.stage_folder(EvaluationManifest)
    commit_stage(evaluation_folder, EvaluationManifest, inputs=["f"], build=write_positions)
    (evaluation_folder / "positions.parquet").unlink()
    assert open_run(tmp_path).metrics == {}  # without REDUCED_FILE_NAME, a stage that lacks a file is incomplete
    (run.folder / REDUCED_FILE_NAME).touch()
    results = open_run(tmp_path)
    assert results.metrics == {"test/ndcg@10": 0.5} and results.manifests.keys() == {"evaluate"}
    with pytest.raises(StageError, match=r"the data of run 20261121-000000-aaaa is removed, because .* open a newer run"):
        results.dataset  # noqa: B018


def test_a_missing_result_is_reported_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no run; start one"):
        open_run(tmp_path)
    write_evaluated_run(tmp_path, "r")
    with pytest.raises(InputError, match="there is no run x; there are r"):
        open_run(tmp_path, "x")
    with pytest.raises(StageError, match="no completed stage ingest_interactions"):
        open_run(tmp_path, "r").dataset  # noqa: B018
    with pytest.raises(StageError, match="no completed stage train"):
        open_run(tmp_path, "r").training_log  # noqa: B018
    with pytest.raises(StageError, match="no completed stage check_data"):
        open_run(tmp_path, "r").report_path  # noqa: B018
