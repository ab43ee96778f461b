"""Stage `plan_sharding`."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.manifests import PlanManifest
from recsys_core.models.config import ModelSpec
from recsys_core.sharding import planner
from recsys_core.sharding.config import ShardingConfig
from recsys_core.sharding.plan_file import PlanFile
from tasks.reporting import begin, show_markdown
from tasks.run import Run


@task(name="plan_sharding", cache_policy=NO_CACHE)
def plan_sharding(config: ShardingConfig, *, model: ModelSpec, batch_size: int, run: Run) -> PlanManifest:
    """Cluster and tables -> plan.json, shown as an artifact."""
    finish = begin("plan_sharding")
    manifest = planner.plan_sharding(config, model=model, batch_size=batch_size, folder=run.stage_folder("plan_sharding"))
    plan = PlanFile.read(manifest.path("plan.json"))
    show_markdown("sharding-plan", plan.to_markdown())
    tables = ", ".join(f"{name} {table.sharding_type}" for name, table in plan.tables.items())
    finish(manifest, f"{plan.world_size} {plan.device} ranks: {tables}")
    return manifest
