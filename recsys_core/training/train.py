"""Stage `train`: train from scratch or from the champion, in launched ranks, and commit the best checkpoint."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from recsys_core.disk import link_or_copy
from recsys_core.manifests import (
    Dataset,
    InteractionsManifest,
    PlanManifest,
    StageFolder,
    TrainManifest,
    fingerprint_of,
    require_no_link,
)
from recsys_core.sharding.config import PLAN_NAME
from recsys_core.training.config import WarmStartConfig
from recsys_core.training.dense_parallel import require_shardable_layers
from recsys_core.training.job.attempts import run_attempts
from recsys_core.training.job.job_spec import (
    CHECKPOINTS_FOLDER,
    JOB_FILE,
    METRICS_FILE,
    PROFILE_FOLDER,
    RESULT_FILE,
    Progress,
    TrainJob,
    TrainResult,
)
from recsys_core.training.metrics_log import MetricsTail
from recsys_core.training.setup import TrainingSetup, training_bytes
from recsys_core.training.warm.leaked_events import count_leaked_events
from recsys_core.training.warm.starting_model import Champion
from recsys_core.training.warm.warm_start import prepare_warm_start

logger = logging.getLogger(__name__)


def train(
    setup: TrainingSetup,
    *,
    dataset: Dataset,
    plan: PlanManifest,
    folder: Path,
    on_progress: Callable[[Progress], None],
    champion: Champion | None = None,
) -> TrainManifest:
    """Train in `<folder>.work` and commit the best checkpoint to `folder`; an interrupted run resumes in the work folder.

    Args:
        plan: the sharding plan to train with. A retry with fewer ranks (training.min_processes) makes a new plan.
        on_progress: called with each new line of metrics.jsonl.
        champion: the training starts from this model, unless `choose_start` rejects it.

    Raises:
        InputError: the settings do not fit the data, or the champion is not compatible with the settings.
        StageError, LaunchError: the training failed; see `launch`.
    """
    config, model = setup.training, setup.model
    require_shardable_layers(config.dense_parallel, spec=model)
    interactions, embeddings, features = dataset.interactions, dataset.embeddings, dataset.features
    start_champion, full_training_reason = choose_start(config.warm_start, champion=champion, interactions=interactions)
    result_settings = config.result_settings()
    champion_export = start_champion and start_champion.export
    fingerprint = fingerprint_of(
        "train", result_settings, model, setup.loss, interactions, embeddings, features, plan, champion_export
    )
    work_folder = folder.with_name(folder.name + ".work")
    require_no_link(work_folder)
    stage = StageFolder(folder, TrainManifest, fingerprint=fingerprint)
    if stage.manifest is not None:
        shutil.rmtree(work_folder, ignore_errors=True)
        return stage.manifest
    steps_per_epoch = interactions.train_events // (config.batch_size * plan.world_size)
    checkpoint_bytes = training_bytes(config, spec=model, work_folder=work_folder, steps_per_epoch=steps_per_epoch)
    with stage.writing(min_bytes=checkpoint_bytes) as output_folder:
        if full_training_reason is not None:
            logger.info("full training: %s", full_training_reason)
        _remove_unrelated_work(work_folder, fingerprint=fingerprint)
        job = _prepare_job(
            setup, dataset=dataset, plan=plan, champion=start_champion, work=work_folder, fingerprint=fingerprint
        )
        poll = MetricsTail(work_folder / METRICS_FILE, on_progress).relay
        job = run_attempts(job, launcher=setup.launcher, sharding=setup.sharding, poll=poll)
        result = _copy_result(job, output_folder=output_folder)
        manifest = stage.commit(
            **result.model_dump(exclude={"checkpoint"}),
            attempts=job.attempt,
            warm_from=start_champion and start_champion.run_id,
            num_warm_starts=start_champion.train.num_warm_starts + 1 if start_champion else 0,
        )
    shutil.rmtree(work_folder, ignore_errors=True)
    return manifest


def choose_start(
    config: WarmStartConfig | None, *, champion: Champion | None, interactions: InteractionsManifest
) -> tuple[Champion | None, str | None]:
    """Decide whether a training starts from the champion.

    The champion is not used if a training from scratch is due, or if the champion was trained on events that are now held out.
    In the second case, validation and test would measure memorised events.

    Returns:
        (champion, None) if the training starts from the champion; (None, reason) if the champion must not be used; (None, None)
        without a champion, or if `config` is None.
    """
    if config is None or champion is None:
        return None, None
    num_runs_since_full = champion.train.num_warm_starts + 1
    if num_runs_since_full >= config.full_retrain_every:
        return None, (
            f"this is run {num_runs_since_full} since the last full training "
            f"(training.warm_start.full_retrain_every is {config.full_retrain_every})"
        )
    num_leaked_events = count_leaked_events(interactions, champion=champion.interactions)
    if num_leaked_events:
        num_held_out_events = interactions.validation_events + interactions.test_events
        return None, (
            f"the champion (run {champion.run_id}) was trained on {num_leaked_events:,} of the {num_held_out_events:,} "
            "validation and test events of this run, because the split has moved back in time or has changed"
        )
    return champion, None


def _remove_unrelated_work(work_folder: Path, *, fingerprint: str) -> None:
    """Remove the work folder, unless it belongs to an interrupted training with the same fingerprint."""
    job_path = work_folder / JOB_FILE
    if not job_path.is_file() or json.loads(job_path.read_bytes())["fingerprint"] != fingerprint:
        shutil.rmtree(work_folder, ignore_errors=True)


def _prepare_job(
    setup: TrainingSetup,
    *,
    dataset: Dataset,
    plan: PlanManifest,
    champion: Champion | None,
    work: Path,
    fingerprint: str,
) -> TrainJob:
    """Return the job of the first attempt, and write the champion's rows and layers for its ranks."""
    for earlier_folder in (work / "logs", work / "warm"):
        shutil.rmtree(earlier_folder, ignore_errors=True)
    (work / RESULT_FILE).unlink(missing_ok=True)
    # This comes before the creation of `work`, so that a rejected champion leaves no folder behind.
    warm = prepare_warm_start(champion, spec=setup.model, dataset=dataset, folder=work / "warm") if champion else None
    work.mkdir(parents=True, exist_ok=True)
    return TrainJob(
        work=work,
        fingerprint=fingerprint,
        spec=setup.model,
        loss=setup.loss,
        training=setup.training,
        interactions=dataset.interactions.folder,
        embeddings=dataset.embeddings.folder if dataset.embeddings else None,
        features=dataset.features.folder if dataset.features else None,
        plan=plan.path(PLAN_NAME),
        warm=warm,
    )


def _copy_result(job: TrainJob, *, output_folder: Path) -> TrainResult:
    """Copy checkpoint, metrics, plan, model and profile of the completed training to `output_folder`."""
    result = TrainResult.model_validate_json((job.work / RESULT_FILE).read_bytes())
    shutil.copytree(job.work / CHECKPOINTS_FOLDER / result.checkpoint, output_folder / "checkpoint", copy_function=link_or_copy)
    shutil.copy(job.work / METRICS_FILE, output_folder / METRICS_FILE)
    shutil.copy(job.plan, output_folder / PLAN_NAME)
    if (job.work / PROFILE_FOLDER).is_dir():
        shutil.copytree(job.work / PROFILE_FOLDER, output_folder / PROFILE_FOLDER)
    (output_folder / "model.json").write_text(job.spec.model_dump_json(indent=2))
    return result
