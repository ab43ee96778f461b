"""Stage `register`."""

from functools import partial
from typing import TYPE_CHECKING

from recsys_core.evaluation.report import MetricTable, metric_table, to_markdown
from recsys_core.manifests import (
    DataReportManifest,
    Dataset,
    EvaluationManifest,
    IndexManifest,
    PackageManifest,
    PlanManifest,
    RegistrationManifest,
    StageFolder,
    TrainManifest,
    fingerprint_of,
)
from tasks.artifacts import show_markdown
from tasks.registry.config import RegistryConfig
from tasks.reporting import StageLog
from tasks.run import Run
from tasks.stage import stage

if TYPE_CHECKING:
    from mlflow import MlflowClient


@stage("register")
def register(
    config: RegistryConfig,
    *,
    package: PackageManifest,
    evaluation: EvaluationManifest,
    index: IndexManifest,
    train_manifest: TrainManifest,
    plan: PlanManifest,
    report: DataReportManifest,
    dataset: Dataset,
    run: Run,
) -> RegistrationManifest | None:
    """Log the results of the run to MLflow, register the package as a model version, and compare the version with the champion.

    A dry run only logs the results. Its manifest is None.
    """
    stage_log = StageLog("register")
    from tasks.events import emit_alias_change
    from tasks.registry import tracking
    from tasks.registry.gate import pass_gate
    from tasks.registry.mlflow_client import call_with_retries, connect, tracking_uri
    from tasks.registry.versions import version_for

    uri, interactions = tracking_uri(run.workspace), dataset.interactions
    retry = partial(call_with_retries, uri=uri)

    def log_run() -> "tuple[MlflowClient, str]":
        client = retry(lambda: connect(run.workspace))
        mlflow_run_id = retry(lambda: tracking.open_run(client, run))
        log_results = partial(
            tracking.log_results, run=run, plan=plan, train=train_manifest, evaluation=evaluation, index=index
        )
        retry(lambda: log_results(client, mlflow_run_id))
        manifests = (dataset.embeddings, interactions)
        retry(lambda: tracking.log_data(client, mlflow_run_id, manifests=manifests, report=report))
        return client, mlflow_run_id

    if run.options.dry_run:
        log_run()
        return stage_log.finish(None, "dry run: no version is registered")
    fingerprint = fingerprint_of("registration", config, uri, package, evaluation, train_manifest, run.options.promote)
    registration = StageFolder(run.stage_folder("register"), RegistrationManifest, fingerprint=fingerprint)
    manifest = registration.manifest
    if manifest is None:
        with registration.writing() as new_folder:
            client, mlflow_run_id = log_run()
            create_version = partial(version_for, package, config=config, client=client, interactions=interactions, run=run)
            version = retry(lambda: create_version(mlflow_run_id=mlflow_run_id))
            verdict = pass_gate(
                version,
                config=config,
                options=run.options,
                client=client,
                interactions=interactions,
                evaluation=evaluation,
                folder=new_folder,
                on_alias_change=partial(
                    emit_alias_change,
                    flow_run_id=run.flow_run_id,
                    pipeline=run.pipeline,
                    run_reason=run.options.reason,
                    run_id=run.run_id,
                ),
            )
            manifest = registration.commit(**verdict)
    show_markdown(run, "verdict", verdict_page(manifest, evaluation=evaluation))
    return stage_log.finish(
        manifest, f"{manifest.model_name} version {manifest.version} is {manifest.alias}: {manifest.reasons[0]}"
    )


def verdict_page(registration: RegistrationManifest, *, evaluation: EvaluationManifest) -> str:
    """Return the verdict in Markdown, with the metrics of the new version, the versions compared with it, and the baselines."""
    metrics_by_ranker: dict[str, dict[str, float]] = {}
    for name, value in registration.metrics.items():
        ranker, _, metric = name.partition("/")
        title = ranker.replace("served", f"version {registration.version}").replace("_", " ")
        metrics_by_ranker.setdefault(title, {})[metric] = value
    columns = tuple(next(iter(metrics_by_ranker.values())))
    rows = {ranker: tuple(values.get(column) for column in columns) for ranker, values in metrics_by_ranker.items()}
    lines = [
        f"## {registration.model_name} version {registration.version} is {registration.alias}",
        *registration.reasons,
        *([f"**Alarm:** {registration.alarm}"] if registration.alarm is not None else []),
        "### Served recommendations, for the users of the smoke test",
        to_markdown(MetricTable(columns=columns, rows=rows)),
        "### Over the full catalogue",
        to_markdown(metric_table(evaluation.metrics)),
        f"MLflow run `{registration.mlflow_run_id}`",
    ]
    return "\n\n".join(lines)
