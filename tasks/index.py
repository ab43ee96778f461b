"""Stage `build_index`."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.manifests import ExportManifest, IndexManifest
from recsys_core.retrieval import index as index_core
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.plot import plot_indexes
from tasks.reporting import begin, show_image
from tasks.run import Run


@task(name="build_index", cache_policy=NO_CACHE)
def build_index(config: IndexConfig, *, export: ExportManifest, run: Run) -> IndexManifest:
    """Item vectors -> FAISS indexes, measured against exact search."""
    finish = begin("build_index")
    manifest = index_core.build_indexes(config, export=export, folder=run.stage_folder("build_index"))
    show_image("indexes", plot_indexes(manifest.reports, served=manifest.served, path=run.folder / "indexes.png"))
    served = manifest.reports[manifest.served]
    finish(manifest, f"{manifest.served}: recall {served.recall:.4f} of exact search, {served.ms_per_query:.3f} ms per query")
    return manifest
