"""Stage `build_index`."""

from recsys_core.manifests import ExportManifest, IndexManifest
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.plot import plot_indexes, to_markdown
from tasks.progress.artifacts import show_image, show_markdown
from tasks.progress.reporting import StageLog
from tasks.runs.run import Run
from tasks.stages.stage import stage


@stage("build_index")
def build_index(config: IndexConfig, *, export: ExportManifest, run: Run) -> IndexManifest:
    """Build the FAISS indexes of the item vectors and measure them against exact search."""
    stage_log = StageLog("build_index")
    from recsys_core.retrieval import index as index_core

    manifest = index_core.build_indexes(config, export=export, folder=run.stage_folder("build_index"))
    show_markdown(run, "index", to_markdown(manifest.reports, served_kind=manifest.served_index))
    show_image(
        run, "indexes", plot_indexes(manifest.reports, served_kind=manifest.served_index, path=run.folder / "indexes.png")
    )
    report = manifest.reports[manifest.served_index]
    return stage_log.finish(
        manifest, f"{manifest.served_index}: recall {report.recall:.4f} of exact search, {report.ms_per_query:.3f} ms per query"
    )
