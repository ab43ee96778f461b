"""Stage `train`: attempts until one succeeds. Each attempt starts the ranks from the last verified checkpoint."""

import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from recsys_core.disk import link_or_copy, write_text
from recsys_core.errors import InputError, LaunchError
from recsys_core.launching.config import Launcher
from recsys_core.launching.heartbeat import HeartbeatFile
from recsys_core.launching.launch import launch
from recsys_core.launching.messages import RankLayout
from recsys_core.manifests import Dataset, PlanManifest, StageFolder, TrainManifest, require_no_link
from recsys_core.models.loss.catalogue import require_catalogue_fits
from recsys_core.models.tables.table_config import Schedule
from recsys_core.sharding.config import PLAN_NAME
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training.checkpoint import latest_checkpoint
from recsys_core.training.config import MAX_BATCH_SIZE
from recsys_core.training.job import (
    CHECKPOINTS_FOLDER,
    JOB_FILE,
    METRICS_FILE,
    PROFILE_FOLDER,
    RESULT_FILE,
    ExportJob,
    Progress,
    TrainJob,
    TrainResult,
)
from recsys_core.training.metrics_log import MetricsTail
from recsys_core.training.model.dense_parallel import require_shardable_layers
from recsys_core.training.setup import TrainingSetup
from recsys_core.training.temperature import TemperatureTrials
from recsys_core.training.warm.starting_model import Champion
from recsys_core.training.warm.warm_start import choose_start, prepare_warm_start

