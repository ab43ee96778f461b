"""Data reports of small logs."""

from pathlib import Path
from typing import Any

from recsys_core.data_report.limits import DataReportConfig
from recsys_core.data_report.page import DataReport
from recsys_core.data_report.report import PreviousRun, report_data
from recsys_core.ingest.log.split_config import FileSplit, Split
from recsys_core.manifests import DataReportManifest, InteractionsManifest
from recsys_core.units import DAY_US
from tests.recsys_core.ingest.interactions_with_times import Parts

FILES = FileSplit(test_paths=("test.parquet",))


def user(*items: int, test: int = 0, at: int = 0) -> Parts:
    """Return training events on consecutive days and one test event."""
    return [(item, (at + day) * DAY_US) for day, item in enumerate(items)], [], [(test, 90 * DAY_US)]


def report_of(
    folder: Path,
    interactions: InteractionsManifest,
    *,
    before: InteractionsManifest | None = None,
    split: Split = FILES,
    **limits: Any,
) -> tuple[DataReportManifest, DataReport]:
    limits = {"min_validation_users": None, "min_test_users": None} | limits
    previous = before and PreviousRun("20261120-020000-aa11", before, {"train_events": float(before.num_train_events)})
    manifest = report_data(
        DataReportConfig(**limits),
        split=split,
        interactions=interactions,
        previous=previous,
        folder=folder / "run" / "data_report",
    )
    return manifest, DataReport.model_validate_json(manifest.path("report.json").read_bytes())
