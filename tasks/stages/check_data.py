"""Stage `check_data`."""

from typing import TYPE_CHECKING

from recsys_core.data_report.config import DataReportConfig
from recsys_core.errors import DataRejectedError
from recsys_core.imports import fast_imports
from recsys_core.ingest.log.config import Split
from recsys_core.manifests import DataReportManifest, Dataset, InteractionsManifest, load_manifest
from tasks.progress.artifacts import show_link, show_markdown
from tasks.progress.reporting import LOG, StageLog
from tasks.runs.run import Run
from tasks.stages.stage import stage

if TYPE_CHECKING:
    from recsys_core.data_report.report import PreviousRun


@stage("check_data")
def check_data(config: DataReportConfig, *, split: Split, dataset: Dataset, run: Run) -> DataReportManifest:
    """Write the data report; raise DataRejectedError if the data violates a limit of the config."""
    stage_log = StageLog("check_data")
    with fast_imports():
        from recsys_core.data_report.page import to_markdown
        from recsys_core.data_report.report import report_data
        from tasks.registry.tracking import log_data_report_or_warn

    manifest = report_data(
        config,
        split=split,
        interactions=dataset.interactions,
        previous=_reference_run(run),
        folder=run.stage_folder("check_data"),
    )
    page_path = manifest.path("report.html")
    show_markdown(run, "data-report", to_markdown(manifest, page_path=page_path))
    mlflow_address = log_data_report_or_warn(run, manifest)
    if mlflow_address is not None:
        show_link(run, "mlflow-run", mlflow_address, link_text="MLflow run")
    for warning in manifest.warnings:
        LOG.warning("data: %s", warning)
    if manifest.breaches:
        violations = "\n".join(f"- {breach}" for breach in manifest.breaches)
        raise DataRejectedError(
            f"the data violates {len(manifest.breaches)} of the limits in data_report:\n{violations}\nsee {page_path}; "
            f"fix the data, or relax the limit and rerun with --resume {run.run_id}"
        )
    return stage_log.finish(manifest, f"no limit is violated; reference run: {manifest.compared_with or 'none'}")


def _reference_run(run: Run) -> "PreviousRun | None":
    """Return the newest earlier run without violated limits. A comparison with bad data would accept similar bad data."""
    from recsys_core.data_report.report import PreviousRun

    report = run.previous_manifest("check_data", DataReportManifest, where=lambda manifest: not manifest.breaches)
    if report is None:
        return None
    run_folder = report.folder.parent
    interactions = load_manifest(run_folder / "ingest_interactions", InteractionsManifest)
    return None if interactions is None else PreviousRun(run_folder.name, interactions, report.metrics)