logger = logging.getLogger(__name__)
MAX_FAILURES_PER_WORLD_SIZE = 2


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
        plan: the sharding plan. An attempt with fewer ranks (training.min_processes) makes a new plan.
        on_progress: called with each new line of metrics.jsonl.
        champion: model from which the training starts, unless `choose_start` rejects it.

    Raises:
        InputError: the settings do not fit the data, or the champion is not compatible with the settings.
        StageError, LaunchError: the training failed; see `launch`.
    """
    config, model = setup.training, setup.model
    require_shardable_layers(config.dense_parallel, spec=model)
    if setup.loss.negatives == "all":
        _require_catalogue_fits(setup, dataset=dataset, world_size=plan.world_size)
    interactions = dataset.interactions
    start_champion, scratch_reason = choose_start(config.warm_start, champion=champion, interactions=interactions)
    champion_export = start_champion and start_champion.export
    inputs = [
        "train",
        config.result_settings(),
        model,
        setup.loss,
        interactions,
        dataset.embeddings,
        dataset.features,
        dataset.log_vectors,
        plan,
        champion_export,
    ]
    work_folder = folder.with_name(folder.name + ".work")
    require_no_link(work_folder)
    stage = StageFolder(folder, TrainManifest, inputs=inputs)
    if stage.manifest is not None:
        shutil.rmtree(work_folder, ignore_errors=True)
        return stage.manifest
    steps_per_epoch = math.ceil(interactions.num_train_events // plan.world_size / config.batch_size)
    checkpoint_bytes = setup.checkpoint_bytes(work_folder=work_folder, steps_per_epoch=steps_per_epoch)
    _warn_about_long_warmups(setup, max_steps=config.epochs * steps_per_epoch)
    with stage.writing(min_bytes=checkpoint_bytes) as output_folder:
        if scratch_reason is not None:
            logger.info("training from scratch: %s", scratch_reason)
        job = _prepare_job(
            setup, dataset=dataset, plan=plan, champion=start_champion, work_folder=work_folder, fingerprint=stage.fingerprint
        )
        trials = TemperatureTrials.run(
            job,
            champion=start_champion,
            num_validation_events=interactions.num_validation_events,
            train=lambda trial_job: run_attempts(trial_job, setup=setup, poll=lambda: None),
        )
        job = job.model_copy(update={"spec": model.with_choices(temperature=trials.temperature)})
        job = run_attempts(job, setup=setup, poll=MetricsTail(work_folder / METRICS_FILE, on_progress).relay)
        result = _copy_result(job, output_folder=output_folder)
        manifest = stage.commit(
            **result.model_dump(exclude={"checkpoint"}),
            num_attempts=job.attempt,
            temperature=trials.temperature,
            temperature_trials=trials.metric_by_temperature,
            warm_from=start_champion and start_champion.run_id,
            num_warm_starts=start_champion.train.num_warm_starts + 1 if start_champion else 0,
        )
    shutil.rmtree(work_folder, ignore_errors=True)
    return manifest


def _require_catalogue_fits(setup: TrainingSetup, *, dataset: Dataset, world_size: int) -> None:
    features = {} if dataset.features is None else dataset.features.features
    require_catalogue_fits(
        setup.model,
        limit_gb=setup.loss.catalogue_gb,
        world_size=world_size,
        num_values_by_list={name: feature.num_values for name, feature in features.items() if "list" in feature.kind},
    )


def _warn_about_long_warmups(setup: TrainingSetup, *, max_steps: int) -> None:
    """Log a warning for each optimizer whose warm-up ends after the last step."""
    model = setup.model
    trained_tables = {table_name: table for table_name, table in model.tables.items() if not table.is_frozen}
    schedule_by_setting: dict[str, Schedule] = {
        model.optimizer_setting(table_name): table.optimizer for table_name, table in trained_tables.items()
    }
    for setting, schedule in (schedule_by_setting | {"training.dense_optimizer": setup.training.dense_optimizer}).items():
        if schedule.warmup_steps >= max_steps:
            logger.warning(
                "%s.warmup_steps is %d, but the training has only %d steps, so the learning rate does not reach %g; lower "
                "warmup_steps, or raise training.epochs",
                setting,
                schedule.warmup_steps,
                max_steps,
                schedule.learning_rate,
            )


def _prepare_job(
    setup: TrainingSetup,
    *,
    dataset: Dataset,
    plan: PlanManifest,
    champion: Champion | None,
    work_folder: Path,
    fingerprint: str,
) -> TrainJob:
    """Prepare the work folder with the files of the warm start and the job file; return the job of the first attempt."""
    _clear_work_folder(work_folder, fingerprint=fingerprint)
    # The warm start is prepared before the work folder is created, so that a rejected champion leaves no folder behind.
    warm_start = None
    if champion is not None:
        warm_start = prepare_warm_start(champion, spec=setup.model, dataset=dataset, folder=work_folder / "warm")
    work_folder.mkdir(parents=True, exist_ok=True)
    embeddings, features, log_vectors = dataset.embeddings, dataset.features, dataset.log_vectors
    job = TrainJob(
        work_folder=work_folder,
        fingerprint=fingerprint,
        spec=setup.model,
        loss=setup.loss,
        training=setup.training,
        interactions_folder=dataset.interactions.folder,
        embeddings_folder=embeddings.folder if embeddings else None,
        features_folder=features.folder if features else None,
        log_vectors_folder=log_vectors.folder if log_vectors else None,
        plan_path=plan.path(PLAN_NAME),
        warm_start=warm_start,
    )
    # A resumed training keeps the trials only if the job file in the work folder has its fingerprint.
    write_text(work_folder / JOB_FILE, job.model_dump_json(indent=2))
    return job


def _clear_work_folder(work_folder: Path, *, fingerprint: str) -> None:
    """Remove the files of earlier attempts; keep the checkpoints and metrics of a training with the same fingerprint."""
    try:
        earlier_fingerprint = json.loads((work_folder / JOB_FILE).read_bytes())["fingerprint"]
    except (FileNotFoundError, ValueError):  # a power failure may cut off a file
        earlier_fingerprint = None
    if earlier_fingerprint != fingerprint:
        shutil.rmtree(work_folder, ignore_errors=True)
    shutil.rmtree(work_folder / "warm", ignore_errors=True)
    (work_folder / RESULT_FILE).unlink(missing_ok=True)


def _copy_result(job: TrainJob, *, output_folder: Path) -> TrainResult:
    """Copy checkpoint, metrics, plan, model and profile of the completed training to `output_folder`."""
    work_folder = job.work_folder
    result = TrainResult.model_validate_json((work_folder / RESULT_FILE).read_bytes())
    checkpoint_folder = work_folder / CHECKPOINTS_FOLDER / result.checkpoint
    shutil.copytree(checkpoint_folder, output_folder / "checkpoint", copy_function=link_or_copy)
    shutil.copy(work_folder / METRICS_FILE, output_folder / METRICS_FILE)
    shutil.copy(job.plan_path, output_folder / PLAN_NAME)
    if (work_folder / PROFILE_FOLDER).is_dir():
        shutil.copytree(work_folder / PROFILE_FOLDER, output_folder / PROFILE_FOLDER)
    (output_folder / "model.json").write_text(job.spec.model_dump_json(indent=2))
    return result


def run_attempts(job: TrainJob, *, setup: TrainingSetup, poll: Callable[[], None]) -> TrainJob:
    """Launch `job` until an attempt succeeds, at most job.training.max_attempts times; return the job of the last attempt.

    Each attempt resumes from the newest checkpoint. The next attempt uses fewer ranks after two failures in a row, or after one
    failure if this host now has too few GPUs. There are never fewer ranks than job.training.min_processes.

    Raises LaunchError if the last attempt failed. An InputError or StageError of any attempt is raised at once.
    """
    shutil.rmtree(job.work_folder / "logs", ignore_errors=True)  # a killed process leaves its logs
    num_failures = 0
    while True:
        checkpoint = latest_checkpoint(job.work_folder / CHECKPOINTS_FOLDER, fingerprint=job.fingerprint)
        job = job.model_copy(update={"resume_folder": None if checkpoint is None else checkpoint.folder})
        plan = PlanFile.read(job.plan_path)
        if job.attempt > 1 or checkpoint is not None:
            step = 0 if checkpoint is None else checkpoint.step
            logger.info("attempt %d: %d ranks, from step %d", job.attempt, plan.world_size, step)
        log_folder = job.work_folder / "logs" / f"attempt-{job.attempt}"
        try:
            launch_job(job, launcher=setup.launcher, log_folder=log_folder, poll=poll)
            return job
        except LaunchError as error:
            if job.attempt == job.training.max_attempts:
                raise
            logger.warning("training attempt %d of %d failed: %s", job.attempt, job.training.max_attempts, error)
        num_failures += 1
        max_ranks_per_host = _max_ranks_per_host(plan, launcher=setup.launcher)
        if num_failures >= MAX_FAILURES_PER_WORLD_SIZE or max_ranks_per_host < plan.processes_per_node:
            smaller_job = _with_fewer_ranks(job, setup=setup, plan=plan, max_ranks_per_host=max_ranks_per_host)
            if smaller_job is not None:
                job, num_failures = smaller_job, 0
        job = job.model_copy(update={"attempt": job.attempt + 1})


def launch_job(
    job: TrainJob | ExportJob, *, launcher: Launcher, log_folder: Path, poll: Callable[[], None] = lambda: None
) -> None:
    """Write the job file, and run the ranks of the job's plan; raise the errors of `launch`."""
    job_path, plan = job.work_folder / JOB_FILE, PlanFile.read(job.plan_path)
    write_text(job_path, job.model_dump_json(indent=2))
    launch(
        job_path,
        layout=RankLayout(device=plan.device, num_hosts=plan.num_nodes, ranks_per_host=plan.processes_per_node),
        folder=log_folder,
        heartbeat_file=HeartbeatFile(job.heartbeat_path, job.training.start_timeout_s, job.training.heartbeat_timeout_s),
        poll=poll,
        launcher=launcher,
    )


