"""Stage `register`."""

from functools import partial
from typing import TYPE_CHECKING

from recsys_core.evaluation.report import MetricTable, metric_table, to_markdown
from recsys_core.manifests import (
    EvaluationManifest,
    PackageManifest,
    RegistrationManifest,
    StageFolder,
    TrainManifest,
    fingerprint_of,
)
from tasks.progress.artifacts import show_markdown
from tasks.registry.config import RegistryConfig
from tasks.runs.context import StageContext
from tasks.stages.stage import stage

if TYPE_CHECKING:
    from mlflow import MlflowClient


@stage(RegistrationManifest)
def register(context: StageContext, config: RegistryConfig) -> tuple[RegistrationManifest | None, str]:
    """Log the results of the run to MLflow, register the package as a model version, and compare the version with the champion.

    A dry run only logs the results. Its manifest is None.
    """
    from tasks.delivery.prefect_events import emit_alias_change
    from tasks.gate.gate import run_champion_gate
    from tasks.gate.smoke_test import start_processes
    from tasks.registry import tracking
    from tasks.registry.mlflow_client import call_with_retries, connect, tracking_uri
    from tasks.registry.releases import champion_of
    from tasks.registry.versions import get_or_create_version

    run, results, options = context.run, context.results, context.options
    uri, interactions = tracking_uri(run.workspace), context.dataset.interactions
    package, evaluation = results[PackageManifest], results[EvaluationManifest]
    retry = partial(call_with_retries, uri=uri)

    def log_run_results(client: "MlflowClient") -> str:
        mlflow_run_id: str = retry(lambda: tracking.open_run(client, context))
        retry(lambda: tracking.log_results(client, mlflow_run_id, context))
        retry(lambda: tracking.log_data(client, mlflow_run_id, context))
        return mlflow_run_id

    if options.dry_run:
        log_run_results(retry(lambda: connect(run.workspace)))
        return None, "dry run: no version is registered"
    fingerprint = fingerprint_of("register", config, uri, package, evaluation, results[TrainManifest], options.promote)
    register_stage = StageFolder(context.folder(RegistrationManifest), RegistrationManifest, fingerprint=fingerprint)
    manifest = register_stage.manifest
    if manifest is None:
        client = retry(lambda: connect(run.workspace))
        has_champion = retry(lambda: champion_of(client, config.model_name)) is not None
        with register_stage.writing() as new_folder, start_processes(1 + has_champion) as processes:
            mlflow_run_id = log_run_results(client)
            version = retry(
                lambda: get_or_create_version(
                    package,
                    config=config,
                    client=client,
                    mlflow_run_id=mlflow_run_id,
                    interactions=interactions,
                    run=run,
                )
            )
            registration_fields = run_champion_gate(
                version,
                config=config,
                context=context,
                client=client,
                processes=processes,
                folder=new_folder,
                on_alias_change=partial(
                    emit_alias_change,
                    flow_run_id=context.flow_run_id,
                    pipeline=context.pipeline,
                    run_reason=options.reason,
                    run_id=run.run_id,
                ),
            )
            manifest = register_stage.commit(**registration_fields)
    show_markdown(context, "verdict", verdict_page(manifest, evaluation=evaluation))
    return manifest, f"{manifest.model_name} version {manifest.version} is {manifest.alias}: {manifest.reasons[0]}"


def verdict_page(registration: RegistrationManifest, *, evaluation: EvaluationManifest) -> str:
    """Return the verdict in Markdown, with the metrics of the new version, the versions compared with it, and the baselines."""
    metrics_by_ranker: dict[str, dict[str, float]] = {}
    for metric_key, value in registration.metrics.items():
        ranker, _, metric_name = metric_key.partition("/")
        title = ranker.replace("served", f"version {registration.version}").replace("_", " ")
        metrics_by_ranker.setdefault(title, {})[metric_name] = value
    metric_names = tuple(next(iter(metrics_by_ranker.values())))
    values_by_ranker = {
        ranker: tuple(metrics.get(metric_name) for metric_name in metric_names) for ranker, metrics in metrics_by_ranker.items()
    }
    lines = [
        f"## {registration.model_name} version {registration.version} is {registration.alias}",
        *registration.reasons,
        *([f"**Alarm:** {registration.alarm}"] if registration.alarm is not None else []),
        "### Served recommendations, for the users of the smoke test",
        to_markdown(MetricTable(columns=metric_names, rows=values_by_ranker)),
        "### Over the full catalogue",
        to_markdown(metric_table(evaluation.metrics)),
        f"MLflow run `{registration.mlflow_run_id}`",
    ]
    return "\n\n".join(lines)
