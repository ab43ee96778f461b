"""Run ids of flow runs."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows import prefect_runs
from flows.prefect_runs import run_id_in
from tasks.runs.workspace import Workspace

START = datetime(2026, 11, 20, 3, 0, tzinfo=UTC)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def start_flow_run(monkeypatch: pytest.MonkeyPatch, flow_run_id: str, *, scheduled: datetime = START) -> None:
    """Make a flow run the current one."""
    flow_run = SimpleNamespace(id=flow_run_id, scheduled_start_time=scheduled)
    monkeypatch.setattr(prefect_runs, "runtime", SimpleNamespace(flow_run=flow_run))


def create(workspace: Workspace, run_id: str) -> str:
    workspace.run(run_id).folder.mkdir(parents=True)
    return run_id


def test_a_run_has_the_scheduled_time_and_its_retry_has_the_same_id(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(workspace, "20261119-030000-ffff")
    start_flow_run(monkeypatch, "abcd1234-0000")
    assert create(workspace, run_id_in(workspace)) == "20261120-030000-abcd1234"
    create(workspace, "20261120-040000-1111")
    assert run_id_in(workspace) == "20261120-030000-abcd1234"


@pytest.mark.parametrize("newest", ["20990101-000000-ffff", "20261120-030000-0000"])
def test_a_run_follows_a_run_in_the_future_and_its_retry_has_the_same_id(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, newest: str
) -> None:
    create(workspace, newest)
    start_flow_run(monkeypatch, "abcd1234-0000")
    run_id = create(workspace, run_id_in(workspace))
    assert run_id == f"{newest[:14]}1-abcd1234"
    start_flow_run(monkeypatch, "eeee5678-0000")
    later_id = create(workspace, run_id_in(workspace))
    assert later_id == f"{newest[:14]}2-eeee5678"
    start_flow_run(monkeypatch, "abcd1234-0000")
    assert run_id_in(workspace) == run_id
    assert [run.run_id for run in workspace.runs()] == [newest, run_id, later_id]
