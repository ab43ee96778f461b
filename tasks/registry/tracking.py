"""The MLflow side of a run: one MLflow run per nightjar run, found again on resume, and metrics relayed while they come."""

import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Metric, Param, RunStatus, ViewType
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME

from recsys_core.errors import TrackingServerError
from recsys_core.evaluation.report import plot_loss, plot_recall
from recsys_core.manifests import (
    DataReportManifest,
    EmbeddingsManifest,
    EvaluationManifest,
    IndexManifest,
    InteractionsManifest,
    PlanManifest,
    TrainManifest,
    fingerprint_of,
)
from recsys_core.retrieval.plot import plot_indexes
from recsys_core.training.job_spec import Progress
from tasks.registry.mlflow_client import ANSWER_TIMEOUT_S, RUN_ID_TAG, connect, tracking_error, tracking_uri, within
from tasks.run import Run

LOG = logging.getLogger("nightjar")
TRAINING_METRICS = ("loss", "learning_rate", "samples_per_s", "embedding_bytes_per_s", "epoch")
_FLUSH_EVERY_S = 1.0
_METRICS_PER_CALL = 900
_PARAMS_PER_CALL = 100
_PATHS_SHOWN = 100


def open_run(client: MlflowClient, run: Run) -> str:
    """Id of the MLflow run that belongs to `run`; created if there is none."""
    with FileLock(run.workspace / ".mlflow.lock"):
        experiment = client.get_experiment_by_name(run.experiment)
        if experiment is None:
            # An artifact location is fixed for good, and defaults to the folder the process happens to be in.
            location = None if os.environ.get("MLFLOW_TRACKING_URI") else (run.workspace.absolute() / "mlartifacts").as_uri()
            experiment_id = client.create_experiment(run.experiment, artifact_location=location)
        else:
            experiment_id = experiment.experiment_id
        found = client.search_runs(
            [experiment_id], f"tags.`{RUN_ID_TAG}` = '{run.run_id}'", ViewType.ACTIVE_ONLY, max_results=1
        )
        if found:
            return str(found[0].info.run_id)
        return str(client.create_run(experiment_id, tags={RUN_ID_TAG: run.run_id, MLFLOW_RUN_NAME: run.run_id}).info.run_id)