def _max_ranks_per_host(plan: PlanFile, *, launcher: Launcher) -> int:
    """Return the number of ranks per host in `plan`, or the number of this host's GPUs if it is smaller."""
    if launcher.kind == "local" and plan.device == "cuda":
        return min(plan.processes_per_node, torch.cuda.device_count())
    return plan.processes_per_node


def _with_fewer_ranks(job: TrainJob, *, setup: TrainingSetup, plan: PlanFile, max_ranks_per_host: int) -> TrainJob | None:
    """Return `job` with a plan for fewer ranks and the same number of examples per step; None if there is no such plan.

    The new world size divides the world size of the original plan and is at least training.min_processes. First the number of
    hosts is reduced, then the number of ranks of a single host.
    """
    num_planned_ranks = job.num_planned_ranks or plan.world_size
    min_ranks = job.training.min_processes or num_planned_ranks
    cluster_sizes = [(num_hosts, plan.processes_per_node) for num_hosts in range(plan.num_nodes - 1, 0, -1)]
    cluster_sizes += [(1, num_ranks) for num_ranks in range(min(plan.processes_per_node - 1, max_ranks_per_host), 0, -1)]
    num_nodes, processes_per_node = next((size for size in cluster_sizes if num_planned_ranks % math.prod(size) == 0), (0, 0))
    world_size = num_nodes * processes_per_node
    if world_size < min_ranks:
        return None
    batch_size = job.training.batch_size * plan.world_size // world_size
    if batch_size > MAX_BATCH_SIZE:
        logger.warning(
            "there is no attempt with %d ranks instead of %d: its training.batch_size would be %d, but at most %d is possible",
            world_size,
            plan.world_size,
            batch_size,
            MAX_BATCH_SIZE,
        )
        return None
    training = job.training.model_copy(update={"batch_size": batch_size})
    cluster_update = {
        "device": plan.device,
        "num_nodes": num_nodes,
        "processes_per_node": processes_per_node,
        "hbm_gb": plan.cluster.hbm_gb,
        "ddr_gb": plan.cluster.ddr_gb,
    }
    cluster = setup.sharding.cluster.model_copy(update=cluster_update)
    sharding = setup.sharding.model_copy(update={"cluster": cluster})
    try:
        smaller_plan = replace(setup, training=training, sharding=sharding).make_plan(job.open_dataset())
    except InputError as error:
        logger.warning("there is no plan with %d ranks instead of %d: %s", world_size, plan.world_size, error)
        return None
    plan_path = job.work_folder / f"plan-{world_size}.json"
    plan_path.write_text(smaller_plan.model_dump_json(indent=2))
    logger.warning("continuing with %d ranks instead of %d", world_size, plan.world_size)
    return job.model_copy(update={"plan_path": plan_path, "num_planned_ranks": num_planned_ranks, "training": training})
