"""The content of report.json, its HTML page, and its summary in Markdown."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup

from recsys_core import plots
from recsys_core.config import Frozen
from recsys_core.data_report.drift import Mover
from recsys_core.data_report.limits import METRICS, LimitCheck, format_metric
from recsys_core.errors import MAX_SHOWN_CHARACTERS, counted, printable
from recsys_core.manifests import ColumnStatistics, DataReportManifest
from recsys_core.plots import render_page

_TEMPLATE = Path(__file__).with_name("report.html")
_MAX_BARS = 120
_PLOT_SIZE = (5.6, 3.0)


class Day(Frozen):
    """Number of events of one UTC day in each part of the split."""

    day: str
    train: int
    validation: int
    test: int


class DataReport(Frozen):
    """The content of report.json. Fields named `previous_...` are empty for the first run."""

    compared_with: str | None
    """Name of the previous run."""
    num_vocabulary_runs: int
    """Number of runs with the current vocabulary: the run that built it, and the runs that continued it."""
    rebuild_reason: str | None
    """Why the vocabulary was rebuilt; None if it was continued."""
    first_time: str | None
    """Time of the first event; None if there are no timestamps."""
    last_time: str | None
    """Time of the last event; None if there are no timestamps."""
    split: str
    """Kind of the split: time, leave_last_out or files."""
    num_files: int
    num_rows: int
    num_files_read: int
    """Number of new or changed files. Earlier runs read the other files."""
    num_rows_read: int
    metrics: dict[str, float]
    """Metrics that could be measured."""
    previous_metrics: dict[str, float]
    checks: tuple[LimitCheck, ...]
    breaches: tuple[str, ...]
    warnings: tuple[str, ...]
    columns: dict[str, ColumnStatistics]
    removed_events: dict[str, int]
    """Number of events that a filter removed, by filter. `bot_users` is a number of users: the users of `bot_events`."""
    bad_rows: dict[str, int]
    """Number of events that were removed because of a bad value, by reason."""
    days: tuple[Day, ...]
    history_lengths: tuple[tuple[str, int], ...]
    """(range of the number of training events, number of users in this range)."""
    popularity: tuple[tuple[int, float], ...]
    """(popularity rank from 1, share of the training events), for some ranks."""
    previous_popularity: tuple[tuple[int, float], ...]
    movers: tuple[Mover, ...]


def to_html(report: DataReport, *, run_name: str) -> str:
    """Return the HTML page of the report of the run named `run_name`."""
    plot_by_title = {
        "Events per day": plot_days(report.days),
        "Popularity of items": plot_popularity(report),
        "Length of histories": plot_histories(report.history_lengths),
    }
    return render_page(
        _TEMPLATE,
        filters={
            "metric": format_metric,
            "change": format_change,
            "escaped": lambda text: printable(text, max_characters=MAX_SHOWN_CHARACTERS),
        },
        report=report,
        run_name=run_name,
        plots={title: plot for title, plot in plot_by_title.items() if plot is not None},
        metrics=METRICS,
    )


def to_markdown(manifest: DataReportManifest, *, page_path: Path) -> str:
    """Return the verdict, the warnings, the metrics and the path of the page in GitHub's Markdown."""
    if manifest.breaches:
        lines = [f"**{counted(len(manifest.breaches), 'limit')} violated**", *(f"- {breach}" for breach in manifest.breaches)]
    else:
        lines = ["**OK: no limit is violated**"]
    if manifest.warnings:
        lines += ["", "Warnings", *(f"- {warning}" for warning in manifest.warnings)]
    lines += ["", "| | |", "|:---|---:|"]
    lines += [
        f"| {description} | {format_metric(manifest.metrics[metric_name], unit)} |"
        for metric_name, (description, unit) in METRICS.items()
        if metric_name in manifest.metrics
    ]
    comparison_text = f"Compared with {manifest.compared_with}" if manifest.compared_with else "No previous run to compare with"
    return "\n".join([*lines, "", f"{comparison_text}. Full report: `{page_path}`"])


def format_change(current_count: float | None, previous_count: float | None) -> str:
    """Return the relative change of a count in percent. Empty if a count is missing, or if `previous_count` is 0.

    >>> format_change(110, 100), format_change(95, 100), format_change(5, None), format_change(5, 0)
    ('+10 %', '-5 %', '', '')
    """
    return "" if current_count is None or not previous_count else f"{100 * (current_count / previous_count - 1):+.3g} %"


def plot_days(days: Sequence[Day]) -> Markup | None:
    """Plot the number of events over time, by part of the split; return None if there are no timestamps.

    If the log covers more than 120 days, each bar covers several days.
    """
    if not days:
        return None
    first_day = np.datetime64(days[0].day)
    day_indices = [int((np.datetime64(day.day) - first_day).astype(int)) for day in days]
    days_per_bar = -(-(day_indices[-1] + 1) // _MAX_BARS)
    num_bars = day_indices[-1] // days_per_bar + 1
    num_events_by_part = np.zeros((3, num_bars))
    for day_index, day in zip(day_indices, days, strict=True):
        num_events_by_part[:, day_index // days_per_bar] += (day.train, day.validation, day.test)

    figure, axes = plots.new_figure(size=_PLOT_SIZE, grid_axis="y")
    bar_bottoms = np.zeros(num_bars)
    for bar_heights, part_name, colour in zip(
        num_events_by_part, ("training", "validation", "test"), (plots.BLUE, plots.GREEN, plots.ORANGE), strict=True
    ):
        axes.bar(range(num_bars), bar_heights, 0.86, bottom=bar_bottoms, color=colour, label=part_name)
        bar_bottoms += bar_heights
    labelled_bars = range(0, num_bars, max(1, num_bars // 6))
    axes.set_xticks(labelled_bars, [str(first_day + days_per_bar * bar_index) for bar_index in labelled_bars])
    axes.set_xlabel("day (UTC)" if days_per_bar == 1 else f"first of {days_per_bar} days (UTC)")
    axes.set_ylabel("events per day" if days_per_bar == 1 else f"events per {days_per_bar} days")
    plots.legend_above(axes)
    return plots.to_svg(figure)


def plot_popularity(report: DataReport) -> Markup:
    """Plot the share of the training events by popularity rank, for this run and the previous run."""
    figure, axes = plots.new_figure(size=_PLOT_SIZE)
    if report.previous_popularity:
        axes.plot(
            *zip(*report.previous_popularity, strict=True),
            color=plots.ORANGE,
            linewidth=2,
            linestyle="--",
            label="previous run",
        )
    if report.popularity:
        axes.plot(*zip(*report.popularity, strict=True), color=plots.BLUE, linewidth=2, label="this run")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("popularity rank of the item (1 = most popular)")
    axes.set_ylabel("share of training events")
    plots.legend_above(axes)
    return plots.to_svg(figure)


def plot_histories(history_lengths: Sequence[tuple[str, int]]) -> Markup:
    """Plot the number of users in each range of the number of training events."""
    figure, axes = plots.new_figure(size=_PLOT_SIZE, grid_axis="y")
    axes.bar(
        [range_name for range_name, _ in history_lengths],
        [num_users for _, num_users in history_lengths],
        0.8,
        color=plots.BLUE,
    )
    axes.set_xlabel("training events of the user")
    axes.set_ylabel("users")
    axes.tick_params(axis="x", labelrotation=35 if len(history_lengths) > 7 else 0)
    return plots.to_svg(figure)
