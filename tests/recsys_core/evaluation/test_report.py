"""Tables and plots of the evaluation report."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from recsys_core import plots
from recsys_core.evaluation.report import metric_table, plot_loss, plot_recall, slice_rows, to_markdown
from recsys_core.manifests import SliceReport, TrainManifest
from recsys_core.training.job import Progress
from tests.recsys_core.manifests.committed_stage import commit_stage

METRICS = {
    "test/recall@10": 0.2,
    "test/recall@20": 0.4,
    "test/mrr": 0.1,
    "test/slice/cold_items/recall@20": 0.9,
    "baseline/popularity/recall@10": 0.05,
    "baseline/popularity/recall@20": 0.1,
    "baseline/popularity/mrr": 0.03,
}


def test_the_table_lists_the_model_and_its_baselines() -> None:
    table = metric_table(METRICS)
    assert table.columns == ("recall@20", "mrr")
    assert table.rows == {"model": (0.4, 0.1), "popularity": (0.1, 0.03)}
    assert to_markdown(table).splitlines()[-1] == "| popularity | 0.1000 | 0.0300 |"


def test_cold_items_have_rows_of_their_own_and_a_note_with_their_number() -> None:
    cold_metrics = {
        "test/cold/recall@20": 0.7,
        "test/cold/users": 5.0,
        "test/cold/items": 1200.0,
        "baseline/zero_shot/cold/recall@20": 0.8,
    }
    table = metric_table(METRICS | cold_metrics | {"baseline/zero_shot/recall@20": 0.3})
    assert list(table.rows) == ["model", "popularity", "zero_shot", "model, cold", "zero_shot, cold"]
    assert table.rows["model, cold"] == (0.7, None)
    assert table.best_comparable("popularity") == (0.4, 0.1)
    assert table.best_comparable("model, cold") == (0.8, 0.0)
    assert to_markdown(table).splitlines()[-3] == "| zero_shot, cold | 0.8000 | - |"
    assert to_markdown(table).splitlines()[-1] == "cold: 1,200 items without an earlier event, for 5 users"


def test_the_best_share_of_known_negatives_is_the_lowest() -> None:
    negative_metrics = {"test/known_negatives@10": 0.02, "baseline/popularity/known_negatives@10": 0.01}
    negative_metrics |= {"test/cold/recall@20": 0.7, "test/cold/users": 5.0, "test/cold/items": 1200.0}
    table = metric_table(METRICS | negative_metrics)
    assert table.columns == ("recall@20", "mrr", "known_negatives@10")
    assert table.best_comparable("model") == (0.4, 0.1, 0.01)
    assert table.best_comparable("model, cold") == (0.7, 0.0, 0.0)


def test_each_value_has_its_interval_and_a_note_has_the_intervals_of_the_model() -> None:
    table = metric_table(METRICS, half_widths={"test/recall@20": 0.05, "baseline/popularity/recall@20": 0.01})
    lines = to_markdown(table).splitlines()
    assert lines[2:4] == ["| model | 0.4000 ± 0.0500 | 0.1000 |", "| popularity | 0.1000 ± 0.0100 | 0.0300 |"]
    assert table.interval_note == "model, confidence intervals: recall@20 ± 0.0500"
    assert metric_table(METRICS).interval_note == ""


def test_cold_items_have_no_row_if_their_cut_off_is_not_a_column() -> None:
    table = metric_table(METRICS | {"test/cold/users": 2.0, "test/cold/items": 3.0, "test/cold/recall@2": 0.5})
    assert list(table.rows) == ["model", "popularity"]
    assert table.note == ""


def test_a_table_shows_the_closest_cut_off_if_the_usual_cut_off_was_not_measured() -> None:
    metrics = {"test/recall@5": 0.2, "test/recall@30": 0.4, "test/ndcg@5": 0.1, "test/cold/recall@30": 0.3}
    table = metric_table(metrics | {"test/cold/users": 5.0, "test/cold/items": 1200.0}, half_widths={"test/ndcg@5": 0.05})
    assert table.columns == ("recall@30", "ndcg@5")
    assert table.rows == {"model": (0.4, 0.1), "model, cold": (0.3, None)}
    assert table.half_widths == {"model": (None, 0.05)}
    report = SliceReport(
        name="head items", num_users=90, num_targets=95, min_users=30, metrics={"recall@5": 0.2}, half_widths={}
    )
    assert slice_rows([report])[0] == ["slice", "users", "targets", "recall@5"]


def test_a_slice_with_enough_users_has_no_value_if_neither_recall_nor_ndcg_is_measured() -> None:
    large_slice, small_slice = (
        SliceReport(name=name, num_users=num_users, num_targets=95, min_users=30, metrics={}, half_widths={})
        for name, num_users in (("head items", 90), ("cold items", 3))
    )
    assert slice_rows([large_slice, small_slice]) == [
        ["slice", "users", "targets", "metrics"],
        ["head items", "90", "95", "-"],
        ["cold items", "3", "95", "not enough data (30 users needed)"],
    ]


def write_train_stage(folder: Path, *, best_epoch: int | None) -> TrainManifest:
    """Write a training of four epochs with 10 steps each. The loss falls from epoch to epoch and rises within an epoch."""

    def write_files(output_folder: Path) -> dict[str, Any]:
        lines = [
            Progress(
                step=step, total_steps=100, epoch=1 + (step - 1) // 10, learning_rate=0.1, samples_per_s=10.0,
                loss=3 / (1 + (step - 1) // 10) + step % 10 / 50,
                validation={"recall@10": step / 90, "ndcg@10": step / 100} if best_epoch and step % 10 == 0 else {},
            )
            for step in range(2, 42, 2)
        ]  # fmt: skip
        (output_folder / "metrics.jsonl").write_text("".join(line.model_dump_json() + "\n" for line in lines))
        return {
            "world_size": 1, "num_steps": 40, "num_epochs": 4, "num_examples": 40, "final_loss": 1.0, "samples_per_s": 10.0,
            "num_attempts": 1, "best_epoch": best_epoch, "validation": {},
        }  # fmt: skip

    return commit_stage(folder, TrainManifest, inputs=["train"], build=write_files)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved during the test."""
    saved_figures: list[Figure] = []
    save_png = plots.save_png
    monkeypatch.setattr(plots, "save_png", lambda figure, path: saved_figures.append(figure) or save_png(figure, path))
    return saved_figures


