"""Prometheus metrics of the newest run, as a file and over HTTP.

The file is <workspace>/metrics.prom, for the textfile collector of node_exporter. Over HTTP, each scrape computes the
metrics from the run folders, so they are always current.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from flows.runs.run_history import PastRun, newest_promoted_version, run_history
from flows.servers.server_process import HOST
from flows.settings.pipeline import PipelineConfig
from recsys_core.disk import free_bytes, used_bytes
from recsys_core.errors import InputError
from tasks.runs.run_record import RunState

METRICS_FILE_NAME = "metrics.prom"
_REGISTERING_STATES = ("Promoted", "NotPromoted", "NotEnoughData", "BrokenChampion")


def metrics_registry(config: PipelineConfig) -> CollectorRegistry:
    """Return a registry with the metrics of the newest run of `config`'s workspace."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_WorkspaceCollector(config))
    return registry


@contextmanager
def serve_metrics(config: PipelineConfig, *, port: int) -> Iterator[str]:
    """Serve the metrics on the loopback address during the body; yield their URL. Raise InputError if the port is in use."""
    try:
        server, server_thread = start_http_server(port, addr=HOST, registry=metrics_registry(config))
    except OSError as error:
        raise InputError(f"port {port} on {HOST}: {os.strerror(error.errno or 0)}; set --metrics-port to a free port") from None
    try:
        yield f"http://{HOST}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        server_thread.join()


def write_metrics_file(config: PipelineConfig) -> None:
    """Replace <workspace>/metrics.prom after the end of a run. If a newer run has started, the file describes the newer run."""
    write_to_textfile(str(config.workspace / METRICS_FILE_NAME), metrics_registry(config))


class _WorkspaceCollector(Collector):
    """Metrics of a workspace, with the label `pipeline`. A metric without a value, e.g. of a failed run, is left out."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Read the workspace and yield its metrics."""
        workspace = self._config.workspace
        yield self._gauge("workspace_bytes", "Space that the workspace takes on the disk.", {(): used_bytes(workspace)})
        yield self._gauge("free_bytes", "Free space on the disk of the workspace.", {(): free_bytes(workspace)})
        past_runs = run_history(workspace)
        if past_runs:
            yield from self._newest_run_gauges(past_runs[0])
        promoted_version = newest_promoted_version(past_runs)
        if promoted_version is not None and promoted_version.isdecimal():
            yield self._gauge("champion_version", "Version of the newest promotion.", {(): int(promoted_version)})
        registration_records = [past_run.record for past_run in past_runs if past_run.record.state in _REGISTERING_STATES]
        if registration_records and registration_records[0].ended is not None:
            description = "End of the newest run that registered a version."
            yield self._gauge(
                "last_registration_timestamp_seconds", description, {(): registration_records[0].ended.timestamp()}
            )

    def _newest_run_gauges(self, newest_run: PastRun) -> Iterator[GaugeMetricFamily]:
        record, figures = newest_run.record, newest_run.record.figures
        metric_name = self._config.registry.metric
        yield self._gauge("run_start_timestamp_seconds", "Start of the newest run.", {(): record.started.timestamp()})
        if record.ended is not None:
            yield self._gauge("run_end_timestamp_seconds", "End of the newest run.", {(): record.ended.timestamp()})
        value_by_state = {(state,): int(state == record.state) for state in get_args(RunState)}
        yield self._gauge(
            "run_state", "1 for the state of the newest run, 0 for the other states.", value_by_state, labels=("state",)
        )
        duration_s_by_stage = {(stage,): duration_s for stage, duration_s in figures.stage_seconds.items()}
        yield self._gauge(
            "stage_duration_seconds", "Duration of each stage of the newest run.", duration_s_by_stage, labels=("stage",)
        )
        value_by_model = {
            (metric_name, "new"): newest_run.new_version_metric(metric_name),
            (metric_name, "champion"): newest_run.champion_metric(metric_name),
        }
        description = "Value of registry.metric for the served recommendations of the new version and of the champion."
        yield self._gauge("served_metric", description, value_by_model, labels=("metric", "model"))
        for entities, count in (("events", figures.events), ("users", figures.users), ("items", figures.items)):
            yield self._gauge(entities, f"Number of {entities} of the newest run.", {(): count})

    def _gauge(
        self, name_suffix: str, description: str, value_by_labels: Mapping[Any, float | None], *, labels: tuple[str, ...] = ()
    ) -> GaugeMetricFamily:
        """Return a gauge. A key of `value_by_labels` is a tuple with the value of each label in `labels`."""
        gauge = GaugeMetricFamily(f"nightjar_{name_suffix}", description, labels=("pipeline", *labels))
        for label_values, value in value_by_labels.items():
            if value is not None:
                gauge.add_metric((self._config.name, *label_values), value)
        return gauge
