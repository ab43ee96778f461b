"""<workspace>/metrics.prom: Prometheus metrics of the newest run, for the textfile collector of node_exporter."""

from collections.abc import Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from flows.runs.run_history import last_to_end, newest_promoted_version, run_history
from flows.settings.pipeline import PipelineConfig
from recsys_core.disk import free_bytes, used_bytes
from tasks.runs.run_record import RunState

METRICS_FILE_NAME = "metrics.prom"
_REGISTERING_STATES = ("Promoted", "NotPromoted", "NotEnoughData", "BrokenChampion")
_ValueByLabels = Mapping[tuple[str, ...], float | None]


def write_metrics_file(config: PipelineConfig) -> None:
    """Replace <workspace>/metrics.prom after the end of a run. If a newer run has started, the file describes the newer run."""
    write_to_textfile(str(config.workspace / METRICS_FILE_NAME), metrics_registry(config))


def metrics_registry(config: PipelineConfig) -> CollectorRegistry:
    """Return a registry with the metrics of the newest run. A metric without a value, e.g. of a failed run, is left out."""
    registry = CollectorRegistry(auto_describe=False)

    def add_gauge(
        name_suffix: str, description: str, value_or_values: float | _ValueByLabels | None, *, labels: tuple[str, ...] = ()
    ) -> None:
        """Add a gauge with one value, or with one value for each combination of label values."""
        gauge = Gauge(f"nightjar_{name_suffix}", description, ("pipeline", *labels), registry=registry)
        for label_values, gauge_value in (
            value_or_values if isinstance(value_or_values, Mapping) else {(): value_or_values}
        ).items():
            if gauge_value is not None:
                gauge.labels(config.name, *label_values).set(gauge_value)

    past_runs = run_history(config.workspace)
    add_gauge("workspace_bytes", "Space that the workspace takes on the disk.", used_bytes(config.workspace))
    add_gauge("free_bytes", "Free space on the disk of the workspace.", free_bytes(config.workspace))
    promoted_version = newest_promoted_version(past_runs)
    if promoted_version is not None and promoted_version.isdecimal():
        add_gauge("champion_version", "Version of the newest promotion.", int(promoted_version))
    last_registering_run = last_to_end(past_run for past_run in past_runs if past_run.record.state in _REGISTERING_STATES)
    if last_registering_run is not None and last_registering_run.record.ended is not None:
        end_timestamp = last_registering_run.record.ended.timestamp()
        add_gauge("last_registration_timestamp_seconds", "End of the last run that registered a version.", end_timestamp)
    if not past_runs:
        return registry
    record, figures = past_runs[0].record, past_runs[0].record.figures
    add_gauge("run_start_timestamp_seconds", "Start of the newest run.", record.started.timestamp())
    if record.ended is not None:
        add_gauge("run_end_timestamp_seconds", "End of the newest run.", record.ended.timestamp())
    is_current_by_state: _ValueByLabels = {(state,): state == record.state for state in get_args(RunState)}
    add_gauge("run_state", "1 for the state of the newest run, 0 for the other states.", is_current_by_state, labels=("state",))
    seconds_by_stage: _ValueByLabels = {(stage,): duration_s for stage, duration_s in figures.stage_seconds.items()}
    add_gauge("stage_duration_seconds", "Duration of each stage of the newest run.", seconds_by_stage, labels=("stage",))
    metric_name = config.registry.metric
    served_value_by_labels: _ValueByLabels = {
        (metric_name, "new"): past_runs[0].new_version_metric(metric_name),
        (metric_name, "champion"): past_runs[0].champion_metric(metric_name),
    }
    description = "Value of registry.metric for the served recommendations of the new version and of the champion."
    add_gauge("served_metric", description, served_value_by_labels, labels=("metric", "model"))
    for entities, count in (("events", figures.events), ("users", figures.users), ("items", figures.items)):
        add_gauge(entities, f"Number of {entities} of the newest run.", count)
    return registry
