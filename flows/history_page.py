"""<workspace>/index.html: the last runs of a workspace on one page, with their trend and links to their reports."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from flows.config import PipelineConfig
from flows.history import STATE_NAMES, PastRun, format_count, newest_promoted_version, run_history
from recsys_core import plots
from recsys_core.atomic import write_text
from recsys_core.disk import free_bytes, used_bytes
from recsys_core.html_page import render_page
from recsys_core.units import format_bytes, format_duration
from tasks.run import Run, StageName
from tasks.run_record import RunState

PAGE_NAME = "index.html"
MAX_RUNS = 100
"""Number of runs on the page."""
_TEMPLATE = Path(__file__).with_name("history.html")
_WIDE_SIZE, _NARROW_SIZE = (11.4, 3.1), (4.5, 3.2)
_MAX_DATES = 8

Tone = Literal["good", "warn", "bad", "none"]
_TONES: dict[RunState, Tone] = {
    "Promoted": "good",
    "NotPromoted": "warn",
    "BrokenChampion": "bad",
    "DataRejected": "bad",
    "Failed": "bad",
    "Interrupted": "bad",
}
"""Colour of a state; other states have none."""
_STAGE_GROUPS: dict[str, tuple[tuple[StageName, ...], str]] = {
    "data": (("ingest_embeddings", "ingest_interactions", "ingest_features", "check_data"), plots.GREEN),
    "training": (("plan_sharding", "train"), plots.BLUE),
    "evaluation": (("export", "evaluate"), plots.ORANGE),
    "release": (("build_index", "package", "register"), plots.GREY),
}


def write_history_page(config: PipelineConfig, run: Run, *, has_mlflow: bool) -> None:
    """Replace <workspace>/index.html after `run`, and log the page to MLflow if the run has an MLflow run.

    Without MLflow, the page shows the version of the newest promotion in the workspace as champion.

    Args:
        has_mlflow: whether MLflow answers.
    """
    runs = run_history(run.workspace, last=MAX_RUNS)
    page = run.workspace / PAGE_NAME
    figures = next(past_run.record.figures for past_run in runs if past_run.run.run_id == run.run_id)
    if not has_mlflow or "check_data" not in figures.stage_seconds:  # check_data creates the MLflow run
        write_text(page, to_html(runs, config=config, champion_version=newest_promoted_version(runs)))
        return

    from tasks.registry.mlflow_client import call_or_warn
    from tasks.registry.releases import champion_of
    from tasks.registry.tracking import open_run

    call_mlflow = partial(call_or_warn, workspace=run.workspace)
    # None if MLflow does not answer; [None] if the model has no champion.
    champions = call_mlflow(
        lambda client: [champion_of(client, config.registry.model_name)],
        warning="could not read the champion for the page of the last runs; the page is not in MLflow",
    )
    if champions is None:
        write_text(page, to_html(runs, config=config, champion_version=newest_promoted_version(runs)))
        return
    champion = None if champions[0] is None else str(champions[0].version)
    write_text(page, to_html(runs, config=config, champion_version=champion))
    call_mlflow(
        lambda client: client.log_artifact(figures.mlflow_run_id or open_run(client, run), str(page), "history"),
        warning="could not log the page of the last runs to MLflow",
    )


def to_html(runs: Sequence[PastRun], *, config: PipelineConfig, champion_version: str | None) -> str:
    """Render the page.

    Args:
        runs: the newest first.
        champion_version: version that is champion now; None if there is no champion.
    """
    metric = config.registry.metric
    oldest_first = list(reversed(runs))
    metric_title = f"{metric} as served"
    plots_by_title = {
        metric_title: plot_metric(oldest_first, metric=metric),
        "Size of the data": plot_sizes(oldest_first),
        "Duration of the stages": plot_durations(oldest_first),
        "Disk space of each run": plot_disk(oldest_first),
    }
    return render_page(
        _TEMPLATE,
        filters={
            "bytes": format_bytes,
            "duration": format_duration,
            "count": lambda value: "-" if value is None else f"{value:,}",
            "short": format_count,
            "score": lambda value: "-" if value is None else f"{value:.4f}",
            "time": lambda time: f"{time.astimezone(UTC):%Y-%m-%d %H:%M}",
            "day": lambda time: f"{time.astimezone(UTC):%b %d, %H:%M}",
            "state": STATE_NAMES.__getitem__,
            "tone": lambda state: _TONES.get(state, "none"),
        },
        name=config.name,
        model_name=config.registry.model_name,
        workspace=config.workspace.absolute(),
        written=datetime.now(UTC),
        runs=runs,
        champion_version=champion_version,
        promotion=next((past_run for past_run in runs if past_run.record.figures.version == champion_version), None),
        metric=metric,
        metric_title=metric_title,
        plots={title: plot for title, plot in plots_by_title.items() if plot is not None},
        change=lambda past_run: format_change(past_run, metric=metric),
        workspace_bytes=used_bytes(config.workspace),
        free_bytes=free_bytes(config.workspace),
    )


def format_change(past_run: PastRun, *, metric: str) -> str:
    """Return the relative difference between the new version and the champion in percent; empty without a comparison."""
    new, champion = past_run.new_version_metric(metric), past_run.champion_metric(metric)
    return "" if new is None or not champion else f"{100 * (new / champion - 1):+.1f} %"


def plot_metric(runs: Sequence[PastRun], *, metric: str) -> Markup | None:
    """Plot the served metric of new version and champion over the runs; a cross marks a run without a version."""
    new_values = [(position, past_run.new_version_metric(metric)) for position, past_run in enumerate(runs)]
    new_points = [(position, value) for position, value in new_values if value is not None]
    if not new_points:
        return None
    figure, axes = plots.new_figure(size=_WIDE_SIZE, grid_axis="y")
    champion_values = [(position, past_run.champion_metric(metric)) for position, past_run in enumerate(runs)]
    champion_points = [(position, value) for position, value in champion_values if value is not None]
    axes.plot(*zip(*new_points, strict=True), color=plots.BLUE, linewidth=1.6, label="new version", zorder=3)
    if champion_points:
        axes.plot(
            *zip(*champion_points, strict=True),
            color=plots.GREY,
            linewidth=1.6,
            linestyle="--",
            label="champion before the run",
        )
    for label, colour, is_shown in (
        ("promoted", plots.GREEN, lambda state: state == "Promoted"),
        ("not promoted", plots.ORANGE, lambda state: state != "Promoted"),
    ):
        points = [(position, value) for position, value in new_points if is_shown(runs[position].record.state)]
        if points:
            positions, heights = zip(*points, strict=True)
            axes.scatter(positions, heights, 30, colour, label=label, zorder=4)
    missing_positions = [position for position, value in new_values if value is None]
    if missing_positions:
        transform = axes.get_xaxis_transform()  # x in data coordinates, y as a share of the height
        axes.scatter(
            missing_positions,
            [0.03] * len(missing_positions),
            28,
            plots.RED,
            marker="x",
            transform=transform,
            label="no version",
        )
    _label_runs(axes, runs)
    axes.margins(y=0.15)
    axes.set_ylabel(metric)
    plots.legend_above(axes, num_columns=5)
    return plots.to_svg(figure)


def plot_sizes(runs: Sequence[PastRun]) -> Markup | None:
    """Plot events, users and items over the runs, each on its own scale."""
    sizes: tuple[tuple[str, Callable[[PastRun], int | None], str], ...] = (
        ("events", lambda past_run: past_run.record.figures.events, plots.BLUE),
        ("users", lambda past_run: past_run.record.figures.users, plots.GREEN),
        ("items", lambda past_run: past_run.record.figures.items, plots.ORANGE),
    )
    if all(past_run.record.figures.events is None for past_run in runs):
        return None
    figure, panels = plots.new_panels(len(sizes), title="", grid_axis="y", size=_NARROW_SIZE)
    for axes, (name, size_of, colour) in zip(panels, sizes, strict=True):
        points = [(position, size) for position, past_run in enumerate(runs) if (size := size_of(past_run)) is not None]
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, marker="o", markersize=2.5)
        axes.set_ylabel(name)
        axes.yaxis.set_major_formatter(lambda value, _: format_count(round(value)))
        axes.locator_params(axis="y", nbins=4, integer=True)
    _label_runs(panels[-1], runs)
    return plots.to_svg(figure)


def plot_durations(runs: Sequence[PastRun]) -> Markup | None:
    """Plot the durations of the stages as stacked bars, in four groups of stages."""
    longest_s = max((sum(past_run.record.figures.stage_seconds.values()) for past_run in runs), default=0.0)
    if not longest_s:
        return None
    unit, unit_s = ("hours", 3600) if longest_s >= 7200 else ("minutes", 60) if longest_s >= 120 else ("seconds", 1)
    figure, axes = plots.new_figure(size=_NARROW_SIZE, grid_axis="y")
    bottom = [0.0] * len(runs)
    for label, (stages, colour) in _STAGE_GROUPS.items():
        seconds = [past_run.record.figures.stage_seconds for past_run in runs]
        heights = [sum(stage_seconds.get(stage, 0.0) for stage in stages) / unit_s for stage_seconds in seconds]
        axes.bar(range(len(runs)), heights, 0.8, bottom=bottom, color=colour, label=label)
        bottom = [start + height for start, height in zip(bottom, heights, strict=True)]
    _label_runs(axes, runs)
    axes.set_ylabel(unit)
    plots.legend_above(axes)
    return plots.to_svg(figure)


def plot_disk(runs: Sequence[PastRun]) -> Markup | None:
    """Plot the size of each run's folder as it is now; retention makes the folders of old runs smaller."""
    if not runs:
        return None
    largest = max(past_run.disk_bytes for past_run in runs)
    unit, factor = next(
        ((unit, factor) for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)) if largest >= factor),
        ("KiB", 2**10),
    )
    figure, axes = plots.new_figure(size=_NARROW_SIZE, grid_axis="y")
    axes.bar(range(len(runs)), [past_run.disk_bytes / factor for past_run in runs], 0.8, color=plots.BLUE)
    _label_runs(axes, runs)
    axes.set_ylabel(unit)
    return plots.to_svg(figure)


def _label_runs(axes: Any, runs: Sequence[PastRun]) -> None:
    """Label the x axis, one position per run, with the dates of at most _MAX_DATES runs, the newest among them."""
    step = -(-len(runs) // _MAX_DATES)
    positions = list(range(len(runs) - 1, -1, -step))
    axes.set_xticks(positions, [f"{runs[position].record.started.astimezone(UTC):%b %d}" for position in positions])
    axes.set_xlim(-0.6, max(len(runs), 8) - 0.4)
