"""Stage `plan_sharding`."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.manifests import Dataset, FeaturesManifest, InteractionsManifest, PlanManifest
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.sharding import planner
from recsys_core.sharding.config import ShardingConfig
from recsys_core.sharding.lookup_stats import measure_lookups
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training.config import TrainingConfig
from tasks.reporting import begin, show_markdown
from tasks.run import Run


@task(name="plan_sharding", cache_policy=NO_CACHE)
def plan_sharding(
    config: ShardingConfig,
    *,
    model: ModelSpec,
    training: TrainingConfig,
    loss: LossConfig,
    interactions: InteractionsManifest,
    features: FeaturesManifest | None,
    run: Run,
) -> PlanManifest:
    """Cluster, tables and what the data ask of them -> plan.json and plan.html, shown as an artifact."""
    finish = begin("plan_sharding")
    lookup_stats = measure_lookups(
        model,
        batch_size=training.batch_size,
        loss=loss,
        dataset=Dataset(interactions, features=features),
    )
    manifest = planner.plan_sharding(
        config,
        model=model,
        batch_size=training.batch_size,
        optimizer=training.table_optimizer,
        lookup_stats=lookup_stats,
        folder=run.stage_folder("plan_sharding"),
    )
    plan = PlanFile.read(manifest.path("plan.json"))
    show_markdown("sharding-plan", plan.to_markdown())
    tables = ", ".join(f"{name} {table.sharding_type}" for name, table in plan.tables.items())
    finish(manifest, f"{plan.world_size} {plan.device} ranks: {tables}")
    return manifest
