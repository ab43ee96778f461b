"""Stage `train`: from the config and what was ingested to the checkpoint that is the night's model."""

import errno
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recsys_core.launching.config import Launcher, LocalLauncher
from recsys_core.manifests import (
    Dataset,
    PlanManifest,
    TrainManifest,
    fingerprint_of,
    produce,
)
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.sharding.config import ShardingConfig
from recsys_core.training.champion import Champion
from recsys_core.training.checkpoint import JOB_COPY, PLAN_COPY
from recsys_core.training.config import TrainingConfig, WarmStartConfig
from recsys_core.training.dense_parallel import require_layers
from recsys_core.training.disk_estimate import training_bytes
from recsys_core.training.job_spec import Progress, TrainJob, TrainResult
from recsys_core.training.leaked_events import leak
from recsys_core.training.loop import CHECKPOINTS_NAME, METRICS_NAME, PROFILE_NAME, RESULT_NAME
from recsys_core.training.retries import launch_until_done
from recsys_core.training.warm_start import prepare_warm_start

logger = logging.getLogger(__name__)
WARM_NAME = "warm"
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
"""What a file system without hard links answers (SMB, exFAT, some mounts of object stores), and one that is another disk."""


def train(
    config: TrainingConfig,
    *,
    model: ModelSpec,
    loss: LossConfig,
    dataset: Dataset,
    plan: PlanManifest,
    folder: Path,
    on_progress: Callable[[Progress], None],
    sharding: ShardingConfig | None = None,
    champion: Champion | None = None,
    launcher: Launcher = LocalLauncher(),  # noqa: B008  it is frozen
) -> TrainManifest:
    """Trains in `<folder>.work`, where an interrupted run finds its checkpoints again, and commits the best one.

    plan: what is executed. sharding: what it was made from; with it training can go on with fewer processes
    (config.min_processes).

    Calls on_progress with each line of metrics.jsonl as it appears. Raises InputError or LaunchError as `launch` does.

    champion: what to start from unless a full training is due (config.warm_start), or the champion was trained on events that
    are validation or test events now. Raises InputError where it does not fit.
    """
    require_layers(config.dense_parallel, spec=model)
    interactions, embeddings, features = dataset.interactions, dataset.embeddings, dataset.features
    lasting = config.result_settings()
    num_warm_starts = nights_since_full_training(config.warm_start, champion=champion)
    leaks = leak(interactions, champion=champion.interactions) if champion is not None and num_warm_starts else 0
    source = champion if num_warm_starts and not leaks else None
    fingerprint = fingerprint_of(
        "train", lasting, model, loss, interactions, embeddings, features, plan, source and source.export
    )
    work = folder.with_name(folder.name + ".work")

    def build(out: Path) -> dict[str, Any]:
        if _job_fingerprint(work) != fingerprint:
            shutil.rmtree(work, ignore_errors=True)  # checkpoints and metrics of other settings
        warm = None
        if source is not None:
            shutil.rmtree(work / WARM_NAME, ignore_errors=True)
            warm = prepare_warm_start(
                source,
                spec=model,
                dataset=dataset,
                optimizer=config.table_optimizer,
                folder=work / WARM_NAME,
            )
        elif champion is not None and leaks:
            logger.info(
                "full training: the champion (run %s) was trained on %s of tonight's %s validation and test events: the split "
                "has moved back, and a warm start would be measured on what it learned",
                champion.run_id,
                f"{leaks:,}",
                f"{interactions.validation_events + interactions.test_events:,}",
            )
        elif champion is not None and config.warm_start is not None:
            logger.info(
                "full training: night %d since the last one (training.warm_start.full_retrain_every is %d)",
                champion.train.num_warm_starts + 1,
                config.warm_start.full_retrain_every,
            )
        job = TrainJob(
            work=work,
            fingerprint=fingerprint,
            spec=model,
            loss=loss,
            training=config,
            interactions=interactions.folder,
            embeddings=embeddings.folder if embeddings else None,
            features=features.folder if features else None,
            plan=plan.path("plan.json"),
            warm=warm,
        )
        attempts, final_plan = launch_until_done(job, launcher=launcher, sharding=sharding, on_progress=on_progress)
        result = TrainResult.model_validate_json((work / RESULT_NAME).read_bytes())
        shutil.copytree(work / CHECKPOINTS_NAME / result.checkpoint, out / "checkpoint", copy_function=link_or_copy)
        shutil.copy(work / METRICS_NAME, out / METRICS_NAME)
        shutil.copy(final_plan, out / PLAN_COPY)
        if (work / PROFILE_NAME).is_dir():
            shutil.copytree(work / PROFILE_NAME, out / PROFILE_NAME)
        (out / "model.json").write_text(model.model_dump_json(indent=2))
        facts = {
            "attempts": attempts,
            "warm_from": source and source.run_id,
            "num_warm_starts": num_warm_starts if source else 0,
        }
        return result.model_dump(exclude={"checkpoint"}) | facts

    steps = interactions.train_events // (config.batch_size * plan.world_size)
    needs_bytes = training_bytes(config, model=model, work=work, steps_per_epoch=steps)
    manifest = produce(folder, TrainManifest, fingerprint=fingerprint, build=build, needs_bytes=needs_bytes)
    shutil.rmtree(work, ignore_errors=True)
    return manifest


def nights_since_full_training(config: WarmStartConfig | None, *, champion: Champion | None) -> int:
    """What TrainManifest.num_warm_starts will be: one more than the champion's; 0 where tonight's training is a full one."""
    if config is None or champion is None:
        return 0
    nights = champion.train.num_warm_starts + 1
    return nights if nights < config.full_retrain_every else 0


def _job_fingerprint(work: Path) -> str | None:
    """Which training the files in `work` belong to."""
    job_file = work / JOB_COPY
    return TrainJob.model_validate_json(job_file.read_bytes()).fingerprint if job_file.is_file() else None


def link_or_copy(source: str, target: str) -> None:
    """A checkpoint is never written again, so its files are shared rather than copied, where the disk can do so."""
    try:
        Path(target).hardlink_to(source)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(source, target)
