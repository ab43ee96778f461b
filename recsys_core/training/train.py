"""Stage `train`: launches torchrun, relays its metrics, relaunches from the last checkpoint when an attempt fails."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recsys_core.errors import LaunchError
from recsys_core.manifests import (
    EmbeddingsManifest,
    FeaturesManifest,
    InteractionsManifest,
    PlanManifest,
    TrainManifest,
    fingerprint_of,
    produce,
)
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training.champion import Champion
from recsys_core.training.config import TrainingConfig, WarmStartConfig
from recsys_core.training.job import Progress, TrainJob, TrainResult
from recsys_core.training.launch import launch
from recsys_core.training.launcher_config import Launcher, LocalLauncher
from recsys_core.training.loop import CHECKPOINTS_NAME, METRICS_NAME, RESULT_NAME
from recsys_core.training.warm import prepare_warm_start

logger = logging.getLogger(__name__)
JOB_NAME = "job.json"
WARM_NAME = "warm"
OPERATIONAL = {"attempts", "start_timeout_s", "silence_timeout_s", "keep_checkpoints", "warm_start"}
"""Settings that do not change what is trained: a resumed run may change them and keep its checkpoints. Of warm_start the
fingerprint holds what it leads to: the champion or none."""


def train(
    config: TrainingConfig,
    *,
    model: ModelSpec,
    loss: LossConfig,
    interactions: InteractionsManifest,
    embeddings: EmbeddingsManifest | None,
    features: FeaturesManifest | None,
    plan: PlanManifest,
    folder: Path,
    on_progress: Callable[[Progress], None],
    champion: Champion | None = None,
    launcher: Launcher = LocalLauncher(),  # noqa: B008  it is frozen
) -> TrainManifest:
    """Trains in `<folder>.work`, where an interrupted run finds its checkpoints again, and commits the best one.

    Calls on_progress with each line of metrics.jsonl as it appears. Raises InputError or LaunchError as `launch` does.

    champion: what to start from unless a full training is due (config.warm_start). Raises InputError where it does not fit.
    """
    lasting = config.model_dump(exclude=OPERATIONAL)
    warm_nights = nights_since_full_training(config.warm_start, champion=champion)
    source = champion if warm_nights else None
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
                interactions=interactions,
                embeddings=embeddings,
                features=features,
                optimizer=config.table_optimizer,
                folder=work / WARM_NAME,
            )
        elif champion is not None and config.warm_start is not None:
            logger.info(
                "full training: night %d since the last one (training.warm_start.full_retrain_every is %d)",
                champion.train.warm_nights + 1,
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
        attempts = _launch_until_done(job, launcher=launcher, on_progress=on_progress)
        result = TrainResult.model_validate_json((work / RESULT_NAME).read_bytes())
        shutil.copytree(work / CHECKPOINTS_NAME / result.checkpoint, out / "checkpoint", copy_function=_link)
        shutil.copy(work / METRICS_NAME, out / METRICS_NAME)
        (out / "model.json").write_text(model.model_dump_json(indent=2))
        facts = {"attempts": attempts, "warm_from": source and source.run_id, "warm_nights": warm_nights}
        return result.model_dump(exclude={"checkpoint"}) | facts

    manifest = produce(folder, TrainManifest, fingerprint=fingerprint, build=build)
    shutil.rmtree(work, ignore_errors=True)
    return manifest


def nights_since_full_training(config: WarmStartConfig | None, *, champion: Champion | None) -> int:
    """What TrainManifest.warm_nights will be: one more than the champion's; 0 where tonight's training is a full one."""
    if config is None or champion is None:
        return 0
    nights = champion.train.warm_nights + 1
    return nights if nights < config.full_retrain_every else 0


def _job_fingerprint(work: Path) -> str | None:
    """Which training the files in `work` belong to."""
    job_file = work / JOB_NAME
    return TrainJob.model_validate_json(job_file.read_bytes()).fingerprint if job_file.is_file() else None


def _link(source: str, target: str) -> None:
    """A checkpoint is never written again, so its files are shared rather than copied."""
    Path(target).hardlink_to(source)


def _launch_until_done(job: TrainJob, *, launcher: Launcher, on_progress: Callable[[Progress], None]) -> int:
    """Launches until an attempt succeeds; returns the number of attempts."""
    work, config = job.work, job.training
    work.mkdir(parents=True, exist_ok=True)
    job_file = work / JOB_NAME
    job_file.write_text(job.model_dump_json(indent=2))
    shutil.rmtree(work / "logs", ignore_errors=True)
    (work / RESULT_NAME).unlink(missing_ok=True)
    tail = _MetricsTail(work / METRICS_NAME, on_progress)
    for attempt in range(1, config.attempts + 1):
        try:
            launch(
                job_file,
                plan=PlanFile.read(job.plan),
                logs=work / "logs" / f"attempt-{attempt}",
                start_timeout_s=config.start_timeout_s,
                silence_timeout_s=config.silence_timeout_s,
                alive=work / METRICS_NAME,
                poll=tail.relay,
                launcher=launcher,
            )
            return attempt
        except LaunchError as error:
            if attempt == config.attempts:
                raise
            logger.warning("training attempt %d of %d failed: %s", attempt, config.attempts, error)
    raise AssertionError("unreachable: attempts is at least 1")


class _MetricsTail:
    """Follows metrics.jsonl; a step that a later attempt repeats is relayed once."""

    def __init__(self, path: Path, on_progress: Callable[[Progress], None]) -> None:
        self._path, self._on_progress = path, on_progress
        self._inode = self._offset = self._last_step = 0

    def relay(self) -> None:
        """Passes on the complete lines not passed on yet."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:  # a new attempt put a file in its place that ends at its checkpoint
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            progress = Progress.model_validate_json(line)
            if progress.step > self._last_step:
                self._last_step = progress.step
                self._on_progress(progress)
