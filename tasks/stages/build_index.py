"""Stage `build_index`."""

from recsys_core.manifests import ExportManifest, IndexManifest
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.plot import plot_indexes, to_markdown
from tasks.progress.artifacts import show_image, show_markdown
from tasks.runs.context import StageContext
from tasks.stages.stage import stage


@stage(IndexManifest)
def build_index(context: StageContext, config: IndexConfig) -> tuple[IndexManifest, str]:
    """Build the FAISS indexes of the item vectors and measure them against exact search."""
    from recsys_core.retrieval import index as index_core

    manifest = index_core.build_indexes(config, export=context.results[ExportManifest], folder=context.folder(IndexManifest))
    served_kind = manifest.served_index
    show_markdown(context, "index", to_markdown(manifest.reports, served_kind=served_kind))
    plot_path = plot_indexes(manifest.reports, served_kind=served_kind, path=context.run.folder / "indexes.png")
    show_image(context, "indexes", plot_path)
    report = manifest.reports[served_kind]
    return manifest, f"{served_kind}: recall {report.recall:.4f} of exact search, {report.ms_per_query:.3f} ms per query"
