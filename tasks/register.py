"""Stage `register`: a version in the registry, tried as it will be served, and champion only if it is not worse."""

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
from tasks import tracking
from tasks.config import RegistryConfig
from tasks.gate import pass_gate
from tasks.registry import version_for
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
    finish = begin("register")

    def build(folder: Path) -> dict[str, Any]:
        client = tracking.connect(run.workspace)
        mlflow_run_id = tracking.open_run(client, run)
        tracking.log_results(client, mlflow_run_id, run=run, plan=plan, train=train, evaluation=evaluation, index=index)
        tracking.log_data(client, mlflow_run_id, stages=(embeddings, interactions), report=data_report)
        version = version_for(
            package, config=config, client=client, mlflow_run_id=mlflow_run_id, interactions=interactions, run=run
        )
        return pass_gate(version, config=config, client=client, interactions=interactions, folder=folder)

    fingerprint = fingerprint_of("registration", config, tracking.tracking_uri(run.workspace), package, evaluation, train)
    manifest = produce(run.stage_folder("register"), RegistrationManifest, fingerprint=fingerprint, build=build)
    finish(manifest, f"{manifest.model_name} version {manifest.version} is {manifest.alias}: {manifest.reasons[0]}")
    return manifest
