"""Stage `register`: the results and the package of a run in MLflow, the champion gate, and a page with the verdict."""

from collections.abc import Sequence

from recsys_core.data_report.limits import describe_held_out_users
from recsys_core.evaluation.config import FeatureSlice
from recsys_core.evaluation.report import MetricTable, metric_table, to_markdown
from recsys_core.manifests import (
    DataReportManifest,
    EvaluationManifest,
    PackageManifest,
    RegistrationManifest,
    StageFolder,
    TrainManifest,
)
from tasks.delivery.publishers import publishers_of
from tasks.gate.gate import run_champion_gate
from tasks.gate.report import write_report
from tasks.gate.smoke_test import ModelProcess
from tasks.progress.artifacts import show_markdown
from tasks.registry import tracking
from tasks.registry.config import RegistryConfig
from tasks.registry.metric_relay import log_training_metrics
from tasks.registry.mlflow_client import tracking_uri
from tasks.registry.registry import Registry
from tasks.registry.versions import get_or_create_version
from tasks.runs.context import StageContext
from tasks.stages.stage import stage


@stage(RegistrationManifest)
def register(
    context: StageContext, config: RegistryConfig, feature_slices: Sequence[FeatureSlice] = ()
) -> tuple[RegistrationManifest | None, str]:
    """Log the results of the run to MLflow, register the package as a model version, and compare the version with the champion.

    A dry run only logs the results, and returns no manifest.

    Args:
        feature_slices: slices by features, on which the version is compared with the champion too.
    """
    run, results, options = context.run, context.results, context.options
    if options.dry_run:
        registry = Registry.connect(run.workspace, config.model_name)
        mlflow_run_id = _open_mlflow_run(registry, context)
        _log_results(registry, context, mlflow_run_id, model_id=None)
        return None, "dry run: no version is registered"
    package, evaluation = results[PackageManifest], results[EvaluationManifest]
    inputs = [
        "register",
        config,
        tracking_uri(run.workspace),
        package,
        evaluation,
        results[TrainManifest],
        options.promote,
        *feature_slices,
    ]
    stage_folder = StageFolder(context.folder(RegistrationManifest), RegistrationManifest, inputs=inputs)
    manifest = stage_folder.manifest
    if manifest is None:
        manifest = _register_and_compare(stage_folder, context, config, feature_slices=feature_slices)
    page = verdict_page(manifest, evaluation=evaluation, data_report=results[DataReportManifest])
    show_markdown(context, "verdict", page)
    return manifest, f"{manifest.model_name} version {manifest.version} is {manifest.alias}: {manifest.reasons[0]}"


def _register_and_compare(
    stage_folder: StageFolder[RegistrationManifest],
    context: StageContext,
    config: RegistryConfig,
    *,
    feature_slices: Sequence[FeatureSlice],
) -> RegistrationManifest:
    """Register the package as a version, compare the version with the champion, and commit the stage."""
    run_reason, run_id = context.options.reason, context.run.run_id
    publishers = publishers_of(context.flow_run_id, context.pipeline, run_reason=run_reason, run_id=run_id)
    registry = Registry.connect(context.run.workspace, config.model_name, publishers=publishers)
    with stage_folder.writing() as new_folder, ModelProcess() as process:
        mlflow_run_id = _open_mlflow_run(registry, context)
        version = registry.call(
            get_or_create_version,
            context,
            model_name=config.model_name,
            client=registry.client,
            mlflow_run_id=mlflow_run_id,
        )
        assert version.source is not None  # get_or_create_version creates every version from a logged model
        _log_results(registry, context, mlflow_run_id, model_id=version.source.removeprefix("models:/"))
        registration_fields = run_champion_gate(
            version,
            config=config,
            context=context,
            registry=registry,
            process=process,
            folder=new_folder,
            feature_slices=feature_slices,
        )
        page_path = write_report(registration_fields, context, config=config, folder=new_folder)
        registry.call(registry.client.log_artifact, mlflow_run_id, str(page_path))
        return stage_folder.commit(**registration_fields)


def _open_mlflow_run(registry: Registry, context: StageContext) -> str:
    """Return the id of the MLflow run, which has the settings as params."""
    mlflow_run_id = registry.call(tracking.open_mlflow_run, registry.client, context)
    registry.call(tracking.log_params, registry.client, mlflow_run_id, config_file=context.run.config_file)
    return mlflow_run_id


def _log_results(registry: Registry, context: StageContext, mlflow_run_id: str, *, model_id: str | None) -> None:
    """Log the results of the run to its MLflow run, and the metrics also to its logged model."""
    metrics_file = context.results[TrainManifest].path("metrics.jsonl")
    registry.call(log_training_metrics, registry.client, mlflow_run_id, metrics_file=metrics_file)
    registry.call(tracking.log_results, registry.client, mlflow_run_id, context, model_id=model_id)
    registry.call(tracking.log_input_files, registry.client, mlflow_run_id, context)


def verdict_page(registration: RegistrationManifest, *, evaluation: EvaluationManifest, data_report: DataReportManifest) -> str:
    """Return the verdict in Markdown, with the metrics of the new version, the versions compared with it, and the baselines."""
    metrics_by_ranker: dict[str, dict[str, float]] = {}
    for metric_key, value in registration.metrics.items():
        ranker, _, metric_name = metric_key.partition("/")
        if ranker == "refit":  # a refit may have been trained on the test events
            continue
        ranker_title = ranker.replace("served", f"version {registration.version}").replace("_", " ")
        metrics_by_ranker.setdefault(ranker_title, {})[metric_name] = value
    metric_names = tuple(next(iter(metrics_by_ranker.values())))
    values_by_ranker = {
        ranker: tuple(metrics.get(metric_name) for metric_name in metric_names)
        for ranker, metrics in metrics_by_ranker.items()
        if metrics.keys() >= set(metric_names)  # leave out the entry `index`, which has only the recall of the index
    }
    paragraphs = [
        f"## {registration.model_name} version {registration.version} is {registration.alias}",
        *registration.reasons,
        f"Users of the split: {describe_held_out_users(data_report.metrics)}",
        f"All comparisons: `{registration.folder.parent / registration.pages['decision']}`",
        *([f"**Alarm:** {registration.alarm}"] if registration.alarm is not None else []),
        "### Served recommendations, for the users of the smoke test",
        to_markdown(MetricTable(columns=metric_names, rows=values_by_ranker)),
        "### Over the full catalogue",
        to_markdown(metric_table(evaluation.metrics)),
        f"MLflow run `{registration.mlflow_run_id}`",
    ]
    return "\n\n".join(paragraphs)
