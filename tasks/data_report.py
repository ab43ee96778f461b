"""Stage `check_data`."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.data.interactions.config import Split
from recsys_core.data_report import report as report_core
from recsys_core.data_report.config import DataReportConfig
from recsys_core.data_report.page import to_markdown
from recsys_core.errors import InputError
from recsys_core.manifests import DataReportManifest, InteractionsManifest, load_manifest
from tasks.registry.tracking import log_data_report_or_warn
from tasks.reporting import LOG, begin, show_markdown
from tasks.run import STAGES, Run


@task(name="check_data", cache_policy=NO_CACHE)
def check_data(config: DataReportConfig, *, split: Split, interactions: InteractionsManifest, run: Run) -> DataReportManifest:
    """Interactions -> report.html, and InputError where the data breaks a limit."""
    finish = begin("check_data")
    manifest = report_core.report_data(
        config, split=split, interactions=interactions, last_night=_last_good_night(run), folder=run.stage_folder("check_data")
    )
    page = manifest.path("report.html")
    show_markdown("data-report", to_markdown(manifest, page=page))
    log_data_report_or_warn(run, manifest)
    for words in manifest.warnings:
        LOG.warning("data: %s", words)
    if manifest.breaches:
        listed = "\n".join(f"- {words}" for words in manifest.breaches)
        raise InputError(
            f"the data breaks {len(manifest.breaches)} of the limits in data_report:\n{listed}\nlook at {page}; mend the data, "
            f"or change the setting and go on with --resume {run.run_id}"
        )
    finish(manifest, f"every limit kept, compared with {manifest.compared_with or 'no earlier night'}")
    return manifest


def _last_good_night(run: Run) -> report_core.LastNight | None:
    """Data that broke a limit is no measure for the next night, or the second bad night would pass."""
    report = run.last_night("check_data", DataReportManifest, where=lambda found: not found.breaches)
    if report is None:
        return None
    night = report.folder.parent
    interactions = load_manifest(night / STAGES["ingest_interactions"], InteractionsManifest)
    return None if interactions is None else report_core.LastNight(night.name, interactions, report.metrics)
