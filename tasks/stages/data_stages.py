"""Stages that read the input: `ingest_embeddings`, `ingest_interactions`, `ingest_features` and `check_data`."""

from typing import TYPE_CHECKING

from recsys_core.data_report.limits import DataReportConfig, describe_held_out_users
from recsys_core.errors import DataRejectedError
from recsys_core.imports import fast_imports
from recsys_core.ingest import InputConfig
from recsys_core.ingest.features import ingest as features_core
from recsys_core.ingest.log import ingest as interactions_core
from recsys_core.ingest.log.config import Split
from recsys_core.ingest.vectors import ingest as embeddings_core
from recsys_core.manifests import (
    DataReportManifest,
    Dataset,
    EmbeddingsManifest,
    FeaturesManifest,
    InteractionsManifest,
    load_manifest,
)
from tasks.progress.artifacts import show_link, show_markdown
from tasks.progress.reporting import LOG
from tasks.runs.context import StageContext
from tasks.runs.workspace import Workspace
from tasks.stages.stage import stage

if TYPE_CHECKING:
    from recsys_core.data_report.report import PreviousRun


def ingest(context: StageContext, config: InputConfig) -> Dataset:
    """Ingest pretrained embeddings, the interaction log and features."""
    ingest_embeddings(context, config)
    ingest_interactions(context, config)
    ingest_features(context, config)
    return context.dataset


@stage(EmbeddingsManifest)
def ingest_embeddings(context: StageContext, config: InputConfig) -> tuple[EmbeddingsManifest | None, str]:
    """Write the pretrained vectors as one memory-mapped matrix per table."""
    if not config.embeddings:
        return None, "no pretrained embeddings"
    manifest = embeddings_core.ingest_embeddings(
        config.embeddings, folder=context.folder(EmbeddingsManifest), allowed_data_root=config.allowed_data_root
    )
    tables = manifest.tables.items()
    return manifest, "; ".join(f"{table_name}: {table.rows:,} x {table.dim} vectors" for table_name, table in tables)


@stage(InteractionsManifest)
def ingest_interactions(context: StageContext, config: InputConfig) -> tuple[InteractionsManifest, str]:
    """Write the vocabularies, the split and the event store."""
    manifest = interactions_core.ingest_interactions(
        config.interactions,
        embeddings=context.results.get(EmbeddingsManifest),
        folder=context.folder(InteractionsManifest),
        previous=context.previous(InteractionsManifest),
        allowed_data_root=config.allowed_data_root,
    )
    num_events = manifest.train_events + manifest.validation_events + manifest.test_events
    read_files_text = f"{manifest.files_read} of {len(manifest.sources)} files read"
    return manifest, f"{num_events:,} events, {manifest.num_users:,} users, {manifest.num_items:,} items, {read_files_text}"


@stage(FeaturesManifest)
def ingest_features(context: StageContext, config: InputConfig) -> tuple[FeaturesManifest | None, str]:
    """Write the features of users, items and events; continue the vocabularies of the previous run."""
    if config.features is None:
        return None, "no features"
    dataset = context.dataset
    manifest = features_core.ingest_features(
        config.features,
        dataset=dataset,
        previous=context.previous(FeaturesManifest),
        memory_limit=config.interactions.memory_limit,
        threads=config.interactions.threads,
        folder=context.folder(FeaturesManifest),
        allowed_data_root=config.allowed_data_root,
    )
    num_rows = sum(feature.rows for feature in manifest.features.values())
    return manifest, f"{len(manifest.features)} features, {num_rows:,} rows in their tables"


@stage(DataReportManifest)
def check_data(context: StageContext, config: DataReportConfig, *, split: Split) -> tuple[DataReportManifest, str]:
    """Write the data report; raise DataRejectedError if the data violates a limit of the config."""
    with fast_imports():
        from recsys_core.data_report.page import to_markdown
        from recsys_core.data_report.report import report_data
        from tasks.registry.tracking import log_data_report_or_warn

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
        show_link(context, "mlflow-run", mlflow_address, link_text="MLflow run")
    for warning in manifest.warnings:
        LOG.warning("data: %s", warning)
    if manifest.breaches:
        violations = "\n".join(f"- {breach}" for breach in manifest.breaches)
        raise DataRejectedError(
            f"the data violates {len(manifest.breaches)} of the limits in data_report:\n{violations}\nsee {page_path}; "
            f"fix the data, or relax the limit and rerun with --resume {context.run.run_id}"
        )
    users_text = describe_held_out_users(manifest.metrics)
    return manifest, f"{users_text}, no limit is violated, reference run: {manifest.compared_with or 'none'}"


def _reference_run(context: StageContext) -> "PreviousRun | None":
    """Return the newest earlier run without violated limits. A comparison with bad data would accept similar bad data."""
    from recsys_core.data_report.report import PreviousRun

    workspace = Workspace(context.run.workspace)
    report = workspace.newest_manifest(DataReportManifest, before=context.run, where=lambda manifest: not manifest.breaches)
    if report is None:
        return None
    run = workspace.run(report.folder.parent.name)
    interactions = load_manifest(run.stage_folder(InteractionsManifest), InteractionsManifest)
    return None if interactions is None else PreviousRun(run.run_id, interactions, report.metrics)
