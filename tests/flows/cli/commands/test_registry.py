"""`nightjar clean`: its table, --dry-run, a workspace that another command uses; the summary of `nightjar recommend`."""

import io
from pathlib import Path

import pytest
from mlflow.entities.model_registry import ModelVersion, ModelVersionTag
from rich.console import Console

from flows.cli import output
from flows.cli.commands import registry
from flows.cli.commands.registry import clean_workspace, print_removals
from flows.settings.config_file import load_config
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError
from recsys_core.manifests import TrainManifest, create_own_folder
from tasks.delivery.recommendations import BatchSummary
from tasks.registry.mlflow_client import RUN_ID_TAG
from tasks.retention.clean import Removals
from tasks.runs.run import Run
from tasks.runs.workspace import Workspace
from tests.tasks.retention.run_folders_by_hand import run_ids

MEBIBYTE = 2**20


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineConfig:
    """Config of a workspace with four runs, of which retention keeps two."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(
        "workspace: .\ninteractions: {paths: log.parquet, timestamp_column: t}\n"
        "retention: {keep_full_runs: 1, keep_report_runs: 2}\n"
    )
    for index in range(4):
        work_folder = Run(f"2026{index}", workspace=tmp_path).stage_folder(TrainManifest).with_name("train.work")
        create_own_folder(work_folder.parent)
        work_folder.mkdir()
        (work_folder / "checkpoint").write_bytes(bytes(MEBIBYTE))
    return load_config(config_path, ())


def printed_text(removals: Removals, *, dry_run: bool) -> str:
    """Return the printed text of `nightjar clean` for these removals."""
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "stdout", Console(file=stream, width=120))
        print_removals(removals, dry_run=dry_run)
    return stream.getvalue()


def test_a_dry_run_lists_the_runs_that_the_command_removes(config: PipelineConfig) -> None:
    dry_run_text = printed_text(clean_workspace(config, dry_run=True), dry_run=True)
    assert [line.split() for line in dry_run_text.splitlines()[:4]] == [
        ["run", "to", "remove"],
        ["20260", "folder"],
        ["20261", "folder"],
        ["20262", "all", "but", "reports"],
    ]
    assert "files of 3 runs and 0 model versions; remove them with the same command without --dry-run" in dry_run_text
    assert run_ids(config.workspace) == ["20260", "20261", "20262", "20263"]
    with Workspace(config.workspace).lock(run_id="other"), pytest.raises(InputError, match="with run other, since"):
        clean_workspace(config, dry_run=False)
    assert "removed files of 3 runs and 0 model versions: 0.003 GiB" in printed_text(
        clean_workspace(config, dry_run=False), dry_run=False
    )
    assert run_ids(config.workspace) == ["20262", "20263"]
    assert printed_text(clean_workspace(config, dry_run=False), dry_run=False) == "Nothing to remove.\n"


def test_versions_are_listed_with_their_model_and_run() -> None:
    version = ModelVersion("m", "3", 0, tags=[ModelVersionTag(RUN_ID_TAG, "20261")])
    rows = [line.split() for line in printed_text(Removals([], [version]), dry_run=False).splitlines()]
    assert rows[1] == ["20261", "m", "version", "3"]


def test_the_summary_of_recommendations_names_their_largest_number_per_user(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = BatchSummary(
        version="3",
        space_id="f0",
        k=1_000,
        num_rows=2,
        columns=["user_id"],
        num_rows_by_fallback={"model": 2},
        settings={},
        num_bytes_by_file={},
    )
    monkeypatch.setattr(registry, "recommend_many", lambda *_, **__: summary)
    delivery = config.delivery.model_copy(
        update={"recommendations": config.delivery.recommendations.model_copy(update={"folder": Path("out")})}
    )
    registry.recommend(config.model_copy(update={"delivery": delivery}), model_uri=None, as_json=False)
    assert "2, at most 1,000 items each, " in capsys.readouterr().out  # the catalogue may have fewer items
