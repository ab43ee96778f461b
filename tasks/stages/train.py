"""Stage `train`."""

from typing import TYPE_CHECKING

from recsys_core.evaluation.report import plot_loss
from recsys_core.manifests import PlanManifest, TrainManifest
from recsys_core.training.job.job_spec import Progress
from tasks.progress.artifacts import TrainingProgress, show_image
from tasks.progress.reporting import training_summary
from tasks.runs.context import StageContext
from tasks.stages.stage import stage

if TYPE_CHECKING:
    from recsys_core.training.setup import TrainingSetup


@stage(TrainManifest)
def train(context: StageContext, setup: "TrainingSetup", *, model_name: str) -> tuple[TrainManifest, str]:
    """Train with torchrun on one or more hosts; send each line of metrics to MLflow, the terminal and a Prefect artifact."""
    from recsys_core.training import train as train_core
    from tasks.registry.tracking import MetricRelay
    from tasks.stages.starting_champion import starting_champion

    progress_artifact = TrainingProgress(context)
    champion = starting_champion(model_name, run=context.run) if setup.training.warm_start is not None else None
    with MetricRelay(context) as relay:

        def on_progress(progress: Progress) -> None:
            relay.send(progress)
            progress_artifact.send(progress)

        manifest = train_core.train(
            setup,
            dataset=context.dataset,
            plan=context.results[PlanManifest],
            folder=context.folder(TrainManifest),
            on_progress=on_progress,
            champion=champion,
        )
    show_image(context, "training-loss", plot_loss(manifest, path=context.run.folder / "loss.png"))
    return manifest, progress_artifact.finish(training_summary(manifest, config=setup.training))
