"""Flows that repeat the nightly run: the backtest over the last days, and the spread of the metric between seeds.

Each flow has its own workspace, with runs and an MLflow database, in a subfolder of the config's workspace. If the same flow is
repeated with the same settings and data, it continues in the same workspace, and complete stages are kept. With other settings
or data, it has another workspace. Otherwise the run of a day could start from a champion that was trained on later events.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

from prefect import flow

from flows.nightly import nightly_retrain
from flows.prefect_runs import name_flow_run
from flows.settings.pipeline import PipelineConfig
from recsys_core import plots
from recsys_core.config import Frozen, Settings
from recsys_core.errors import InputError, NightjarError, StageError
from recsys_core.evaluation.metrics import COMPARED_METRICS
from recsys_core.manifests import Dataset, EvaluationManifest, StageName, fingerprint_of, read_unchecked_manifest
from tasks.delivery.config import DeliveryConfig
from tasks.progress.reporting import LOG
from tasks.registry.config import RegistryConfig
from tasks.runs.context import StageContext
from tasks.runs.run import REDUCED_FILE_NAME, Run
from tasks.runs.run_record import RunRecord
from tasks.runs.workspace import Workspace
from tasks.stages.data_stages import ingest

BACKTEST_NAME, GATE_NOISE_NAME = "backtest", "gate-noise"
"""Names of the commands, of their folders in the workspace, and of the files with the results, without the suffix."""
IRRELEVANT_GROUPS = ("workspace", "refresh", "delivery", "serve", "schedule", "retention", "tuning")
"""Settings that do not affect the results of the runs."""


class BacktestRun(Frozen):
    """One run of the backtest, which reads the log up to the end of a day.

    Attributes:
        until: time up to which the run reads the log.
        state: end state of the run, such as Promoted.
        metrics: metrics of the evaluation, and metrics of the items that the new version and the champion serve.
    """

    until: datetime
    run_id: str
    state: str
    message: str
    version: str | None
    metrics: dict[str, float]


class GateNoise(Frozen):
    """Spread of the gate's metric between trainings that differ only in the seed.

    Attributes:
        value_by_seed: metric on the test split, by seed of the training.
    """

    metric: str
    value_by_seed: dict[int, float]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return fmean(self.value_by_seed.values())

    @property
    def relative_sd(self) -> float:
        """Standard deviation between the seeds divided by the mean."""
        return stdev(self.value_by_seed.values()) / self.mean if self.mean else 0.0

    def chance_of_drop(self, margin: float) -> float:
        """Return the probability that a second equal training is worse than the first by more than `margin` times the mean.

        >>> round(GateNoise(metric="recall@20", value_by_seed={1: 0.19, 2: 0.21}).chance_of_drop(0.05), 3)
        0.309
        """
        return 1 - NormalDist().cdf(margin / (2**0.5 * self.relative_sd)) if self.relative_sd else 0.0


class Backtest(NamedTuple):
    """The runs of a backtest, the oldest first, and the workspace that contains the runs, backtest.json and backtest.png."""

    folder: Path
    runs: list[BacktestRun]


@flow(name="backtest")
def backtest(config: PipelineConfig, num_days: int) -> Backtest:
    """Run the pipeline once for each of the last days of the log, with the events up to the end of that day.

    Each run continues from the versions of the earlier runs, as in production. All runs read the current vectors and features.

    Raises:
        InputError: the log has no event times.
    """
    if config.interactions.timestamp_column is None:
        raise InputError("a backtest needs event times; set interactions.timestamp_column")
    name_flow_run(config.name, f"backtest of {num_days} days")
    with _locked_workspace(config, BACKTEST_NAME, num_days) as (folder, dataset):
        assert dataset.interactions.last_time is not None
        log_end_time = datetime.fromisoformat(dataset.interactions.last_time) + timedelta(seconds=1)
        registry_config = _own_registry(config.registry, folder)
        runs: list[BacktestRun] = []
        for num_days_ago in reversed(range(num_days)):
            until = log_end_time - timedelta(days=num_days_ago)
            runs.append(_run_until(until, config.model_copy(update={"registry": registry_config}), folder=folder))
            _write_json(folder / f"{BACKTEST_NAME}.json", [run.model_dump(mode="json") for run in runs])
            plot_backtest(runs, metric=config.registry.metric, path=folder / f"{BACKTEST_NAME}.png")
    return Backtest(folder, runs)


def _run_until(until: datetime, config: PipelineConfig, *, folder: Path) -> BacktestRun:
    """Execute the run that reads the log up to the time `until`, in the workspace `folder`."""
    log_filter = config.interactions.filter.model_copy(update={"until": until.astimezone(UTC).replace(tzinfo=None)})
    interactions = config.interactions.model_copy(update={"filter": log_filter})
    run_id = f"{until:%Y%m%d-%H%M%S}-until"
    record, metrics = _repeat_run(config.model_copy(update={"interactions": interactions}), run_id, folder=folder)
    return BacktestRun(
        until=until,
        run_id=run_id,
        state=record.state,
        message=record.message,
        version=record.figures.version,
        metrics=metrics,
    )


@flow(name="gate-noise")
def measure_gate_noise(config: PipelineConfig, num_seeds: int) -> GateNoise:
    """Train and evaluate with `num_seeds` seeds, each from scratch.

    Raises:
        StageError: a training did not reach its evaluation.
    """
    name_flow_run(config.name, f"with {num_seeds} seeds")
    metric, value_by_seed = config.registry.metric, dict[int, float]()
    metric_name, _, k = metric.partition("@")
    metric_settings = {"metrics": (metric_name,), "ks": (int(k),), "baselines": (), "slices": ()}
    evaluation = config.evaluation.model_copy(update=metric_settings)
    with _locked_workspace(config, GATE_NOISE_NAME) as (folder, _):
        for seed in range(config.training.seed, config.training.seed + num_seeds):
            training = config.training.model_copy(update={"seed": seed, "warm_start": None})
            guardrails = config.registry.guardrails.model_copy(update={"features": ()})  # these guardrails need slices
            registry_config = _own_registry(config.registry, folder).model_copy(update={"guardrails": guardrails})
            seed_config = config.model_copy(
                update={"training": training, "evaluation": evaluation, "registry": registry_config}
            )
            record, metrics = _repeat_run(seed_config, f"seed-{seed}", folder=folder, until="evaluate")
            if f"test/{metric}" not in metrics:
                raise StageError(f"the training with seed {seed} ended as {record.state}: {record.message}")
            value_by_seed[seed] = metrics[f"test/{metric}"]
        noise = GateNoise(metric=metric, value_by_seed=value_by_seed)
        _write_json(folder / f"{GATE_NOISE_NAME}.json", noise.model_dump(mode="json"))
    return noise


@contextmanager
def _locked_workspace(config: PipelineConfig, flow_name: str, *flow_inputs: object) -> Iterator[tuple[Path, Dataset]]:
    """Lock `<workspace>/<flow_name>` and ingest the data there; yield the workspace of the runs, and the data.

    The name of the workspace contains a hash of the data and of all settings that affect the runs. The lock is on the ingested
    data, so that only one process executes the flow.

    Args:
        flow_inputs: inputs of the flow that affect its runs, in addition to the config.
    """
    data_run = Run("data", workspace=config.workspace.absolute(), parent_name=flow_name)
    with data_run.lock():
        dataset = ingest(StageContext(data_run), config.input_config)
        relevant_settings = {
            name: value.result_settings() if isinstance(value, Settings) else value
            for name, value in config
            if name not in IRRELEVANT_GROUPS
        }
        data_manifests = (dataset.interactions, dataset.embeddings, dataset.features, dataset.log_vectors)
        fingerprint = fingerprint_of(flow_name, relevant_settings, *data_manifests, *flow_inputs)
        yield data_run.folder.with_name(f"{flow_name}-{fingerprint[:12]}"), dataset


def _own_registry(registry: RegistryConfig, folder: Path) -> RegistryConfig:
    """Return the settings with the name of the workspace in the names of the model and of the experiment.

    All workspaces may share one MLflow server, in which runs with the same id and experiment are one MLflow run.
    """
    names = {"model_name": f"{registry.model_name}-{folder.name}", "experiment": f"{registry.experiment}-{folder.name}"}
    return registry.model_copy(update=names)


def _repeat_run(
    config: PipelineConfig, run_id: str, *, folder: Path, until: StageName | None = None
) -> tuple[RunRecord, dict[str, float]]:
    """Execute the nightly run in the workspace `folder`; return its record, and the metrics of its stages.

    The champion is not delivered, because the receivers have the champion of the workspace in the config. If retention has
    removed the large files of a run, the run is not executed again, because it had the same settings and data.
    """
    run = Workspace(folder).run(run_id)
    if not (run.folder / REDUCED_FILE_NAME).exists():
        LOG.info("run %s", run_id)
        overrides = {"workspace": folder, "delivery": DeliveryConfig()}
        start_time = datetime.now(UTC)
        state = nightly_retrain(config.model_copy(update=overrides), run_id=run_id, until=until, return_state=True)
        record = RunRecord.read(run)
        if record is None or record.started < start_time:  # the run failed before it wrote its record
            error = state.result(raise_on_failure=False)
            raise error if isinstance(error, NightjarError) else StageError(f"run {run_id} did not start: {state.message}")
    record = RunRecord.read(run)
    assert record is not None  # checked above, or written before the run was reduced
    evaluation = read_unchecked_manifest(run.stage_folder(EvaluationManifest), EvaluationManifest)
    return record, ({} if evaluation is None else evaluation.metrics) | record.figures.metrics


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


_STYLE_BY_RANKER = {
    "model": ("test", plots.BLUE, "-"),
    "served": ("served", plots.ORANGE, "-"),
    "champion before": ("champion", plots.INK, "--"),
    "champion, refitted": ("refit", plots.RED, "--"),
    "closed form": ("baseline/closed_form", plots.RED, "-"),
    "co-occurrence": ("baseline/cooccurrence", plots.RED, ":"),
    "zero-shot": ("baseline/zero_shot", plots.GREEN, "-"),
    "popularity": ("baseline/popularity", plots.GREY, "-"),
    "recent popularity": ("baseline/recent_popularity", plots.GREY, ":"),
}
"""Prefix of the metrics, colour and line style of each ranker in the plot of a backtest, by label."""


def plot_backtest(runs: Sequence[BacktestRun], *, metric: str, path: Path) -> Path:
    """Write a PNG with one panel for each served metric over the runs, the config's metric first. Return `path`."""
    metric_names = (metric, *(name for name in COMPARED_METRICS if name != metric))
    figure, panels = plots.new_panels(len(metric_names), title="Metrics of each day's run", grid_axis="y", size=(8.0, 8.4))
    for axes, metric_name in zip(panels, metric_names, strict=True):
        for label, (prefix, colour, line_style) in _STYLE_BY_RANKER.items():
            metric_key = f"{prefix}/{metric_name}"
            points = [(position, run.metrics[metric_key]) for position, run in enumerate(runs) if metric_key in run.metrics]
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, linestyle=line_style, marker="o", markersize=4, label=label)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(metric_name)
    panels[-1].set_xticks(range(len(runs)), [f"{run.until:%m-%d}\n{run.state}" for run in runs], fontsize=7)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8, labelcolor=plots.INK)
    return plots.save_png(figure, path)
