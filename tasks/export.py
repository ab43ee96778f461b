"""Stage `export`."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.launching.config import Launcher
from recsys_core.manifests import Dataset, ExportManifest, FeaturesManifest, InteractionsManifest, TrainManifest
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.training import export as export_core
from recsys_core.training.config import TrainingConfig
from tasks.reporting import begin
from tasks.run import Run


@task(name="export", cache_policy=NO_CACHE)
def export_vectors(
    config: TrainingConfig,
    *,
    model: ModelSpec,
    loss: LossConfig,
    interactions: InteractionsManifest,
    features: FeaturesManifest | None,
    train: TrainManifest,
    launcher: Launcher,
    run: Run,
) -> ExportManifest:
    """Checkpoint -> item vectors, query vectors, tables."""
    finish = begin("export")
    manifest = export_core.export_vectors(
        config,
        model=model,
        loss=loss,
        dataset=Dataset(interactions, features=features),
        train=train,
        folder=run.stage_folder("export"),
        launcher=launcher,
    )
    queries = ", ".join(f"{count:,} {split} queries" for split, count in manifest.queries.items())
    finish(manifest, f"{manifest.items:,} x {manifest.dim} item vectors, {queries}")
    return manifest
