"""Prometheus metrics of the newest run, parsed by prometheus_client's own parser."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from flows.runs.metrics_file import METRICS_FILE_NAME, write_metrics_file
from flows.runs.run_history import run_history
from flows.settings.pipeline import PipelineConfig
from flows.settings.template import starter_config
from recsys_core.manifests import MARKER_NAME
from tasks.runs.workspace import Workspace
from tests.flows.run_folders import FIRST_START, METRIC, month_of_runs, past_run
from tests.tasks.retention.run_folders_by_hand import run_ids

ROOT = Path(__file__).resolve().parents[3]


def config_of(workspace: Path, *, name: str = "films") -> PipelineConfig:
    return starter_config().model_copy(update={"workspace": workspace, "name": name})


def values_by_metric(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the values of each metric, by the values of its labels except the label `pipeline`."""
    return {
        family.name.removeprefix("nightjar_"): {
            tuple(value for name, value in sample.labels.items() if name != "pipeline"): sample.value
            for sample in family.samples
        }
        for family in text_string_to_metric_families(text)
    }


def test_the_file_has_the_figures_of_the_newest_run(tmp_path: Path) -> None:
    month_of_runs(tmp_path)
    write_metrics_file(config_of(tmp_path))
    metrics, record = values_by_metric((tmp_path / METRICS_FILE_NAME).read_text()), run_history(tmp_path)[0].record
    figures = record.figures
    assert record.ended is not None
    assert metrics["run_start_timestamp_seconds"] == {(): record.started.timestamp()}
    assert (
        metrics["run_end_timestamp_seconds"] == metrics["last_registration_timestamp_seconds"] == {(): record.ended.timestamp()}
    )
    assert {state for state, value in metrics["run_state"].items() if value == 1} == {("Promoted",)}
    assert metrics["run_state"][("Failed",)] == 0
    assert metrics["stage_duration_seconds"][("train",)] == 1900
    new_recall, champion_recall = figures.metrics[f"served/{METRIC}"], figures.metrics[f"champion/{METRIC}"]
    assert metrics["served_metric"] == {(METRIC, "new"): new_recall, (METRIC, "champion"): champion_recall}
    assert [metrics[name][()] for name in ("events", "users", "items")] == [figures.events, figures.users, figures.items]
    assert metrics["champion_version"] == {(): float(figures.version or 0)}
    assert metrics["workspace_bytes"][()] > 10_000 and metrics["free_bytes"][()] > 0
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [METRICS_FILE_NAME]  # no temporary file


def test_a_run_id_from_the_future_does_not_change_which_run_is_the_newest(tmp_path: Path) -> None:
    future_run = past_run(tmp_path, datetime(2090, 1, 1, tzinfo=UTC), state="Promoted", version="7")
    newest_run = Workspace(tmp_path).run(Workspace(tmp_path).new_run_id())
    failed_run = past_run(tmp_path, FIRST_START, state="Failed")
    failed_run.folder.rename(newest_run.folder)  # the time in the run id is now later than the start in the record
    for run in (future_run, newest_run):
        (run.folder / MARKER_NAME).touch()
    assert [listed_run.run.run_id for listed_run in run_history(tmp_path)] == [newest_run.run_id, future_run.run_id]
    assert run_ids(tmp_path) == [future_run.run_id, newest_run.run_id]
    assert Workspace(tmp_path).newest_run() == newest_run
    write_metrics_file(config_of(tmp_path))
    metrics = values_by_metric((tmp_path / METRICS_FILE_NAME).read_text())
    assert {state for state, value in metrics["run_state"].items() if value == 1} == {("Failed",)}
    assert metrics["run_start_timestamp_seconds"] == {(): FIRST_START.timestamp()}


def test_an_older_run_that_was_resumed_and_ended_last_has_the_last_registration(tmp_path: Path) -> None:
    resumed_end, newest_end = FIRST_START + timedelta(days=2), FIRST_START + timedelta(days=1, hours=1)
    past_run(tmp_path, FIRST_START, state="Promoted", version="8", started=resumed_end - timedelta(hours=1), ended=resumed_end)
    past_run(tmp_path, FIRST_START + timedelta(days=1), state="Promoted", version="7", ended=newest_end)
    write_metrics_file(config_of(tmp_path))
    metrics = values_by_metric((tmp_path / METRICS_FILE_NAME).read_text())
    assert metrics["last_registration_timestamp_seconds"] == {(): resumed_end.timestamp()}
    assert metrics["champion_version"] == {(): 8}


def test_a_registration_in_the_future_does_not_hide_the_last_registration(tmp_path: Path) -> None:
    past_end = FIRST_START - timedelta(days=700)
    past_run(tmp_path, past_end, state="NotPromoted", version="7", ended=past_end)
    past_run(tmp_path, datetime(2090, 1, 1, tzinfo=UTC), state="Promoted", version="6")
    write_metrics_file(config_of(tmp_path))
    metrics = values_by_metric((tmp_path / METRICS_FILE_NAME).read_text())
    assert metrics["last_registration_timestamp_seconds"] == {(): past_end.timestamp()}


def test_the_file_of_a_failed_run_leaves_out_the_metrics_that_the_run_does_not_have(tmp_path: Path) -> None:
    past_run(tmp_path, FIRST_START, state="Promoted", version="7")
    past_run(tmp_path, FIRST_START + timedelta(days=1), state="Failed", num_stages=0, message="no such file")
    write_metrics_file(config_of(tmp_path))
    metrics = values_by_metric((tmp_path / METRICS_FILE_NAME).read_text())
    assert metrics["run_state"][("Failed",)] == 1
    assert metrics["events"] == metrics["served_metric"] == metrics["stage_duration_seconds"] == {}
    assert metrics["champion_version"] == {(): 7}


def test_the_file_is_valid_for_an_empty_workspace_and_a_pipeline_name_with_quotes(tmp_path: Path) -> None:
    name = 'films "new"\\'
    write_metrics_file(config_of(tmp_path, name=name))
    text = (tmp_path / METRICS_FILE_NAME).read_text()
    assert "run_state" not in values_by_metric(text)
    (family,) = (family for family in text_string_to_metric_families(text) if family.name == "nightjar_workspace_bytes")
    assert family.samples[0].labels == {"pipeline": name}


def test_alerts_and_dashboard_use_existing_metrics(tmp_path: Path) -> None:
    month_of_runs(tmp_path)
    write_metrics_file(config_of(tmp_path))
    exported_names = values_by_metric((tmp_path / METRICS_FILE_NAME).read_text()).keys()
    paths = [ROOT / "infra/compose/alerts.yaml", ROOT / "infra/compose/grafana/nightjar.json", ROOT / "docs/operations.md"]
    for path in paths:
        used_names = set(re.findall(r"\bnightjar_([a-z_]+)", path.read_text(encoding="utf-8")))
        assert used_names and used_names <= exported_names, path
