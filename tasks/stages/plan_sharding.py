"""Stage `plan_sharding`."""

from typing import TYPE_CHECKING

from recsys_core.imports import fast_imports
from recsys_core.manifests import PlanManifest
from tasks.progress.artifacts import show_markdown
from tasks.runs.context import StageContext
from tasks.stages.stage import stage

if TYPE_CHECKING:
    from recsys_core.training.setup import TrainingSetup


@stage(PlanManifest)
def plan_sharding(context: StageContext, setup: "TrainingSetup") -> tuple[PlanManifest, str]:
    """Plan where the shards of each table go; write plan.json and plan.html."""
    with fast_imports():
        from recsys_core.sharding.plan_file import PlanFile

    manifest = setup.plan(context.dataset, folder=context.folder(PlanManifest))
    plan = PlanFile.read(manifest.path("plan.json"))
    show_markdown(context, "sharding-plan", plan.to_markdown())
    sharding_types = ", ".join(f"{table_name} {table.sharding_type}" for table_name, table in plan.tables.items())
    return manifest, f"{plan.world_size} {plan.device} ranks: {sharding_types}"
