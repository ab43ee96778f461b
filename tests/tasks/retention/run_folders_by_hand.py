"""Folders of complete, rejected and failed runs, copied from a template that is built once."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recsys_core.manifests import DataReportManifest, InteractionsManifest, Manifest, RegistrationManifest, create_own_folder
from tasks.retention.run_folders import own_runs
from tasks.runs.run import CHAMPION_FILE_NAME, Run
from tests.recsys_core.evaluation.stage_folders import write_interactions_stage
from tests.recsys_core.manifests.committed_stage import commit_stage

STAGE_BYTES = 40_000
"""Size of the file values.npy of each stage."""


def run_of(workspace: Path, run_id: str) -> Run:
    return Run(run_id, workspace=workspace)


def run_ids(workspace: Path) -> list[str]:
    return [run.run_id for run in own_runs(workspace)]


def _commit_stage_with_files(folder: Path, manifest_type: type[Manifest], fields: dict[str, Any]) -> None:
    def build(output_folder: Path) -> dict[str, Any]:
        (output_folder / "report.json").write_text("{}")
        (output_folder / "report.html").write_text("<html>")
        (output_folder / "values.npy").write_bytes(bytes(STAGE_BYTES))
        (output_folder / "package").mkdir()
        (output_folder / "package" / "package.json").write_text("{}")
        return fields

    commit_stage(folder, manifest_type, inputs=["f"], build=build)


def build_template(folder: Path) -> Path:
    """Write a run folder with an unfinished training and the stages that retention reads. Return the folder."""
    create_own_folder(folder)
    write_interactions_stage(
        folder / "ingest_interactions", train=[[0], [1]], validation=[[], []], test=[[1], [0]], num_items=2
    )
    report_fields = {"metrics": {}, "breaches": (), "warnings": (), "compared_with": None}
    _commit_stage_with_files(folder / "check_data", DataReportManifest, report_fields)
    registration_fields = {
        "model_name": "m", "version": "1", "alias": "champion", "promoted": True, "reasons": ("r",), "mlflow_run_id": "x",
        "metrics": {},
    }  # fmt: skip
    _commit_stage_with_files(folder / "register", RegistrationManifest, registration_fields)
    (folder / "config.yaml").write_text("name: tests\n")
    (folder / "loss.png").write_bytes(b"png")
    (folder / "train.work").mkdir()
    (folder / "train.work" / "checkpoint").write_bytes(bytes(STAGE_BYTES))
    return folder


@pytest.fixture(scope="session")
def complete_run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a complete run, to be copied."""
    return build_template(tmp_path_factory.mktemp("template") / "run")


@pytest.fixture(scope="session")
def rejected_report_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The check_data folder of a run whose data violates a limit."""
    folder = tmp_path_factory.mktemp("rejected") / "check_data"
    _commit_stage_with_files(
        folder, DataReportManifest, {"metrics": {}, "breaches": ("b",), "warnings": (), "compared_with": None}
    )
    return folder


@pytest.fixture
def add_run(complete_run_folder: Path, rejected_report_folder: Path) -> Callable[..., Run]:
    """A function that adds a run to a workspace.

    end: complete, rejected (by the data report) or failed (in the ingest). starting_run_id: the run whose model is
    the start of the training. link: create hard links instead of copies, which is faster.
    """

    def add(
        workspace: Path, run_id: str, *, end: str = "complete", starting_run_id: str | None = None, link: bool = False
    ) -> Run:
        run = run_of(workspace, run_id)
        shutil.copytree(complete_run_folder, run.folder, copy_function=os.link if link else shutil.copy2)
        if end != "complete":
            for stage in ("register", "train.work"):
                shutil.rmtree(run.folder / stage)
            shutil.rmtree(run.stage_folder(DataReportManifest))
        if end == "rejected":
            shutil.copytree(rejected_report_folder, run.stage_folder(DataReportManifest))
        if end == "failed":
            shutil.rmtree(run.stage_folder(InteractionsManifest))
        if starting_run_id is not None:
            (run.folder / CHAMPION_FILE_NAME).write_text(json.dumps({"run_id": starting_run_id}))
        return run

    return add


def files_below(folder: Path) -> set[str]:
    """Return the relative paths of all files in a folder and its subfolders."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
