"""Evaluation and training results as tables and figures, for the terminal, Prefect and MLflow."""

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import Field

from recsys_core import plots
from recsys_core.config import Frozen
from recsys_core.errors import printable
from recsys_core.manifests import SliceReport, TrainManifest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RANKER_COLOURS = {
    "model": plots.BLUE,
    "popularity": plots.GREY,
    "recent_popularity": "#7d8893",
    "cooccurrence": plots.ORANGE,
    "closed_form": "#7a5195",
    "zero_shot": plots.GREEN,
}
"""Colours of the rankers in the recall plot, in the order in which tables list the rankers."""
MAX_HORIZONTAL_LABELS = 3
"""If there are more rankers, the labels of the values in the recall plot are vertical."""
SHOWN_METRICS = ("recall@20", "ndcg@10", "hit_rate@10", "mrr", "auc", "coverage@20", "known_negatives@10")
"""Metrics that the tables show by default. If a cut-off was not measured, a table shows the closest one that was measured."""
LOWER_IS_BETTER_PREFIX = "known_negatives@"
"""Prefix of the metrics whose lowest value is the best."""
MAX_LABELLED_EPOCHS = 15
COLD_SUFFIX = ", cold"
"""Suffix of the rows whose metrics rank only cold items."""


class MetricTable(Frozen):
    """Metrics of the rankers (the model and its baselines), one row each. A value is None if the metric was not measured."""

    columns: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]
    half_widths: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)
    """Half widths of the confidence intervals, by row."""
    note: str = ""
    """Text with the numbers of items and users of the rows for cold items; empty if there are no such rows."""

    @property
    def interval_note(self) -> str:
        """Half widths of the model's intervals as a text, for a table without room for them; empty if there are none."""
        half_widths = zip(self.columns, self.half_widths.get("model", ()), strict=False)
        interval_texts = [f"{column} ± {half_width:.4f}" for column, half_width in half_widths if half_width is not None]
        return f"model, confidence intervals: {', '.join(interval_texts)}" if interval_texts else ""

    def best_comparable(self, ranker: str) -> tuple[float, ...]:
        """Return the best value of each column among the rows that rank the same items as the row `ranker`.

        >>> rows = {"model": (0.2, 0.1), "popularity": (0.3, 0.2), "model, cold": (0.9, None)}
        >>> MetricTable(columns=("recall@20", "known_negatives@10"), rows=rows).best_comparable("model")
        (0.3, 0.1)
        """
        is_cold = ranker.endswith(COLD_SUFFIX)
        comparable_values = [values for row_ranker, values in self.rows.items() if row_ranker.endswith(COLD_SUFFIX) == is_cold]
        min_or_max_by_column = [min if column.startswith(LOWER_IS_BETTER_PREFIX) else max for column in self.columns]
        return tuple(
            min_or_max([value for value in column_values if value is not None], default=0.0)
            for min_or_max, column_values in zip(min_or_max_by_column, zip(*comparable_values, strict=True), strict=True)
        )


def metric_table(
    metrics: Mapping[str, float], *, half_widths: Mapping[str, float] | None = None, shown: Sequence[str] = SHOWN_METRICS
) -> MetricTable:
    """Build the table of the test metrics of the model and its baselines. Rows for cold items come last.

    Args:
        metrics, half_widths: see EvaluationManifest.
        shown: metrics to show; see SHOWN_METRICS for their cut-offs.

    >>> metric_table({"test/mrr": 0.5, "baseline/popularity/mrr": 0.25}).rows
    {'model': (0.5,), 'popularity': (0.25,)}
    """
    metrics_by_ranker = _metrics_by_row(metrics)
    half_widths_by_ranker = _metrics_by_row(half_widths or {})
    columns = _shown_columns(shown, metrics_by_ranker["model"])
    cold_note = ""
    shown_rankers = [
        ranker for ranker, values in metrics_by_ranker.items() if not ranker.endswith(COLD_SUFFIX) or values.keys() & {*columns}
    ]
    if f"model{COLD_SUFFIX}" in shown_rankers:
        cold_metrics = metrics_by_ranker[f"model{COLD_SUFFIX}"]
        cold_note = f"cold: {cold_metrics['items']:,.0f} items without an earlier event, for {cold_metrics['users']:,.0f} users"
    return MetricTable(
        columns=columns,
        rows={ranker: tuple(metrics_by_ranker[ranker].get(column) for column in columns) for ranker in shown_rankers},
        half_widths={
            ranker: tuple(values.get(column) for column in columns) for ranker, values in half_widths_by_ranker.items()
        },
        note=cold_note,
    )


