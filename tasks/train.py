"""Stage `train`."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from recsys_core.evaluation.report import plot_loss
from recsys_core.launching.config import Launcher
from recsys_core.manifests import (
    Dataset,
    EmbeddingsManifest,
    FeaturesManifest,
    InteractionsManifest,
    PlanManifest,
    TrainManifest,
)
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.sharding.config import ShardingConfig
from recsys_core.training import train as train_core
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job_spec import Progress
from tasks.registry.champion import starting_champion
from tasks.registry.tracking import MetricRelay
from tasks.reporting import TrainingProgress, begin, show_image, training_facts
from tasks.run import Run


@task(name="train", cache_policy=NO_CACHE)
def train(
    config: TrainingConfig,
    *,
    model: ModelSpec,
    loss: LossConfig,
    interactions: InteractionsManifest,
    embeddings: EmbeddingsManifest | None,
    features: FeaturesManifest | None,
    plan: PlanManifest,
    sharding: ShardingConfig,
    model_name: str,
    launcher: Launcher,
    run: Run,
) -> TrainManifest:
    """torchrun, here or on many hosts -> checkpoint; its metrics go to MLflow, the terminal and a Prefect artifact at once."""
    finish, shown = begin("train"), TrainingProgress()
    champion = starting_champion(model_name, run=run) if config.warm_start is not None else None
    with MetricRelay(run) as relay:

        def on_progress(progress: Progress) -> None:
            relay.send(progress)
            shown.send(progress)

        manifest = train_core.train(
            config,
            model=model,
            loss=loss,
            dataset=Dataset(interactions, embeddings, features),
            plan=plan,
            sharding=sharding,
            folder=run.stage_folder("train"),
            on_progress=on_progress,
            champion=champion,
            launcher=launcher,
        )
    show_image("training-loss", plot_loss(manifest, path=run.folder / "loss.png"))
    finish(manifest, shown.finish(training_facts(manifest, config=config)))
    return manifest
