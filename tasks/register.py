"""Stage `register`: a version in the registry, tried as it will be served, and champion only if it is not worse."""

from functools import partial
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.manifests import (
    DataReportManifest,
    EmbeddingsManifest,
    EvaluationManifest,
    IndexManifest,
    InteractionsManifest,
    PackageManifest,
    PlanManifest,
    RegistrationManifest,
    TrainManifest,
    fingerprint_of,
    produce,
)
from tasks.registry import tracking
from tasks.registry.config import RegistryConfig
from tasks.registry.gate import pass_gate
from tasks.registry.mlflow_client import call_with_retries, connect, tracking_uri
from tasks.registry.versions import version_for
from tasks.reporting import begin
from tasks.run import Run


@task(name="register", cache_policy=NO_CACHE)
def register(
    config: RegistryConfig,
    *,
    embeddings: EmbeddingsManifest | None,
    interactions: InteractionsManifest,
    data_report: DataReportManifest,
    plan: PlanManifest,
    train: TrainManifest,
    evaluation: EvaluationManifest,
    index: IndexManifest,
    package: PackageManifest,
    run: Run,
) -> RegistrationManifest:
    """Package -> registered version with an alias, and all that is known of the run in MLflow."""
    finish, mlflow = begin("register"), partial(call_with_retries, uri=tracking_uri(run.workspace))

    def build(folder: Path) -> dict[str, Any]:
        client = mlflow(lambda: connect(run.workspace))
        run_id = mlflow(lambda: tracking.open_run(client, run))
        results = partial(tracking.log_results, run=run, plan=plan, train=train, evaluation=evaluation, index=index)
        mlflow(lambda: results(client, run_id))
        mlflow(lambda: tracking.log_data(client, run_id, stages=(embeddings, interactions), report=data_report))
        make = partial(version_for, package, config=config, client=client, interactions=interactions, run=run)
        version = mlflow(lambda: make(mlflow_run_id=run_id))
        return pass_gate(version, config=config, client=client, interactions=interactions, evaluation=evaluation, folder=folder)

    fingerprint = fingerprint_of("registration", config, tracking_uri(run.workspace), package, evaluation, train)
    manifest = produce(run.stage_folder("register"), RegistrationManifest, fingerprint=fingerprint, build=build)
    finish(manifest, f"{manifest.model_name} version {manifest.version} is {manifest.alias}: {manifest.reasons[0]}")
    return manifest
