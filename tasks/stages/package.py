"""Stage `package`."""

from recsys_core.manifests import EvaluationManifest, ExportManifest, IndexManifest, PackageManifest
from recsys_core.serving.config import PackageConfig
from recsys_core.units import MIB
from tasks.runs.context import StageContext
from tasks.stages.stage import stage


@stage(PackageManifest)
def build_package(context: StageContext, config: PackageConfig) -> tuple[PackageManifest, str]:
    """Write the query tower, the served index and the ids into one folder that can be served."""
    from recsys_core.serving import package as package_core

    manifest = package_core.build_package(
        config,
        export=context.results[ExportManifest],
        index=context.results[IndexManifest],
        dataset=context.dataset,
        evaluation=context.results[EvaluationManifest],
        folder=context.folder(PackageManifest),
    )
    return manifest, f"{manifest.quantization} tower, {manifest.served_index} index, {manifest.bytes / MIB:,.1f} MiB"
