"""The backtest: the pipeline as it would have run on each of the last days, with a registry of its own."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from prefect import flow

from flows.nightly import nightly_retrain
from flows.prefect_runs import tag_flow_run
from flows.settings.pipeline import PipelineConfig
from recsys_core import plots
from recsys_core.config import Frozen
from recsys_core.errors import InputError
from recsys_core.manifests import EvaluationManifest, read_unchecked_manifest
from tasks.progress.reporting import LOG
from tasks.runs.context import StageContext
from tasks.runs.run import Run
from tasks.runs.run_record import RunRecord
from tasks.runs.workspace import Workspace
from tasks.stages.data_stages import ingest

FOLDER_NAME = "backtest"
"""Name of the folder of the backtest in the workspace. It is a workspace with its own runs and MLflow database."""
METRIC_FILE, PLOT_FILE = "backtest.json", "backtest.png"


class Day(Frozen):
    """One run of the backtest.

    Attributes:
        until: end of the log that the run reads.
        state: end state of the run, such as Promoted.
        metrics: metrics of the evaluation, and of the served recommendations of the new version and the champion.
    """

    until: datetime
    run_id: str
    state: str
    message: str
    version: str | None
    metrics: dict[str, float]


@flow(name="backtest", flow_run_name="{config.name} backtest of {num_days} days")
def backtest(config: PipelineConfig, num_days: int) -> list[Day]:
    """Run the pipeline once for each of the last days of the log, with the events up to the end of that day.

    Each run continues from the versions of the runs before it, as in production. Complete stages of an interrupted backtest
    are kept. The vectors and features are those of today.

    Raises:
        InputError: the log has no event times.
    """
    if config.interactions.timestamp_column is None:
        raise InputError("a backtest needs event times; set interactions.timestamp_column")
    tag_flow_run(config.name)
    folder = config.workspace.absolute() / FOLDER_NAME
    with Run("data", workspace=config.workspace.absolute(), parent=FOLDER_NAME).lock():
        interactions = ingest(StageContext(Run("data", workspace=folder)), config.inputs).interactions
        assert interactions.last_time is not None
        last_time = datetime.fromisoformat(interactions.last_time) + timedelta(seconds=1)
        days = []
        for age in reversed(range(num_days)):
            days.append(_run_day(config, last_time - timedelta(days=age), folder=folder))
            (folder / METRIC_FILE).write_text(json.dumps([day.model_dump(mode="json") for day in days], indent=2) + "\n")
            plot_days(days, metric=config.registry.metric, path=folder / PLOT_FILE)
    return days


def _run_day(config: PipelineConfig, until: datetime, *, folder: Path) -> Day:
    registry = config.registry.model_copy(
        update={"model_name": f"{config.registry.model_name}-backtest", "experiment": f"{config.registry.experiment}-backtest"}
    )
    filters = config.interactions.filter.model_copy(update={"until": until.astimezone(UTC).replace(tzinfo=None)})
    interactions = config.interactions.model_copy(update={"filter": filters})
    day_config = config.model_copy(update={"workspace": folder, "registry": registry, "interactions": interactions})
    run = Workspace(folder).run(f"{until:%Y%m%d-%H%M%S}-until")
    LOG.info("log until %s", f"{until:%Y-%m-%d %H:%M:%S}")
    nightly_retrain(day_config, run_id=run.run_id, return_state=True)
    record = RunRecord.read(run)
    assert record is not None  # nightly_retrain writes it
    evaluation = read_unchecked_manifest(run.stage_folder(EvaluationManifest), EvaluationManifest)
    metrics = ({} if evaluation is None else evaluation.metrics) | record.figures.metrics
    return Day(
        until=until,
        run_id=run.run_id,
        state=record.state,
        message=record.message,
        version=record.figures.version,
        metrics=metrics,
    )


def plot_days(days: list[Day], *, metric: str, path: Path) -> None:
    """Write a PNG of a metric over the days: the model, the baselines, and the served versions."""
    series = {
        "model": (f"test/{metric}", plots.BLUE, "-"),
        "popularity": (f"baseline/popularity/{metric}", plots.GREY, "-"),
        "zero-shot": (f"baseline/zero_shot/{metric}", plots.GREEN, "-"),
        "served": (f"served/{metric}", plots.ORANGE, "-"),
        "champion before": (f"champion/{metric}", plots.INK, "--"),
    }
    figure, axes = plots.new_figure(title=f"{metric} of each day's run", grid_axis="y", size=(8.0, 4.2))
    for label, (name, colour, style) in series.items():
        points = [(position, day.metrics[name]) for position, day in enumerate(days) if name in day.metrics]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker="o", markersize=4, label=label)
    axes.set_xticks(range(len(days)), [f"{day.until:%m-%d}\n{day.state}" for day in days], fontsize=7)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(metric)
    plots.legend_above(axes, num_columns=5)
    plots.save_png(figure, path)