@pytest.mark.parametrize("best_epoch", [None, 3])
def test_the_training_plot_has_a_panel_of_validation_metrics_if_they_were_measured(
    best_epoch: int | None, figures: list[Figure], tmp_path: Path
) -> None:
    path = plot_loss(write_train_stage(tmp_path / "train", best_epoch=best_epoch), path=tmp_path / "loss.png")
    assert path.is_file()
    labels = [axes.get_legend_handles_labels()[1] for axes in figures[0].axes]
    validation_labels = ["recall@10", "ndcg@10", "best epoch: 3"]
    assert labels == [["loss", "mean of the epoch"], *([validation_labels] if best_epoch else [])]


def test_the_recall_plot_has_the_rankers_in_the_order_of_the_table(figures: list[Figure], tmp_path: Path) -> None:
    baselines = ("zero_shot", "closed_form", "cooccurrence", "recent_popularity")
    metrics = METRICS | {f"baseline/{name}/recall@{k}": 0.3 for name in baselines for k in (10, 20)}
    plot_recall(metrics, path=tmp_path / "recall.png")
    assert list(metric_table(metrics).rows) == [
        "model", "popularity", "recent_popularity", "cooccurrence", "closed_form", "zero_shot",
    ]  # fmt: skip
    labels = figures[0].axes[0].get_legend_handles_labels()[1]
    assert labels == ["model", "popularity", "recent-popularity", "cooccurrence", "closed-form", "zero-shot"]


def test_the_recall_plot_has_a_bar_per_ranker_and_cut_off(figures: list[Figure], tmp_path: Path) -> None:
    assert plot_recall(METRICS, path=tmp_path / "recall.png").is_file()
    assert [bar.get_height() for bar in figures[0].axes[0].patches] == [0.2, 0.4, 0.05, 0.1]
