"""Stage `check_data`: the data report, and its comparison with the newest earlier run whose data was accepted."""

from recsys_core.data_report.limits import DataReportConfig, describe_held_out_users
from recsys_core.data_report.page import to_markdown
from recsys_core.data_report.report import PreviousRun, report_data
from recsys_core.errors import DataRejectedError
from recsys_core.ingest.log.split_config import Split
from recsys_core.manifests import DataReportManifest, InteractionsManifest, load_manifest
from tasks.progress.artifacts import link_mlflow_run, show_markdown
from tasks.progress.reporting import LOG
from tasks.registry.tracking import log_data_report_or_warn
from tasks.runs.context import StageContext
from tasks.runs.workspace import Workspace
from tasks.stages.stage import stage


@stage(DataReportManifest)
def check_data(context: StageContext, config: DataReportConfig, *, split: Split) -> tuple[DataReportManifest, str]:
    """Write the data report; raise DataRejectedError if the data violates a limit of the config."""
    manifest = report_data(
        config,
        split=split,
        interactions=context.dataset.interactions,
        previous=_reference_run(context),
        folder=context.folder(DataReportManifest),
    )
    page_path = manifest.path("report.html")
    show_markdown(context, "data-report", to_markdown(manifest, page_path=page_path))
    mlflow_address = log_data_report_or_warn(context, manifest)
    if mlflow_address is not None:
        link_mlflow_run(context, mlflow_address)
    for warning in manifest.warnings:
        LOG.warning("data: %s", warning)
    if manifest.breaches:
        violation_list = "\n".join(f"- {breach}" for breach in manifest.breaches)
        raise DataRejectedError(
            f"the data violates {len(manifest.breaches)} of the limits in data_report:\n{violation_list}\nsee {page_path}; "
            f"fix the data, or relax the limit and rerun with --resume {context.run.run_id}"
        )
    held_out_users_text = describe_held_out_users(manifest.metrics)
    return manifest, f"{held_out_users_text}, no limit is violated, reference run: {manifest.compared_with or 'none'}"


def _reference_run(context: StageContext) -> PreviousRun | None:
    """Return the newest earlier run without violated limits; None if there is none.

    Bad data is never the reference, because similar bad data would then be accepted.
    """
    workspace = Workspace(context.run.workspace)
    report = workspace.newest_manifest(DataReportManifest, before=context.run, where=lambda manifest: not manifest.breaches)
    if report is None:
        return None
    run = workspace.run(report.folder.parent.name)
    interactions = load_manifest(run.stage_folder(InteractionsManifest), InteractionsManifest)
    return None if interactions is None else PreviousRun(run.run_id, interactions, report.metrics)
