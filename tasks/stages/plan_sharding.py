"""Stage `plan_sharding`."""

from recsys_core.imports import fast_imports
from recsys_core.manifests import Dataset, PlanManifest
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.sharding.config import ShardingConfig
from recsys_core.training.config import TrainingConfig
from tasks.progress.artifacts import show_markdown
from tasks.progress.reporting import StageLog
from tasks.runs.run import Run
from tasks.stages.stage import stage


@stage("plan_sharding")
def plan_sharding(
    config: ShardingConfig, *, model: ModelSpec, loss: LossConfig, training: TrainingConfig, dataset: Dataset, run: Run
) -> PlanManifest:
    """Plan where the shards of each table go; write plan.json and plan.html."""
    stage_log = StageLog("plan_sharding")
    with fast_imports():
        from recsys_core.sharding import planner
        from recsys_core.sharding.lookup_stats import measure_lookups
        from recsys_core.sharding.plan_file import PlanFile

    manifest = planner.plan_sharding(
        config,
        model=model,
        batch_size=training.batch_size,
        optimizer=training.table_optimizer,
        lookup_stats=measure_lookups(model, batch_size=training.batch_size, loss=loss, dataset=dataset),
        folder=run.stage_folder("plan_sharding"),
    )
    plan = PlanFile.read(manifest.path("plan.json"))
    show_markdown(run, "sharding-plan", plan.to_markdown())
    sharding_types = ", ".join(f"{table_name} {table.sharding_type}" for table_name, table in plan.tables.items())
    return stage_log.finish(manifest, f"{plan.world_size} {plan.device} ranks: {sharding_types}")