def to_markdown(table: MetricTable) -> str:
    """Return the table in GitHub's Markdown.

    >>> print(to_markdown(MetricTable(columns=("mrr", "auc"), rows={"model": (0.5, None)})))
    | | mrr | auc |
    |:---|---:|---:|
    | model | 0.5000 | - |
    """
    lines = ["| | " + " | ".join(table.columns) + " |", "|:---|" + "---:|" * len(table.columns)]
    for ranker, values in table.rows.items():
        half_widths = table.half_widths.get(ranker, (None,) * len(values))
        cells = [_cell(value, half_width) for value, half_width in zip(values, half_widths, strict=True)]
        lines.append(f"| {ranker} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", table.note] if table.note else lines)


def slices_to_markdown(slices: Sequence[SliceReport], *, shown: Sequence[str] = SHOWN_METRICS) -> str:
    """Return a table of the slices in GitHub's Markdown. A slice with too few users has no metrics.

    >>> small = SliceReport(name="cold items", num_users=3, num_targets=4, min_users=30, metrics={}, half_widths={})
    >>> values = {"metrics": {"recall@20": 0.5}, "half_widths": {"recall@20": 0.1}}
    >>> large = SliceReport(name="head items", num_users=90, num_targets=95, min_users=30, **values)
    >>> print(slices_to_markdown([large, small]))
    | slice | users | targets | recall@20 |
    |:---|---:|---:|---:|
    | head items | 90 | 95 | 0.5000 ± 0.1000 |
    | cold items | 3 | 4 | not enough data (30 users needed) |
    """
    titles, *rows = ([cell.replace("|", "\\|") for cell in row] for row in slice_rows(slices, shown=shown))
    lines = [f"| {' | '.join(titles)} |", "|:---|" + "---:|" * (len(titles) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def slice_rows(slices: Sequence[SliceReport], *, shown: Sequence[str] = SHOWN_METRICS) -> list[list[str]]:
    """Return the cells of a table of slices: the titles of the columns, then one row for each slice.

    Slices have only recall and NDCG. If `evaluation.metrics` has neither, there is a column "metrics" without values.
    """
    columns = _shown_columns(shown, {column for report in slices for column in report.metrics})
    rows = [["slice", "users", "targets", *(columns or ["metrics"])]]
    for report in slices:
        cells = [_cell(report.metrics.get(column), report.half_widths.get(column)) for column in columns]
        cells = cells or ["-"]  # the column "metrics"
        if report.num_users < report.min_users:
            cells[0] = f"not enough data ({report.min_users:,} users needed)"
        rows.append([printable(report.name), f"{report.num_users:,}", f"{report.num_targets:,}", *cells])
    return rows


def _shown_columns(shown_metrics: Sequence[str], measured_metrics: Collection[str]) -> tuple[str, ...]:
    """Return the names of the measured metrics; a cut-off that was not measured is replaced by the closest measured one.

    >>> _shown_columns(("recall@20", "ndcg@10", "mrr", "auc"), ("recall@5", "recall@50", "ndcg@10", "mrr"))
    ('recall@5', 'ndcg@10', 'mrr')
    """
    columns: list[str] = []
    for name in shown_metrics:
        metric, _, cut_off = name.partition("@")
        measured_cut_offs = [int(column.partition("@")[2]) for column in measured_metrics if column.startswith(f"{metric}@")]
        if name in measured_metrics:
            columns.append(name)
        elif cut_off and measured_cut_offs:
            columns.append(f"{metric}@{min(measured_cut_offs, key=lambda k: (abs(k - int(cut_off)), k))}")
    return tuple(dict.fromkeys(columns))


def _cell(value: float | None, half_width: float | None) -> str:
    """Return a value and its half width with four decimals, such as 0.5000 ± 0.1000. Return - for a missing value."""
    if value is None:
        return "-"
    return f"{value:.4f}" if half_width is None else f"{value:.4f} ± {half_width:.4f}"


def plot_recall(metrics: Mapping[str, float], *, path: Path) -> Path:
    """Write a PNG with the recall of the model and its baselines at each cut-off K. Return `path`."""
    metrics_by_ranker = _metrics_by_ranker(metrics)
    cut_offs = sorted(int(name.removeprefix("recall@")) for name in metrics_by_ranker["model"] if name.startswith("recall@"))
    figure_width = 6.4 if len(metrics_by_ranker) <= MAX_HORIZONTAL_LABELS else 8.0
    figure, axes = plots.new_figure(title="Recall on the test split, full catalogue", grid_axis="y", size=(figure_width, 3.8))
    bar_width = 0.8 / len(metrics_by_ranker)
    for ranker_index, (ranker, ranker_metrics) in enumerate(metrics_by_ranker.items()):
        bar_offset = (ranker_index - (len(metrics_by_ranker) - 1) / 2) * bar_width
        bar_positions = [index + bar_offset for index in range(len(cut_offs))]
        recalls = [ranker_metrics[f"recall@{k}"] for k in cut_offs]
        bars = axes.bar(bar_positions, recalls, bar_width * 0.94, label=ranker.replace("_", "-"), color=RANKER_COLOURS[ranker])
        label_rotation = 0 if len(metrics_by_ranker) <= MAX_HORIZONTAL_LABELS else 90
        axes.bar_label(bars, fmt="%.3f", fontsize=7, padding=2, color=plots.INK, rotation=label_rotation)
    axes.set_xticks(range(len(cut_offs)), [str(k) for k in cut_offs])
    axes.set_xlabel("cut-off K")
    axes.set_ylabel("recall@K (share of the test items among the first K)")
    axes.margins(y=0.14)  # leaves room for the values above the bars
    plots.legend_above(axes, num_columns=len(RANKER_COLOURS))
    return plots.save_png(figure, path)


def plot_loss(train: TrainManifest, *, path: Path) -> Path:
    """Write a PNG of `draw_loss`. Return `path`."""
    return plots.save_png(draw_loss(train), path)


def draw_loss(train: TrainManifest) -> "Figure":
    """Draw the training loss and, below it, the validation metrics after each epoch.

    The loss drops at the start of each epoch, because the model sees the same events again. Dotted lines mark the ends of the
    epochs. The mean loss of each epoch shows the trend.
    """
    lines = train.path("metrics.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]
    validation_records = [record for record in records if record["validation"]]
    title = "Training loss and validation metrics" if validation_records else "Training loss"
    if train.temperature_trials:
        title += f"\ntemperature {train.temperature:g}, the best of {', '.join(train.temperature_trials)} after one epoch"
    figure, panels = plots.new_panels(
        2 if validation_records else 1,
        title=title,
        grid_axis="y",
        size=(6.4, 5.8 if validation_records else 3.8),
    )
    loss_axes = panels[0]
    steps, losses = zip(*((record["step"], record["loss"]) for record in records), strict=True)
    loss_axes.plot(steps, losses, color=plots.BLUE, linewidth=1.0, alpha=0.55, label="loss")
    first_step = 0
    for epoch, epoch_records in groupby(records, key=itemgetter("epoch")):
        epoch_steps, epoch_losses = zip(*((record["step"], record["loss"]) for record in epoch_records), strict=True)
        last_step, label = epoch_steps[-1], "_nolegend_" if first_step else "mean of the epoch"
        loss_axes.hlines(fmean(epoch_losses), first_step, last_step, color=plots.BLUE, linewidth=2, label=label)
        for axes in panels:
            axes.axvline(last_step, color=plots.GREY, linewidth=1.0, linestyle=":", zorder=0.5)
        if records[-1]["epoch"] <= MAX_LABELLED_EPOCHS:
            text_style: dict[str, Any] = {
                "ha": "center",
                "fontsize": 7.5,
                "color": plots.INK,
                "transform": panels[-1].get_xaxis_transform(),
            }
            panels[-1].text((first_step + last_step) / 2, 0.02, str(epoch) if first_step else f"epoch {epoch}", **text_style)
        first_step = last_step
    loss_axes.set_ylabel("training loss")
    plots.legend_above(loss_axes)
    if validation_records:
        _plot_validation(panels[1], validation_records, best_epoch=train.best_epoch)
    panels[-1].set_xlabel(
        "training step\nAfter an epoch (dotted lines) the loss falls, because the model sees the same events again"
    )
    return figure


def _plot_validation(axes: "Axes", validation_records: Sequence[Mapping[str, Any]], *, best_epoch: int | None) -> None:
    colours = (plots.GREEN, plots.ORANGE, plots.GREY)
    for metric_name, colour in zip(validation_records[0]["validation"], colours, strict=False):
        points = [(record["step"], record["validation"][metric_name]) for record in validation_records]
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, linewidth=1.6, label=metric_name)
    for record in validation_records:
        if record["epoch"] == best_epoch:
            axes.axvline(record["step"], color=plots.BLUE, linewidth=1.4, zorder=0.6, label=f"best epoch: {best_epoch}")
    axes.set_ylabel("metric on the validation split")
    axes.set_ylim(bottom=0)
    plots.legend_above(axes)


def _metrics_by_row(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the test metrics by table row: first the model and each baseline for all items, then the same for cold items."""
    metrics_by_ranker = _metrics_by_ranker(metrics)
    cold_metrics_by_row = {
        f"{ranker}{COLD_SUFFIX}": _metrics_under("cold/", values) for ranker, values in metrics_by_ranker.items()
    }
    return metrics_by_ranker | {row_name: values for row_name, values in cold_metrics_by_row.items() if values}


def _metrics_by_ranker(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the test metrics of the model and of each baseline, without their prefixes."""
    measured_baselines = {metric_name.split("/")[1] for metric_name in metrics if metric_name.startswith("baseline/")}
    baselines = [name for name in RANKER_COLOURS if name in measured_baselines]
    return {"model": _metrics_under("test/", metrics)} | {
        baseline: _metrics_under(f"baseline/{baseline}/", metrics) for baseline in baselines
    }


def _metrics_under(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics whose names start with `prefix`, by their names without the prefix."""
    return {metric_name.removeprefix(prefix): value for metric_name, value in metrics.items() if metric_name.startswith(prefix)}
