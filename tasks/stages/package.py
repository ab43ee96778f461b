"""Stage `package`."""

from recsys_core.manifests import Dataset, EvaluationManifest, ExportManifest, IndexManifest, PackageManifest
from recsys_core.serving.config import PackageConfig
from recsys_core.units import MIB
from tasks.progress.reporting import StageLog
from tasks.runs.run import Run
from tasks.stages.stage import stage


@stage("package")
def build_package(
    config: PackageConfig,
    *,
    export: ExportManifest,
    index: IndexManifest,
    dataset: Dataset,
    evaluation: EvaluationManifest,
    run: Run,
) -> PackageManifest:
    """Write the query tower, the served index and the ids into one folder that can be served."""
    stage_log = StageLog("package")
    from recsys_core.serving import package as package_core

    manifest = package_core.build_package(
        config,
        export=export,
        index=index,
        dataset=dataset,
        evaluation=evaluation,
        folder=run.stage_folder("package"),
    )
    return stage_log.finish(
        manifest, f"{manifest.quantization} tower, {manifest.served_index} index, {manifest.bytes / MIB:,.1f} MiB"
    )
