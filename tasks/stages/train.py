"""Stage `train`."""

from recsys_core.evaluation.report import plot_loss
from recsys_core.launching.config import Launcher
from recsys_core.manifests import Dataset, PlanManifest, TrainManifest
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.sharding.config import ShardingConfig
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job.job_spec import Progress
from tasks.progress.artifacts import TrainingProgress, show_image
from tasks.progress.reporting import StageLog, training_summary
from tasks.runs.run import Run
from tasks.stages.stage import stage


@stage("train")
def train(
    config: TrainingConfig,
    *,
    model: ModelSpec,
    loss: LossConfig,
    dataset: Dataset,
    plan: PlanManifest,
    sharding: ShardingConfig,
    launcher: Launcher,
    model_name: str,
    run: Run,
) -> TrainManifest:
    """Train with torchrun on one or more hosts; send each line of metrics to MLflow, the terminal and a Prefect artifact."""
    stage_log = StageLog("train")
    from recsys_core.training import train as train_core
    from tasks.registry.tracking import MetricRelay
    from tasks.stages.starting_champion import starting_champion

    progress_artifact = TrainingProgress(run)
    champion = starting_champion(model_name, run=run) if config.warm_start is not None else None
    with MetricRelay(run) as relay:

        def on_progress(progress: Progress) -> None:
            relay.send(progress)
            progress_artifact.send(progress)

        manifest = train_core.train(
            config,
            model=model,
            loss=loss,
            dataset=dataset,
            plan=plan,
            sharding=sharding,
            folder=run.stage_folder("train"),
            on_progress=on_progress,
            champion=champion,
            launcher=launcher,
        )
    show_image(run, "training-loss", plot_loss(manifest, path=run.folder / "loss.png"))
    return stage_log.finish(manifest, progress_artifact.finish(training_summary(manifest, config=config)))
