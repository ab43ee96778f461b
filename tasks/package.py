"""Stage `package`."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.manifests import (
    Dataset,
    EvaluationManifest,
    ExportManifest,
    FeaturesManifest,
    IndexManifest,
    InteractionsManifest,
    PackageManifest,
)
from recsys_core.serving import package as package_core
from recsys_core.serving.config import PackageConfig
from recsys_core.units import MIB
from tasks.reporting import begin
from tasks.run import Run


@task(name="package", cache_policy=NO_CACHE)
def build_package(
    config: PackageConfig,
    *,
    export: ExportManifest,
    index: IndexManifest,
    interactions: InteractionsManifest,
    features: FeaturesManifest | None,
    evaluation: EvaluationManifest,
    run: Run,
) -> PackageManifest:
    """Query tower, index and ids -> one folder that serves."""
    finish = begin("package")
    manifest = package_core.build_package(
        config,
        export=export,
        index=index,
        dataset=Dataset(interactions, features=features),
        evaluation=evaluation,
        folder=run.stage_folder("package"),
    )
    finish(manifest, f"{manifest.quantization} tower, {manifest.served_index} index, {manifest.bytes / MIB:,.1f} MiB")
    return manifest
