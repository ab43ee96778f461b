"""Stage `check_data`: statistics of the ingested data, drift since the previous run, leaks, and limits.

Shapes: I items, U users.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recsys_core.data_report.drift import Mover, compare_runs
from recsys_core.data_report.leaks import count_split_events
from recsys_core.data_report.limits import DataReportConfig, check_limits, describe_breaches, find_warnings
from recsys_core.data_report.page import DataReport, Day, to_html
from recsys_core.data_report.statistics import (
    history_histogram,
    popularity_curve,
    share_metrics,
    size_metrics,
)
from recsys_core.dataset.events import EventStore
from recsys_core.ingest.log.split_config import Split
from recsys_core.manifests import DataReportManifest, InteractionsManifest, StageFolder


@dataclass(frozen=True)
class PreviousRun:
    """The run with which this run is compared: its name, its interactions, and the metrics of its data report."""

    name: str
    interactions: InteractionsManifest
    metrics: Mapping[str, float]


def report_data(
    config: DataReportConfig,
    *,
    split: Split,
    interactions: InteractionsManifest,
    previous: PreviousRun | None,
    folder: Path,
) -> DataReportManifest:
    """Measure the event store, compare it with the previous run, check the limits, and write report.json and report.html.

    Memory does not grow with the number of events, because they are read in chunks of users. The manifest lists violated limits
    as `breaches`; the caller decides whether the run stops.
    """
    stage = StageFolder(
        folder,
        DataReportManifest,
        inputs=["data_report", config, split, interactions, previous and [previous.name, previous.interactions]],
    )
    if stage.manifest is not None:
        return stage.manifest
    with stage.writing() as output_folder:
        spill_folder = output_folder / "spill"
        report = build_report(config, split=split, interactions=interactions, previous=previous, spill_folder=spill_folder)
        if spill_folder.exists():
            spill_folder.rmdir()
        (output_folder / "report.json").write_text(report.model_dump_json(indent=2), encoding="utf-8")
        (output_folder / "report.html").write_text(to_html(report, run_name=folder.parent.name), encoding="utf-8")
        return stage.commit(
            metrics=report.metrics,
            breaches=report.breaches,
            warnings=report.warnings,
            compared_with=report.compared_with,
        )


def build_report(
    config: DataReportConfig,
    *,
    split: Split,
    interactions: InteractionsManifest,
    previous: PreviousRun | None,
    spill_folder: Path,
) -> DataReport:
    """Return the report; the caller writes it. DuckDB may write temporary files into `spill_folder`."""
    split_counts = count_split_events(interactions, split=split)
    store = EventStore.open(interactions)
    num_events_I, num_events_by_part = store.event_count_I(), split_counts.num_events_by_day_and_part
    metrics = size_metrics(interactions, split_counts, num_events_I=num_events_I)
    metrics |= share_metrics(interactions, split_counts, num_events_I=num_events_I)
    if not split.has_validation:
        metrics["validation_users"] = math.nan
    previous_train_count = np.zeros(0, np.int64)
    movers: tuple[Mover, ...] = ()
    if previous is not None:
        previous_train_count = EventStore.open(previous.interactions).train_count_I
        drift_metrics, movers = compare_runs(
            previous.interactions, interactions, num_events_I=num_events_I, spill_folder=spill_folder
        )
        metrics |= drift_metrics
    checks = check_limits(metrics, config)
    return DataReport(
        compared_with=previous and previous.name,
        num_vocabulary_runs=interactions.run_number,
        rebuild_reason=interactions.rebuild_reason,
        first_time=interactions.first_time,
        last_time=interactions.last_time,
        split=split.kind,
        num_files=len(interactions.sources),
        num_rows=sum(source.num_rows for source in interactions.sources),
        num_files_read=interactions.num_files_read,
        num_rows_read=interactions.num_rows_read,
        metrics=without_nan(metrics),
        previous_metrics={} if previous is None else without_nan(previous.metrics),
        checks=checks,
        breaches=describe_breaches(checks),
        warnings=find_warnings(metrics),
        columns=interactions.columns,
        removed_events=interactions.num_removed_events_by_filter,
        bad_rows=interactions.num_bad_rows_by_reason,
        days=tuple(
            Day(
                day=str(np.datetime64(day, "D")),
                train=num_events_by_part[day, 0],
                validation=num_events_by_part[day, 1],
                test=num_events_by_part[day, 2],
            )
            for day in split_counts.days
        ),
        history_lengths=history_histogram(store.train_count_U),
        popularity=popularity_curve(store.train_count_I),
        previous_popularity=popularity_curve(previous_train_count),
        movers=movers,
    )


def without_nan(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that could be measured."""
    return {name: float(value) for name, value in metrics.items() if not math.isnan(value)}