def log_params(client: MlflowClient, mlflow_run_id: str, *, config_file: Path) -> None:
    """The settings in `config_file`, flat. MLflow keeps a param's first value: what a resume changed goes into a tag."""
    settings = flatten(yaml.safe_load(config_file.read_text(encoding="utf-8")))
    present = client.get_run(mlflow_run_id).data.params
    fresh = [Param(key, value) for key, value in settings.items() if key not in present]
    for start in range(0, len(fresh), _PARAMS_PER_CALL):
        client.log_batch(mlflow_run_id, params=fresh[start : start + _PARAMS_PER_CALL])
    changed = {key: value for key, value in settings.items() if present.get(key, value) != value}
    if changed:
        client.set_tag(mlflow_run_id, "nightjar.changed_on_resume", json.dumps(changed))


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names and strings.

    >>> flatten({"model": {"layers": [64, 32]}, "name": "nightly"})
    {'model.layers': '[64, 32]', 'name': 'nightly'}
    """
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value)
    return flat


def log_training_metrics(client: MlflowClient, mlflow_run_id: str, *, metrics_file: Path) -> None:
    """What the relay could not deliver of `metrics_file` (metrics.jsonl)."""
    lines = [Progress.model_validate_json(line) for line in metrics_file.read_text().splitlines()]
    now_ms = int(metrics_file.stat().st_mtime * 1000)
    logged = logged_steps(client, mlflow_run_id)
    log_metrics(
        client,
        mlflow_run_id,
        [metric for line in lines if line.step not in logged for metric in training_metrics(line, time_ms=now_ms)],
    )


def logged_steps(client: MlflowClient, mlflow_run_id: str) -> set[int]:
    """Training steps that MLflow has: they are not logged again."""
    return {metric.step for metric in client.get_metric_history(mlflow_run_id, "train/loss")}


def log_metrics(client: MlflowClient, mlflow_run_id: str, metrics: Sequence[Metric]) -> None:
    """As few calls as MLflow allows: one call costs about as much as one metric."""
    for start in range(0, len(metrics), _METRICS_PER_CALL):
        client.log_batch(mlflow_run_id, metrics=metrics[start : start + _METRICS_PER_CALL])


def training_metrics(line: Progress, *, time_ms: int) -> list[Metric]:
    """One line of metrics.jsonl."""
    values = line.model_dump(include=set(TRAINING_METRICS))
    values |= {f"{name}_ms_per_step": ms for name, ms in line.ms_per_step.items()}
    values |= {f"{name}_bytes": size for name, size in line.memory_bytes.items()}
    values |= {f"validation/{name.replace('@', '_at_')}": value for name, value in line.validation.items()}
    return [Metric(f"train/{name}", float(value), time_ms, line.step) for name, value in values.items()]


def as_metrics(values: Mapping[str, float]) -> list[Metric]:
    """Flat metrics under names that MLflow takes: it refuses '@'. A value that was not defined (nan) is left out."""
    now_ms = int(time.time() * 1000)
    return [Metric(name.replace("@", "_at_"), value, now_ms, 0) for name, value in values.items() if not math.isnan(value)]


def log_results(
    client: MlflowClient,
    mlflow_run_id: str,
    *,
    run: Run,
    plan: PlanManifest,
    train: TrainManifest,
    evaluation: EvaluationManifest,
    index: IndexManifest,
) -> None:
    """Params, what the relay could not deliver, metrics, the config, the plan, and the pictures."""
    log_params(client, mlflow_run_id, config_file=run.config_file)
    log_training_metrics(client, mlflow_run_id, metrics_file=train.path("metrics.jsonl"))
    recalls = {f"index/{kind}/recall": report.recall for kind, report in index.reports.items()}
    best = {} if train.best_epoch is None else {"train/best_epoch": train.best_epoch}
    values = {**evaluation.metrics, **recalls, **best, "train/final_loss": train.final_loss}
    log_metrics(client, mlflow_run_id, as_metrics(values))
    pictures = (
        plot_loss(train, path=run.folder / "loss.png"),
        plot_recall(evaluation.metrics, path=run.folder / "recall.png"),
        plot_indexes(index.reports, served=index.served, path=run.folder / "indexes.png"),
    )
    for file in (run.config_file, plan.path("plan.json"), *pictures):
        client.log_artifact(mlflow_run_id, str(file))


def log_data(
    client: MlflowClient,
    mlflow_run_id: str,
    *,
    stages: Sequence[EmbeddingsManifest | InteractionsManifest | None],
    report: DataReportManifest,
) -> None:
    """The input files as they were read: as datasets of the run, and whole in data_fingerprints.json; and the data report."""
    if "data/breaches" not in client.get_run(mlflow_run_id).data.metrics:  # it could not be delivered when it was made
        log_data_report(client, mlflow_run_id, report)
    sources = {stage.kind: stage.sources for stage in stages if stage is not None}
    content = {kind: [source.model_dump() for source in files] for kind, files in sources.items()}
    client.log_dict(mlflow_run_id, content, "data_fingerprints.json")
    datasets = [
        # MLflow keeps 36 characters of a digest.
        Dataset(kind, fingerprint_of(content[kind])[:36], "local", json.dumps([file.path for file in files[:_PATHS_SHOWN]]))
        for kind, files in sources.items()
    ]
    client.log_inputs(mlflow_run_id, [DatasetInput(dataset) for dataset in datasets])


def log_data_report(client: MlflowClient, mlflow_run_id: str, report: DataReportManifest) -> None:
    """report.html, and its metrics as data/<name>."""
    values = {f"data/{name}": value for name, value in report.metrics.items()}
    log_metrics(client, mlflow_run_id, as_metrics({**values, "data/breaches": float(len(report.breaches))}))
    client.log_artifact(mlflow_run_id, str(report.path("report.html")), "data_report")


def deliver_data_report(run: Run, report: DataReportManifest) -> None:
    """The report on its way to MLflow; what an outage kept back is made up for at registration."""

    def deliver(client: MlflowClient) -> None:
        mlflow_run_id = open_run(client, run)
        log_params(client, mlflow_run_id, config_file=run.config_file)
        log_data_report(client, mlflow_run_id, report)
        client.set_terminated(mlflow_run_id, RunStatus.to_string(RunStatus.FAILED if report.breaches else RunStatus.FINISHED))

    deliver_or_warn(deliver, workspace=run.workspace, what="data report", going_on="it is logged at registration")


def deliver_or_warn(deliver: Callable[[MlflowClient], None], *, workspace: Path, what: str, going_on: str) -> None:
    """Calls `deliver`, which logs to MLflow; an outage costs a warning and at most twice ANSWER_TIMEOUT_S."""
    try:
        client = connect(workspace)
        within(ANSWER_TIMEOUT_S, lambda: deliver(client), uri=client.tracking_uri)
    except TrackingServerError as error:
        LOG.warning("the %s is not in MLflow; %s (%s)", what, going_on, error)


class MetricRelay:
    """Training metrics on their way to MLflow, from a thread of its own: an outage there neither stops nor slows training.

    What could not be delivered is warned about once, and is made up for when the version is registered.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lines: queue.SimpleQueue[tuple[int, Progress]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._status = RunStatus.to_string(RunStatus.FINISHED)
        self._thread = threading.Thread(target=self._relay, name="mlflow-relay", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._status = RunStatus.to_string(RunStatus.FINISHED if kind is None else RunStatus.FAILED)
        self._closing.set()
        self._thread.join(2 * ANSWER_TIMEOUT_S)

    def send(self, line: Progress) -> None:
        """Takes one line of metrics.jsonl; returns at once."""
        self._lines.put((int(time.time() * 1000), line))

    def _relay(self) -> None:
        try:
            client = connect(self._run.workspace)
            mlflow_run_id = open_run(client, self._run)
            client.update_run(mlflow_run_id, status=RunStatus.to_string(RunStatus.RUNNING))
            log_params(client, mlflow_run_id, config_file=self._run.config_file)
            logged = logged_steps(client, mlflow_run_id)
            closing = False
            while not closing:
                closing = self._closing.wait(_FLUSH_EVERY_S)
                arrived = [self._lines.get() for _ in range(self._lines.qsize())]
                fresh = [(time_ms, line) for time_ms, line in arrived if line.step not in logged]
                log_metrics(
                    client,
                    mlflow_run_id,
                    [metric for time_ms, line in fresh for metric in training_metrics(line, time_ms=time_ms)],
                )
                logged.update(line.step for _, line in fresh)
            client.set_terminated(mlflow_run_id, self._status)
        except Exception as error:  # whatever MLflow, its database or the network throws: training goes on
            LOG.warning(
                "training metrics are not logged from now on; training continues, they are logged at registration (%s)",
                tracking_error(error, uri=tracking_uri(self._run.workspace)),
            )
