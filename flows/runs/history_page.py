"""<workspace>/index.html: the last runs of a workspace on one page, with plots, and links to the reports of each run."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from flows.runs.run_history import (
    STATE_NAMES,
    PastRun,
    format_count,
    newest_promoted_version,
    run_history,
)
from flows.settings.pipeline import PipelineConfig
from recsys_core import plots
from recsys_core.disk import free_bytes, used_bytes, write_text
from recsys_core.manifests import STAGES
from recsys_core.manifests.stage_folder import StageGroup
from recsys_core.plots import render_page
from recsys_core.units import format_bytes, format_duration, format_metric
from tasks.runs.run_record import RunState

PAGE_FILE_NAME = "index.html"
MAX_RUNS = 100
"""Largest number of runs on the page."""
_TEMPLATE_PATH = Path(__file__).with_name("history.html")
_WIDE_SIZE_INCHES, _NARROW_SIZE_INCHES = (11.4, 3.1), (4.5, 3.2)
_MAX_DATE_LABELS = 8

Tone = Literal["good", "warn", "bad", "none"]
_TONE_BY_STATE: dict[RunState, Tone] = {
    "Promoted": "good",
    "NotPromoted": "warn",
    "NotEnoughData": "warn",
    "BrokenChampion": "bad",
    "DataRejected": "bad",
    "Failed": "bad",
    "Interrupted": "bad",
}
"""Tone, and with it the colour, of a state on the page. The other states have the tone `none`."""
_COLOUR_BY_GROUP: dict[StageGroup, str] = {
    "data": plots.GREEN,
    "training": plots.BLUE,
    "evaluation": plots.ORANGE,
    "release": plots.GREY,
}
"""Colour of each group of stages in the plot of the durations."""


def write_history_page(
    config: PipelineConfig, *, find_champion: Callable[[Sequence[PastRun]], str | None] = newest_promoted_version
) -> Path:
    """Replace <workspace>/index.html and return its path.

    Args:
        find_champion: gets the runs on the page, and returns the version of the current champion.
    """
    past_runs = run_history(config.workspace, max_runs=MAX_RUNS)
    page_path = config.workspace.absolute() / PAGE_FILE_NAME
    write_text(page_path, to_html(past_runs, config=config, champion_version=find_champion(past_runs)))
    return page_path


def to_html(past_runs: Sequence[PastRun], *, config: PipelineConfig, champion_version: str | None) -> str:
    """Render the page.

    Args:
        past_runs: the runs on the page, the newest run first.
        champion_version: version that is champion now; None if there is no champion.
    """
    metric_name = config.registry.metric
    runs_oldest_first = list(reversed(past_runs))
    metric_title = f"{metric_name} as served"
    plot_by_title = {
        metric_title: plot_metric(runs_oldest_first, metric_name=metric_name),
        "Size of the data": plot_data_sizes(runs_oldest_first),
        "Duration of the stages": plot_durations(runs_oldest_first),
        "Disk space of each run": plot_disk(runs_oldest_first),
    }
    return render_page(
        _TEMPLATE_PATH,
        filters={
            "bytes": format_bytes,
            "duration": format_duration,
            "exact_count": lambda count: "-" if count is None else f"{count:,}",
            "short_count": format_count,
            "metric_value": format_metric,
            "time": lambda time: f"{time.astimezone(UTC):%Y-%m-%d %H:%M}",
            "short_time": lambda time: f"{time.astimezone(UTC):%b %d, %H:%M}",
            "state_name": STATE_NAMES.__getitem__,
            "tone": lambda state: _TONE_BY_STATE.get(state, "none"),
        },
        pipeline_name=config.name,
        model_name=config.registry.model_name,
        workspace=config.workspace.absolute(),
        written_at=datetime.now(UTC),
        past_runs=past_runs,
        champion_version=champion_version,
        champion_run=next((past_run for past_run in past_runs if past_run.record.figures.version == champion_version), None),
        metric_name=metric_name,
        metric_title=metric_title,
        plot_by_title={title: plot for title, plot in plot_by_title.items() if plot is not None},
        format_change=lambda past_run: format_change(past_run, metric_name=metric_name),
        workspace_bytes=used_bytes(config.workspace),
        free_bytes=free_bytes(config.workspace),
    )


def format_change(past_run: PastRun, *, metric_name: str) -> str:
    """Return the change of a metric from the champion to the new version in percent; empty if there is no comparison."""
    new_value, champion_value = past_run.new_version_metric(metric_name), past_run.champion_metric(metric_name)
    return "" if new_value is None or not champion_value else f"{100 * (new_value / champion_value - 1):+z.1f} %"


def plot_metric(past_runs: Sequence[PastRun], *, metric_name: str) -> Markup | None:
    """Plot the metric of the new version and the champion over the runs; a cross marks a run without a version."""
    new_points = _points(past_run.new_version_metric(metric_name) for past_run in past_runs)
    champion_points = _points(past_run.champion_metric(metric_name) for past_run in past_runs)
    if not new_points:
        return None
    figure, axes = plots.new_figure(size=_WIDE_SIZE_INCHES, grid_axis="y")
    axes.plot(*zip(*new_points, strict=True), color=plots.BLUE, linewidth=1.6, label="new version", zorder=3)
    if champion_points:
        line_style: dict[str, Any] = {"color": plots.GREY, "linewidth": 1.6, "linestyle": "--"}
        axes.plot(*zip(*champion_points, strict=True), label="champion before the run", **line_style)
    for label, colour, is_promoted in (("promoted", plots.GREEN, True), ("not promoted", plots.ORANGE, False)):
        points = [point for point in new_points if (past_runs[point[0]].record.state == "Promoted") == is_promoted]
        if points:
            positions, values = zip(*points, strict=True)
            axes.scatter(positions, values, 30, colour, label=label, zorder=4)
    positions_without_version = sorted(set(range(len(past_runs))) - {position for position, _ in new_points})
    if positions_without_version:
        cross_heights = [0.03] * len(positions_without_version)
        transform = axes.get_xaxis_transform()  # x in data coordinates, y as a share of the height
        axes.scatter(
            positions_without_version, cross_heights, 28, plots.RED, marker="x", transform=transform, label="no version"
        )
    _label_runs(axes, past_runs)
    axes.margins(y=0.15)
    axes.set_ylabel(metric_name)
    plots.legend_above(axes, num_columns=5)
    return plots.to_svg(figure)


def _points(values: Iterable[float | None]) -> list[tuple[int, float]]:
    """Return (position, value) of each value that is not None."""
    return [(position, value) for position, value in enumerate(values) if value is not None]


def plot_data_sizes(past_runs: Sequence[PastRun]) -> Markup | None:
    """Plot events, users and items over the runs, each on its own scale."""
    colour_by_count_name = {"events": plots.BLUE, "users": plots.GREEN, "items": plots.ORANGE}
    if all(past_run.record.figures.events is None for past_run in past_runs):
        return None
    figure, panels = plots.new_panels(len(colour_by_count_name), title="", grid_axis="y", size=_NARROW_SIZE_INCHES)
    for axes, (count_name, colour) in zip(panels, colour_by_count_name.items(), strict=True):
        points = _points(getattr(past_run.record.figures, count_name) for past_run in past_runs)
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, marker="o", markersize=2.5)
        axes.set_ylabel(count_name)
        axes.yaxis.set_major_formatter(lambda value, _: format_count(round(value)))
        axes.locator_params(axis="y", nbins=4, integer=True)
    _label_runs(panels[-1], past_runs)
    return plots.to_svg(figure)


def plot_durations(past_runs: Sequence[PastRun]) -> Markup | None:
    """Plot the durations of the stages as stacked bars, in four groups of stages."""
    longest_run_s = max((sum(past_run.record.figures.stage_seconds.values()) for past_run in past_runs), default=0.0)
    if not longest_run_s:
        return None
    unit, unit_s = ("hours", 3600) if longest_run_s >= 7200 else ("minutes", 60) if longest_run_s >= 120 else ("seconds", 1)
    figure, axes = plots.new_figure(size=_NARROW_SIZE_INCHES, grid_axis="y")
    bar_bottoms = [0.0] * len(past_runs)
    for group, colour in _COLOUR_BY_GROUP.items():
        stages = [stage for stage, manifest_type in STAGES.items() if manifest_type.group == group]
        bar_heights = [
            sum(past_run.record.figures.stage_seconds.get(stage, 0.0) for stage in stages) / unit_s for past_run in past_runs
        ]
        axes.bar(range(len(past_runs)), bar_heights, 0.8, bottom=bar_bottoms, color=colour, label=group)
        bar_bottoms = [bottom + height for bottom, height in zip(bar_bottoms, bar_heights, strict=True)]
    _label_runs(axes, past_runs)
    axes.set_ylabel(unit)
    plots.legend_above(axes)
    return plots.to_svg(figure)


def plot_disk(past_runs: Sequence[PastRun]) -> Markup | None:
    """Plot the current size of each run's folder. Retention makes the folders of old runs smaller."""
    if not past_runs:
        return None
    largest_bytes = max(past_run.disk_bytes for past_run in past_runs)
    unit, unit_bytes = next(
        ((unit, size) for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)) if largest_bytes >= size),
        ("KiB", 2**10),
    )
    figure, axes = plots.new_figure(size=_NARROW_SIZE_INCHES, grid_axis="y")
    axes.bar(range(len(past_runs)), [past_run.disk_bytes / unit_bytes for past_run in past_runs], 0.8, color=plots.BLUE)
    _label_runs(axes, past_runs)
    axes.set_ylabel(unit)
    return plots.to_svg(figure)


def _label_runs(axes: Any, past_runs: Sequence[PastRun]) -> None:
    """Label at most _MAX_DATE_LABELS positions of the x axis with dates of runs. The newest run always has a label."""
    runs_per_label = -(-len(past_runs) // _MAX_DATE_LABELS)
    positions = list(range(len(past_runs) - 1, -1, -runs_per_label))
    axes.set_xticks(positions, [f"{past_runs[position].record.started.astimezone(UTC):%b %d}" for position in positions])
    axes.set_xlim(-0.6, max(len(past_runs), 8) - 0.4)
