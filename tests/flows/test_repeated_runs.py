"""The plot of a backtest: one panel for each served metric, and one line for each ranker with values."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from flows.repeated_runs import Day, plot_days
from recsys_core import plots


def test_the_plot_of_a_backtest_shows_every_metric_and_the_baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(plots, "save_png", lambda figure, path: saved.append(figure) or path)
    names = ("test/ndcg@20", "test/recall@20", "baseline/closed_form/ndcg@20", "baseline/cooccurrence/ndcg@20", "other")
    days = [
        Day(
            until=datetime(2026, 1, day, tzinfo=UTC),
            run_id=f"{day}",
            state="Promoted",
            message="",
            version=f"{day}",
            metrics=dict.fromkeys(names, day / 10) | ({} if day == 1 else {"champion/ndcg@20": 0.7}),
        )
        for day in (1, 2)
    ]
    assert plot_days(days, metric="ndcg@20", path=tmp_path / "backtest.png") == tmp_path / "backtest.png"
    panels = saved[0].axes
    assert [axes.get_ylabel() for axes in panels] == ["ndcg@20", "recall@20", "hit_rate@10"]
    assert {line.get_label(): list(line.get_ydata()) for line in panels[0].lines} == {
        "model": [0.1, 0.2],
        "champion before": [0.7],
        "closed form": [0.1, 0.2],
        "co-occurrence": [0.1, 0.2],
    }
    assert [text.get_text() for text in panels[-1].get_xticklabels()] == ["01-01\nPromoted", "01-02\nPromoted"]
