"""Stage `export`."""

from typing import TYPE_CHECKING

from recsys_core.manifests import ExportManifest, TrainManifest
from tasks.runs.context import StageContext
from tasks.stages.stage import stage

if TYPE_CHECKING:
    from recsys_core.training.setup import TrainingSetup


@stage(ExportManifest)
def export_vectors(context: StageContext, setup: "TrainingSetup") -> tuple[ExportManifest, str]:
    """Compute item vectors, query vectors and tables from the checkpoint."""
    from recsys_core.training.export import export as export_core

    manifest = export_core.export_vectors(
        setup,
        dataset=context.dataset,
        train=context.results[TrainManifest],
        folder=context.folder(ExportManifest),
    )
    query_counts = ", ".join(f"{count:,} {split} queries" for split, count in manifest.num_queries.items())
    return manifest, f"{manifest.num_items:,} x {manifest.dim} item vectors, {query_counts}"
