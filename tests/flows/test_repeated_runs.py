"""Backtest and gate noise: the configs, workspaces and records of their runs, and the plot of a backtest."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from matplotlib.figure import Figure
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows import repeated_runs
from flows.repeated_runs import BacktestRun, backtest, measure_gate_noise, plot_backtest
from flows.settings.config_file import dump_config, load_config
from flows.settings.pipeline import PipelineConfig
from recsys_core import plots
from recsys_core.errors import InputError
from recsys_core.manifests import Dataset
from tasks.delivery.config import DeliveryConfig
from tasks.runs.context import RunOptions
from tasks.runs.run import REDUCED_FILE_NAME, Run
from tasks.runs.run_record import RunFigures, RunRecord


def test_the_plot_of_a_backtest_has_a_panel_per_metric_and_lines_of_the_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_figures: list[Figure] = []
    monkeypatch.setattr(plots, "save_png", lambda figure, path: saved_figures.append(figure) or path)
    metric_names = ("test/ndcg@20", "test/recall@20", "baseline/closed_form/ndcg@20", "baseline/cooccurrence/ndcg@20", "other")
    runs = [
        BacktestRun(
            until=datetime(2026, 1, day, tzinfo=UTC),
            run_id=f"{day}",
            state="Promoted",
            message="",
            version=f"{day}",
            metrics=dict.fromkeys(metric_names, day / 10) | ({} if day == 1 else {"champion/ndcg@20": 0.7}),
        )
        for day in (1, 2)
    ]
    assert plot_backtest(runs, metric="ndcg@20", path=tmp_path / "backtest.png") == tmp_path / "backtest.png"
    panels = saved_figures[0].axes
    assert [axes.get_ylabel() for axes in panels] == ["ndcg@20", "recall@20", "hit_rate@10"]
    assert {line.get_label(): list(line.get_ydata()) for line in panels[0].lines} == {
        "model": [0.1, 0.2],
        "champion before": [0.7],
        "closed form": [0.1, 0.2],
        "co-occurrence": [0.1, 0.2],
    }
    assert [text.get_text() for text in panels[-1].get_xticklabels()] == ["01-01\nPromoted", "01-02\nPromoted"]


CONFIG = """
interactions: {paths: log.parquet, timestamp_column: time}
features: {items: {paths: items.parquet, id_column: item_id, features: [{name: brand}]}}
evaluation: {slices: [{feature: item.brand}]}
registry: {guardrails: {features: [item.brand]}}
delivery: {recommendations: {folder: recs}, stores: [{kind: lancedb, folder: vectors}]}
"""


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "nightly.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def executed_configs(monkeypatch: pytest.MonkeyPatch) -> list[PipelineConfig]:
    """The configs of the nightly runs that a test executes. Each of these runs only writes a record."""
    configs: list[PipelineConfig] = []
    interactions = Mock(last_time="2026-11-20T10:00:00+00:00")
    monkeypatch.setattr(repeated_runs, "ingest", lambda context, config: Dataset(interactions, None, None, None))

    def write_record(config: PipelineConfig, *, run_id: str, **_: Any) -> State[Any]:
        configs.append(config)
        run = Run(run_id, workspace=config.workspace)
        run.folder.mkdir(parents=True, exist_ok=True)
        figures = RunFigures(metrics={"test/recall@20": config.training.epochs / 100})
        now = datetime.now(UTC)
        record = RunRecord(pipeline="nightly", options=RunOptions(), host="a", pid=1, started=now, ended=now, state="Promoted")
        record.model_copy(update={"figures": figures}).write(run)
        return Completed()

    monkeypatch.setattr(repeated_runs, "nightly_retrain", write_record)
    return configs


def test_a_repeated_run_has_a_valid_config_that_delivers_nothing(
    config_path: Path, executed_configs: list[PipelineConfig], tmp_path: Path
) -> None:
    noise = measure_gate_noise.fn(load_config(config_path), num_seeds=2)

    assert noise.mean == 0.1  # 10 epochs, the default, divided by 100 in `write_record`
    assert [config.training.seed for config in executed_configs] == [7, 8]
    for config in executed_configs:
        assert config.delivery == DeliveryConfig() and config.workspace.parent == tmp_path / "workspace" / "gate-noise"
        dump_config(config, tmp_path / "repeated.yaml")
        assert load_config(tmp_path / "repeated.yaml") == config


def test_a_backtest_with_other_settings_or_days_has_a_workspace_and_a_model_of_its_own(
    config_path: Path, executed_configs: list[PipelineConfig]
) -> None:
    for overrides, num_days in (([], 2), (["training.epochs=3"], 2), ([], 3)):
        backtest.fn(load_config(config_path, overrides), num_days)
    assert len({config.workspace for config in executed_configs}) == 3
    # All workspaces may share one MLflow server.
    assert len({config.registry.model_name for config in executed_configs}) == 3
    assert len({config.registry.experiment for config in executed_configs}) == 3
    assert executed_configs[0].registry == executed_configs[1].registry


def test_a_backtest_continues_in_its_workspace_if_a_change_does_not_affect_its_runs(
    config_path: Path, executed_configs: list[PipelineConfig]
) -> None:
    first_result = backtest.fn(load_config(config_path), 2)
    continued_result = backtest.fn(load_config(config_path, ["schedule.cron=0 2 * * *", "training.max_attempts=7"]), 2)
    assert first_result.folder == continued_result.folder
    assert [run.run_id for run in first_result.runs] == [run.run_id for run in continued_result.runs]
    assert [run.until.day for run in first_result.runs] == [19, 20]
    assert (first_result.folder / "backtest.json").is_file() and (first_result.folder / "backtest.png").is_file()


def test_a_run_without_its_large_files_is_not_executed_again(config_path: Path, executed_configs: list[PipelineConfig]) -> None:
    first_result = backtest.fn(load_config(config_path), 2)
    (first_result.folder / "runs" / first_result.runs[0].run_id / REDUCED_FILE_NAME).touch()
    executed_configs.clear()
    assert backtest.fn(load_config(config_path), 2).runs == first_result.runs
    assert len(executed_configs) == 1


def test_a_backtest_raises_the_error_of_a_run_that_cannot_start_again(
    config_path: Path, executed_configs: list[PipelineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    backtest.fn(load_config(config_path), 1)
    failed_state = Failed(data=InputError("another process is working on the run"))
    monkeypatch.setattr(repeated_runs, "nightly_retrain", lambda *_, **__: failed_state)
    with pytest.raises(InputError, match="another process is working on the run"):
        backtest.fn(load_config(config_path), 1)
