"""Repeated runs: the configs of the runs that measure the noise of the gate, and the plot of a backtest."""

from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
from matplotlib.figure import Figure

from flows import repeated_runs
from flows.repeated_runs import BacktestRun, measure_gate_noise, plot_backtest
from flows.settings.config_file import dump_config, load_config
from flows.settings.pipeline import PipelineConfig
from recsys_core import plots
from tasks.delivery.config import DeliveryConfig


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


def test_a_repeated_run_has_a_valid_config_that_delivers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noise.yaml").write_text(
        "interactions: {paths: log.parquet, timestamp_column: time}\n"
        "features: {items: {paths: items.parquet, id_column: item_id, features: [{name: brand}]}}\n"
        "evaluation: {slices: [{feature: item.brand}]}\n"
        "registry: {guardrails: {features: [item.brand]}}\n"
        "delivery: {recommendations: {folder: recs}, stores: [{kind: lancedb, folder: vectors}]}\n"
    )
    configs: list[PipelineConfig] = []
    record = Mock(figures=Mock(metrics={"test/recall@20": 0.1}))
    monkeypatch.setattr(repeated_runs, "nightly_retrain", lambda config, **_: configs.append(config))
    monkeypatch.setattr(repeated_runs.RunRecord, "read", lambda run: record)

    noise = measure_gate_noise.fn(load_config(tmp_path / "noise.yaml"), 2)

    assert noise.mean == 0.1 and [config.training.seed for config in configs] == [7, 8]
    for config in configs:
        assert config.delivery == DeliveryConfig() and config.workspace == tmp_path / "workspace" / "gate-noise"
        dump_config(config, tmp_path / "repeated.yaml")
        assert load_config(tmp_path / "repeated.yaml") == config
