"""Data reports of small logs."""

from pathlib import Path
from typing import Any

from recsys_core.data_report.limits import DataReportConfig
from recsys_core.data_report.page import DataReport
from recsys_core.data_report.report import PreviousRun, report_data
from recsys_core.ingest.log.split_config import FileSplit, Split
from recsys_core.manifests import DataReportManifest, InteractionsManifest
from recsys_core.units import DAY_US
from tests.recsys_core.ingest.interactions_with_times import UserEvents

FILE_SPLIT = FileSplit(test_paths=("test.parquet",))
PREVIOUS_RUN_NAME = "20261120-020000-aa11"


def user_events(*train_items: int, test_item: int = 0) -> UserEvents:
    """Return the events of a user: one training event per day from day 0, and one test event on day 90."""
    return [(item, day * DAY_US) for day, item in enumerate(train_items)], [], [(test_item, 90 * DAY_US)]


def report_of(
    folder: Path,
    interactions: InteractionsManifest,
    *,
    previous: InteractionsManifest | None = None,
    split: Split = FILE_SPLIT,
    **limits: Any,
) -> tuple[DataReportManifest, DataReport]:
    """Write a data report. Return its manifest and its content.

    Args:
        previous: interactions of the previous run; None for the first run.
        limits: limits that differ from the defaults. The minimum numbers of users are off, because the logs are small.
    """
    limits = {"min_validation_users": None, "min_test_users": None} | limits
    previous_run = previous and PreviousRun(PREVIOUS_RUN_NAME, previous, {"train_events": float(previous.num_train_events)})
    manifest = report_data(
        DataReportConfig(**limits),
        split=split,
        interactions=interactions,
        previous=previous_run,
        folder=folder / "run" / "data_report",
    )
    return manifest, DataReport.model_validate_json(manifest.path("report.json").read_bytes())


def report_manifest_of(folder: Path, interactions: InteractionsManifest, **arguments: Any) -> DataReportManifest:
    """Write a data report with the arguments of `report_of`. Return its manifest."""
    manifest, _ = report_of(folder, interactions, **arguments)
    return manifest
