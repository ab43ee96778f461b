"""Launches of a job: a training has several attempts, and each resumes from the last verified checkpoint."""

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from recsys_core.disk import write_text
from recsys_core.errors import InputError, LaunchError
from recsys_core.launching.config import Launcher
from recsys_core.launching.heartbeat import HeartbeatFile
from recsys_core.launching.launch import launch
from recsys_core.launching.messages import RankLayout
from recsys_core.sharding.config import ShardingConfig
from recsys_core.sharding.lookup_stats import measure_lookups
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.sharding.planner import make_plan
from recsys_core.training.checkpoint import latest_checkpoint
from recsys_core.training.job.job_spec import CHECKPOINTS_FOLDER, JOB_FILE, ExportJob, TrainJob

logger = logging.getLogger(__name__)
MAX_FAILURES_PER_WORLD_SIZE = 2


def launch_job(
    job: TrainJob | ExportJob, *, launcher: Launcher, log_folder: Path, poll: Callable[[], None] = lambda: None
) -> None:
    """Write the job file, and run the ranks of the job's plan; raise the errors of `launch`."""
    job_path, plan = job.work / JOB_FILE, PlanFile.read(job.plan)
    write_text(job_path, job.model_dump_json(indent=2))
    launch(
        job_path,
        layout=RankLayout(device=plan.device, num_hosts=plan.num_nodes, ranks_per_host=plan.processes_per_node),
        folder=log_folder,
        heartbeat_file=HeartbeatFile(job.heartbeat, job.training.start_timeout_s, job.training.heartbeat_timeout_s),
        poll=poll,
        launcher=launcher,
    )


def run_attempts(job: TrainJob, *, launcher: Launcher, sharding: ShardingConfig, poll: Callable[[], None]) -> TrainJob:
    """Launch `job` until an attempt succeeds, at most job.training.max_attempts times; return the job of this attempt.

    Each attempt resumes from the newest checkpoint. After two failures in a row, or after one if this host now has too few
    GPUs, the next attempt uses fewer ranks, if job.training.min_processes allows it.

    Args:
        sharding: settings of the plan, from which plans with fewer ranks are made.
        poll: called about five times a second.

    Raises LaunchError if the last attempt failed, and the InputError or StageError of any attempt.
    """
    num_failures = 0
    while True:
        checkpoint = latest_checkpoint(job.work / CHECKPOINTS_FOLDER, fingerprint=job.fingerprint)
        job = job.model_copy(update={"resume": None if checkpoint is None else checkpoint.folder})
        sharding_plan = PlanFile.read(job.plan)
        if job.attempt > 1 or checkpoint is not None:
            step = 0 if checkpoint is None else checkpoint.step
            logger.info("attempt %d: %d ranks, from step %d", job.attempt, sharding_plan.world_size, step)
        try:
            launch_job(job, launcher=launcher, log_folder=job.work / "logs" / f"attempt-{job.attempt}", poll=poll)
            return job
        except LaunchError as error:
            if job.attempt == job.training.max_attempts:
                raise
            logger.warning("training attempt %d of %d failed: %s", job.attempt, job.training.max_attempts, error)
        num_failures += 1
        if num_failures >= MAX_FAILURES_PER_WORLD_SIZE or (launcher.kind == "local" and _lacks_gpus(sharding_plan)):
            smaller_job = _with_fewer_ranks(job, sharding_plan=sharding_plan, sharding=sharding)
            if smaller_job is not None:
                job, num_failures = smaller_job, 0
        job = job.model_copy(update={"attempt": job.attempt + 1})


def _lacks_gpus(sharding_plan: PlanFile) -> bool:
    return (
        sharding_plan.device == "cuda"
        and sharding_plan.num_nodes == 1
        and torch.cuda.device_count() < sharding_plan.processes_per_node
    )


def _with_fewer_ranks(job: TrainJob, *, sharding_plan: PlanFile, sharding: ShardingConfig) -> TrainJob | None:
    """Return `job` with a plan for fewer ranks and the same number of examples per step; None if there is no such plan.

    The new world size divides the world size of the original plan and is at least training.min_processes.
    """
    num_planned_ranks = job.planned_ranks or sharding_plan.world_size
    min_world_size = job.training.min_processes or num_planned_ranks
    cluster_sizes = (
        cluster_size for cluster_size in _smaller_clusters(sharding_plan) if num_planned_ranks % math.prod(cluster_size) == 0
    )
    num_nodes, processes_per_node = next(cluster_sizes, (0, 0))
    world_size = num_nodes * processes_per_node
    if world_size < min_world_size:
        return None
    batch_size = job.training.batch_size * sharding_plan.world_size // world_size
    smaller_cluster = sharding.cluster.model_copy(
        update={
            "device": sharding_plan.device,
            "num_nodes": num_nodes,
            "processes_per_node": processes_per_node,
            "hbm_gb": sharding_plan.cluster.hbm_gb,
            "ddr_gb": sharding_plan.cluster.ddr_gb,
        }
    )
    try:
        smaller_plan = make_plan(
            sharding.model_copy(update={"cluster": smaller_cluster}),
            model=job.spec,
            batch_size=batch_size,
            lookup_stats=measure_lookups(job.spec, batch_size=batch_size, loss=job.loss, dataset=job.open_dataset()),
        )
    except InputError as error:
        logger.warning("there is no plan with %d ranks instead of %d: %s", world_size, sharding_plan.world_size, error)
        return None
    plan_path = job.work / f"plan-{world_size}.json"
    plan_path.write_text(smaller_plan.model_dump_json(indent=2))
    logger.warning("continuing with %d ranks instead of %d", world_size, sharding_plan.world_size)
    training_config = job.training.model_copy(update={"batch_size": batch_size})
    return job.model_copy(update={"plan": plan_path, "planned_ranks": num_planned_ranks, "training": training_config})


def _smaller_clusters(sharding_plan: PlanFile) -> Iterator[tuple[int, int]]:
    """Yield (number of hosts, ranks per host): first with fewer hosts, then with fewer ranks on one host."""
    yield from ((num_nodes, sharding_plan.processes_per_node) for num_nodes in range(sharding_plan.num_nodes - 1, 0, -1))
    yield from ((1, num_processes) for num_processes in range(sharding_plan.processes_per_node - 1, 0, -1))
