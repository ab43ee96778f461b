"""Stage `check_data`: violated limits, the run that the data is compared with, and logging to MLflow."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from recsys_core.data_report.limits import DataReportConfig
from recsys_core.errors import InputError
from recsys_core.ingest.log.split_config import FileSplit
from recsys_core.manifests import DataReportManifest, InteractionsManifest
from recsys_core.units import DAY_US
from tasks.registry import mlflow_client
from tasks.registry.mlflow_client import connect
from tasks.registry.tracking import open_mlflow_run
from tasks.runs.context import Results, StageContext
from tasks.runs.run import Run
from tasks.stages import data_report
from tests.recsys_core.ingest.interactions_with_times import interactions_of
from tests.tasks.unhealthy_servers import closed_address, silent_server

pytestmark = pytest.mark.usefixtures("empty_plots")


@pytest.fixture
def workspace(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace that receives the Prefect artifacts of the stage as files."""
    monkeypatch.setattr(data_report, "show_markdown", lambda context, name, text: (workspace / f"{name}.md").write_text(text))
    return workspace


@pytest.fixture
def no_mlflow(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log no report to MLflow, which saves seconds."""
    monkeypatch.setattr(data_report, "log_data_report_or_warn", lambda context, report: None)


def check_data(workspace: Path, day: int, *, num_events: int, **limits: Any) -> DataReportManifest:
    """Execute the stage in the run of 2026-11-`day`. The log has one training event on each of `num_events` days."""
    run = Run(f"202611{day}-020000-aaaa", workspace=workspace)
    # The training, validation and test events of one user, as pairs of an item row and a time.
    train_events = [(0, event_day * DAY_US) for event_day in range(num_events)]
    log = [(train_events, [], [(0, 99 * DAY_US)])]
    interactions = interactions_of(run.stage_folder(InteractionsManifest), log, item_ids=[7])
    run.config_file.write_text("name: tests\n")
    split = FileSplit(test_paths=("test.parquet",))
    context = StageContext(run, experiment="tests", results=Results([interactions]))
    limits = {"min_test_users": None} | limits
    manifest: DataReportManifest = data_report.check_data(context, DataReportConfig(**limits), split=split)
    return manifest


def test_a_violated_limit_raises_an_error_that_names_the_page(workspace: Path, no_mlflow: None) -> None:
    with pytest.raises(InputError) as error_info:
        check_data(workspace, 20, num_events=4, min_train_events=5, min_item_vector_share=0.5)
    message = str(error_info.value)
    page_path = workspace / "runs" / "20261120-020000-aaaa" / "check_data" / "report.html"
    assert "- training events: 4, but data_report.min_train_events requires at least 5\n" in message
    assert "- items with a pretrained vector: 0 %, but data_report.min_item_vector_share requires at least 50 %\n" in message
    assert f"see {page_path}" in message and "--resume 20261120-020000-aaaa" in message
    assert page_path.is_file() and "**2 limits violated**" in (workspace / "data-report.md").read_text()


def test_by_default_too_few_test_users_end_the_run(workspace: Path, no_mlflow: None) -> None:
    with pytest.raises(InputError, match=r"users with a test event: 1, but data_report\.min_test_users requires at least 50"):
        check_data(workspace, 20, num_events=4, min_test_users=DataReportConfig().min_test_users)
    assert "| users with a test event | 1 |" in (workspace / "data-report.md").read_text()


def test_a_resumed_run_with_a_relaxed_limit_continues(workspace: Path, no_mlflow: None) -> None:
    for _ in range(2):  # the second time, the complete stage is reused
        with pytest.raises(InputError):
            check_data(workspace, 20, num_events=4, min_train_events=5)
    assert check_data(workspace, 20, num_events=4).breaches == ()


def test_later_runs_are_not_compared_with_a_run_that_violated_a_limit(workspace: Path, no_mlflow: None) -> None:
    assert check_data(workspace, 20, num_events=40).compared_with is None
    for day in (21, 22):  # day 22 would pass if it were compared with day 21
        with pytest.raises(InputError, match="drop of training events since the previous run: 90 %"):
            check_data(workspace, day, num_events=4)
    assert check_data(workspace, 23, num_events=30).compared_with == "20261120-020000-aaaa"


def test_page_and_metrics_are_logged_to_mlflow_even_if_a_limit_is_violated(workspace: Path) -> None:
    check_data(workspace, 20, num_events=10)
    with pytest.raises(InputError):
        check_data(workspace, 21, num_events=10, min_train_events=11)
    client = connect(workspace)
    for run_id, num_breaches, status in (("20261120-020000-aaaa", 0, "FINISHED"), ("20261121-020000-aaaa", 1, "FAILED")):
        mlflow_run = client.get_run(open_mlflow_run(client, StageContext(Run(run_id, workspace=workspace), experiment="tests")))
        assert (mlflow_run.data.metrics["data/breaches"], mlflow_run.info.status) == (num_breaches, status)
        assert mlflow_run.data.metrics["data/train_events"] == 10
        assert [file.path for file in client.list_artifacts(mlflow_run.info.run_id, "data_report")] == [
            "data_report/report.html"
        ]


@pytest.mark.parametrize(
    ("run_server", "timeout_s", "problem"),
    [(lambda: nullcontext(closed_address()), 60.0, "Connection refused"), (silent_server, 0.5, "no answer within 0.5 s")],
    ids=["closed port", "server that never answers"],
)
def test_an_outage_of_mlflow_causes_a_warning_and_the_run_continues_after_a_bounded_time(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    run_server: Callable[[], AbstractContextManager[str]],
    timeout_s: float,
    problem: str,
) -> None:
    monkeypatch.setattr(mlflow_client, "ANSWER_TIMEOUT_S", timeout_s)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(logging.getLogger("nightjar"), "propagate", True)
    with run_server() as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        assert check_data(workspace, 20, num_events=10).breaches == ()
    message = f"could not log the data report to MLflow; it will be logged at registration (MLflow at {address} does not work"
    assert message in caplog.text and problem in caplog.text
