"""The run ids that flow runs of Prefect get."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows import prefect_runs
from flows.prefect_runs import run_id_of_flow_run
from tasks.runs.workspace import Workspace

START = datetime(2026, 11, 20, 3, 0, tzinfo=UTC)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def set_current_flow_run(monkeypatch: pytest.MonkeyPatch, flow_run_id: str, *, scheduled_start: datetime = START) -> None:
    """Make `flow_run_id` the id of the current flow run."""
    flow_run = SimpleNamespace(id=flow_run_id, scheduled_start_time=scheduled_start)
    monkeypatch.setattr(prefect_runs, "runtime", SimpleNamespace(flow_run=flow_run))


def create_run_folder(workspace: Workspace, run_id: str) -> str:
    """Create the folder of a run and return `run_id`."""
    workspace.run(run_id).folder.mkdir(parents=True)
    return run_id


def test_a_run_id_has_the_scheduled_time_and_a_retry_keeps_the_id(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_run_folder(workspace, "20261119-030000-ffff")
    set_current_flow_run(monkeypatch, "abcd1234-0000")
    assert create_run_folder(workspace, run_id_of_flow_run(workspace)) == "20261120-030000-abcd1234"
    create_run_folder(workspace, "20261120-040000-1111")
    assert run_id_of_flow_run(workspace) == "20261120-030000-abcd1234"


@pytest.mark.parametrize("newest_run_id", ["20990101-000000-ffff", "20261120-030000-0000"], ids=["future", "same time"])
def test_a_run_id_sorts_after_the_newest_id_and_a_retry_keeps_the_id(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, newest_run_id: str
) -> None:
    create_run_folder(workspace, newest_run_id)
    set_current_flow_run(monkeypatch, "abcd1234-0000")
    run_id = create_run_folder(workspace, run_id_of_flow_run(workspace))
    assert run_id == f"{newest_run_id[:14]}1-abcd1234"
    set_current_flow_run(monkeypatch, "eeee5678-0000")
    later_run_id = create_run_folder(workspace, run_id_of_flow_run(workspace))
    assert later_run_id == f"{newest_run_id[:14]}2-eeee5678"
    set_current_flow_run(monkeypatch, "abcd1234-0000")
    assert run_id_of_flow_run(workspace) == run_id
    assert [run.run_id for run in workspace.runs()] == [newest_run_id, run_id, later_run_id]
