"""Training metrics in MLflow: logged live by a thread, and completed at registration."""

import logging
import queue
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from mlflow import MlflowClient
from mlflow.entities import Metric, RunStatus
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from recsys_core.training.job import Progress
from tasks.registry.mlflow_client import ANSWER_TIMEOUT_S, LOG, connect, tracking_error, tracking_uri
from tasks.registry.tracking import log_metrics, log_params, open_mlflow_run
from tasks.runs.context import StageContext

# During an outage, SystemMetricsMonitor logs the address of MLflow with the password. MetricRelay does not log the password.
logging.getLogger("mlflow.system_metrics.system_metrics_monitor").setLevel(logging.CRITICAL)
TRAINING_METRICS = ("loss", "learning_rate", "samples_per_s", "embedding_bytes_per_s", "epoch")
_FLUSH_INTERVAL_S = 1.0
_SYSTEM_METRICS_INTERVAL_S = 10.0
"""A sample takes about 50 ms of CPU time, so the samples take 0.5 % of a core."""


def log_training_metrics(client: MlflowClient, mlflow_run_id: str, *, metrics_file: Path) -> None:
    """Log the training steps in `metrics_file` (metrics.jsonl) that MetricRelay did not log."""
    progress_in_file = [Progress.model_validate_json(line) for line in metrics_file.read_text().splitlines()]
    modified_ms = int(metrics_file.stat().st_mtime * 1000)
    steps_in_mlflow = logged_steps(client, mlflow_run_id)
    missing_progress = [progress for progress in progress_in_file if progress.step not in steps_in_mlflow]
    metrics = [metric for progress in missing_progress for metric in training_metrics(progress, time_ms=modified_ms)]
    log_metrics(client, mlflow_run_id, metrics)


def logged_steps(client: MlflowClient, mlflow_run_id: str) -> set[int]:
    """Return the training steps that are in MLflow. MLflow would keep both values of a step that is logged twice."""
    return {metric.step for metric in client.get_metric_history(mlflow_run_id, "train/loss")}


def training_metrics(progress: Progress, *, time_ms: int) -> list[Metric]:
    """Convert one line of metrics.jsonl to MLflow metrics."""
    value_by_metric = progress.model_dump(include=set(TRAINING_METRICS))
    value_by_metric |= {f"{name}_ms_per_step": ms for name, ms in progress.ms_per_step.items()}
    value_by_metric |= {f"{name}_bytes": num_bytes for name, num_bytes in progress.memory_bytes.items()}
    value_by_metric |= {f"validation/{name.replace('@', '_at_')}": value for name, value in progress.validation.items()}
    return [Metric(f"train/{name}", float(value), time_ms, progress.step) for name, value in value_by_metric.items()]


class MetricRelay:
    """Logs training metrics to MLflow from a thread, so that an outage of MLflow neither stops nor slows training.

    The usage of CPU, memory, disk, network and GPU of this host is logged as system metrics, except for a training of less than
    10 s. After the first failure, the relay logs one warning and stops; the missing metrics are logged at registration.
    """

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._progress_queue: queue.SimpleQueue[tuple[int, Progress]] = queue.SimpleQueue()
        self._close_event = threading.Event()
        self._status = RunStatus.to_string(RunStatus.FINISHED)
        self._thread = threading.Thread(target=self._relay, name="mlflow-relay", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._status = RunStatus.to_string(RunStatus.FINISHED if error_type is None else RunStatus.FAILED)
        self._close_event.set()
        self._thread.join(2 * ANSWER_TIMEOUT_S)

    def send(self, progress: Progress) -> None:
        """Queue one line of metrics.jsonl for the thread, and return immediately."""
        self._progress_queue.put((int(time.time() * 1000), progress))

    def _log_until_closed(self, client: MlflowClient, mlflow_run_id: str) -> None:
        steps_in_mlflow = logged_steps(client, mlflow_run_id)
        is_closing = False
        while not is_closing:
            is_closing = self._close_event.wait(_FLUSH_INTERVAL_S)
            queued_progress = [self._progress_queue.get() for _ in range(self._progress_queue.qsize())]
            new_progress = [
                (time_ms, progress) for time_ms, progress in queued_progress if progress.step not in steps_in_mlflow
            ]
            metrics = [metric for time_ms, progress in new_progress for metric in training_metrics(progress, time_ms=time_ms)]
            log_metrics(client, mlflow_run_id, metrics)
            steps_in_mlflow.update(progress.step for _, progress in new_progress)

    def _relay(self) -> None:
        try:
            client = connect(self._context.run.workspace)
            mlflow_run_id = open_mlflow_run(client, self._context)
            client.update_run(mlflow_run_id, status=RunStatus.to_string(RunStatus.RUNNING))
            log_params(client, mlflow_run_id, config_file=self._context.run.config_file)
            monitor = SystemMetricsMonitor(
                mlflow_run_id, _SYSTEM_METRICS_INTERVAL_S, resume_logging=True, tracking_uri=client.tracking_uri
            )
            monitor.start()
            try:
                self._log_until_closed(client, mlflow_run_id)
            finally:
                monitor.finish()
            client.set_terminated(mlflow_run_id, self._status)
        except Exception as error:  # any error of MLflow, its database or the network
            LOG.warning(
                "could not log training metrics to MLflow; training continues, and registration will log them (%s)",
                tracking_error(error, uri=tracking_uri(self._context.run.workspace)),
            )
