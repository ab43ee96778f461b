"""Stage `data_report`: what the night's data is, how it differs from last night's, and whether it may be trained on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recsys_core.data.interactions.config import Split
from recsys_core.data_report.config import DataReportConfig
from recsys_core.data_report.drift import Mover, compare_nights
from recsys_core.data_report.leaks import read_split
from recsys_core.data_report.limits import breaches_of, check_limits, warnings_of
from recsys_core.data_report.page import to_html
from recsys_core.data_report.schema import DataReport, Day
from recsys_core.data_report.statistics import history_classes, popularity_curve, shares, sizes, train_lengths
from recsys_core.manifests import DataReportManifest, InteractionsManifest, fingerprint_of, produce


@dataclass(frozen=True)
class LastNight:
    """The night that tonight is compared with; `metrics` are those of its own report."""

    run: str
    interactions: InteractionsManifest
    metrics: Mapping[str, float]


def report_data(
    config: DataReportConfig,
    *,
    split: Split,
    interactions: InteractionsManifest,
    last_night: LastNight | None,
    folder: Path,
) -> DataReportManifest:
    """Measures the event store that training will read, compares it with `last_night`, and checks the limits of `config`.

    Memory does not grow with the number of events: they are read in chunks of users. Broken limits are in the manifest's
    `breaches`; whether the run ends there is the caller's to decide.
    """

    def build(out: Path) -> dict[str, Any]:
        report = measure(config, split=split, interactions=interactions, last_night=last_night, spill=out / "spill")
        if (out / "spill").exists():
            (out / "spill").rmdir()
        (out / "report.json").write_text(report.model_dump_json(indent=2), encoding="utf-8")
        (out / "report.html").write_text(to_html(report, run=folder.parent.name), encoding="utf-8")
        return {
            "metrics": report.metrics,
            "breaches": report.breaches,
            "warnings": report.warnings,
            "compared_with": report.compared_with,
        }

    fingerprint = fingerprint_of(
        "data_report", config, split, interactions, last_night and [last_night.run, last_night.interactions]
    )
    return produce(folder, DataReportManifest, fingerprint=fingerprint, build=build)


def measure(
    config: DataReportConfig,
    *,
    split: Split,
    interactions: InteractionsManifest,
    last_night: LastNight | None,
    spill: Path,
) -> DataReport:
    """The report itself, nothing written but what DuckDB spills to `spill`."""
    facts = read_split(interactions, split=split)
    count_I = np.load(interactions.path("item_count.npy"), mmap_mode="r")
    last_count_L = np.zeros(0, np.int64)
    metrics = sizes(interactions, facts) | shares(interactions, facts, count_I)
    moved: tuple[Mover, ...] = ()
    if last_night is not None:
        last_count_L = np.load(last_night.interactions.path("item_count.npy"), mmap_mode="r")
        changes, moved = compare_nights(last_night.interactions, interactions, events_I=facts.events_I, spill=spill)
        metrics |= changes
    checks = check_limits(metrics, config)
    return DataReport(
        compared_with=last_night and last_night.run,
        night=interactions.night,
        rebuilt=interactions.rebuilt,
        first_time=interactions.first_time,
        last_time=interactions.last_time,
        split=split.kind,
        files=len(interactions.sources),
        rows=sum(source.rows for source in interactions.sources),
        files_read=interactions.files_read,
        rows_read=interactions.rows_read,
        metrics=known(metrics),
        last_metrics={} if last_night is None else known(last_night.metrics),
        checks=checks,
        breaches=breaches_of(checks),
        warnings=warnings_of(metrics),
        columns=interactions.columns,
        set_aside=interactions.set_aside,
        bad_rows=interactions.bad_rows,
        days=tuple(
            Day(day=str(np.datetime64(day, "D")), train=int(parts[0]), validation=int(parts[1]), test=int(parts[2]))
            for day, parts in sorted(facts.days.items())
        ),
        history_lengths=history_classes(train_lengths(interactions)),
        popularity=popularity_curve(count_I),
        last_popularity=popularity_curve(last_count_L),
        movers=moved,
    )


def known(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without what could not be measured."""
    return {name: float(value) for name, value in metrics.items() if not math.isnan(value)}
