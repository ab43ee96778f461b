"""Stage `export`."""

from recsys_core.launching.config import Launcher
from recsys_core.manifests import Dataset, ExportManifest, TrainManifest
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.training.config import TrainingConfig
from tasks.progress.reporting import StageLog
from tasks.runs.run import Run
from tasks.stages.stage import stage


@stage("export")
def export_vectors(
    config: TrainingConfig,
    *,
    model: ModelSpec,
    loss: LossConfig,
    dataset: Dataset,
    train_manifest: TrainManifest,
    launcher: Launcher,
    run: Run,
) -> ExportManifest:
    """Compute item vectors, query vectors and tables from the checkpoint."""
    stage_log = StageLog("export")
    from recsys_core.training.export import export as export_core

    manifest = export_core.export_vectors(
        config,
        model=model,
        loss=loss,
        dataset=dataset,
        train=train_manifest,
        folder=run.stage_folder("export"),
        launcher=launcher,
    )
    query_counts = ", ".join(f"{count:,} {split} queries" for split, count in manifest.num_queries.items())
    return stage_log.finish(manifest, f"{manifest.num_items:,} x {manifest.dim} item vectors, {query_counts}")
