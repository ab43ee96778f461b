"""Launches a training until it is done: each attempt a fresh process group, from the last verified checkpoint."""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from recsys_core.errors import InputError, LaunchError
from recsys_core.launching.config import Launcher
from recsys_core.launching.launch import launch
from recsys_core.manifests import Dataset, FeaturesManifest, InteractionsManifest, require_manifest
from recsys_core.sharding.config import ShardingConfig
from recsys_core.sharding.lookup_stats import measure_lookups
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.sharding.planner import make_plan
from recsys_core.training.checkpoint import JOB_COPY, latest_checkpoint
from recsys_core.training.job_spec import Progress, TrainJob
from recsys_core.training.loop import CHECKPOINTS_NAME, METRICS_NAME, RESULT_NAME
from recsys_core.training.metrics_log import MetricsTail

logger = logging.getLogger(__name__)
FAILURES_AT_ONE_SIZE = 2


class Finished(NamedTuple):
    """How many launches it took, and the plan of the last."""

    attempts: int
    plan: Path


def launch_until_done(
    job: TrainJob, *, launcher: Launcher, sharding: ShardingConfig | None, on_progress: Callable[[Progress], None]
) -> Finished:
    """Launches `job` up to job.training.max_attempts times; each line of metrics.jsonl goes to on_progress once.

    Where training.min_processes allows, the second failure in a row is followed by an attempt with fewer processes, for which
    `sharding` is planned again. Raises the last attempt's LaunchError, or at once what a new attempt would only repeat.
    """
    work, config = job.work, job.training
    work.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work / "logs", ignore_errors=True)
    (work / RESULT_NAME).unlink(missing_ok=True)
    tail = MetricsTail(work / METRICS_NAME, on_progress)
    failures = 0
    for attempt in range(1, config.max_attempts + 1):
        checkpoint = latest_checkpoint(work / CHECKPOINTS_NAME, fingerprint=job.fingerprint)
        job = job.model_copy(update={"attempt": attempt, "resume": None if checkpoint is None else checkpoint.folder})
        job_file = work / JOB_COPY
        job_file.write_text(job.model_dump_json(indent=2))
        plan = PlanFile.read(job.plan)
        if attempt > 1 or checkpoint is not None:
            start = "the start" if checkpoint is None else f"step {checkpoint.step}"
            logger.info("attempt %d: %d ranks, from %s", attempt, plan.world_size, start)
        try:
            launch(
                job_file,
                plan=plan,
                logs=work / "logs" / f"attempt-{attempt}",
                start_timeout_s=config.start_timeout_s,
                heartbeat_timeout_s=config.heartbeat_timeout_s,
                alive=work / METRICS_NAME,
                poll=tail.relay,
                launcher=launcher,
            )
            return Finished(attempt, job.plan)
        except LaunchError as error:
            if attempt == config.max_attempts:
                raise
            logger.warning("training attempt %d of %d failed: %s", attempt, config.max_attempts, error)
            failures += 1
            if sharding is not None and (failures >= FAILURES_AT_ONE_SIZE or (launcher.kind == "local" and _lacks_gpus(plan))):
                smaller = _with_fewer_ranks(job, plan=plan, sharding=sharding)
                job, failures = smaller or job, 0 if smaller else failures
    raise AssertionError("unreachable: attempts is at least 1")


def _lacks_gpus(plan: PlanFile) -> bool:
    return plan.device == "cuda" and plan.num_nodes == 1 and torch.cuda.device_count() < plan.processes_per_node


def _with_fewer_ranks(job: TrainJob, *, plan: PlanFile, sharding: ShardingConfig) -> TrainJob | None:
    """`job` for the next smaller world size that divides the planned one, with as many examples per step; None if none fits."""
    planned = job.planned_ranks or plan.world_size
    for nodes, processes in _smaller_clusters(plan):
        world_size = nodes * processes
        if planned % world_size or world_size < (job.training.min_processes or planned):
            continue
        training = job.training.model_copy(update={"batch_size": job.training.batch_size * plan.world_size // world_size})
        memory = {"hbm_gb": plan.cluster.hbm_gb, "ddr_gb": plan.cluster.ddr_gb}
        smaller = {"device": plan.device, "num_nodes": nodes, "processes_per_node": processes}
        cluster = sharding.cluster.model_copy(update=smaller | memory)
        try:
            interactions = require_manifest(job.interactions, InteractionsManifest, verify=False)
            features = None if job.features is None else require_manifest(job.features, FeaturesManifest, verify=False)
            made = make_plan(
                sharding.model_copy(update={"cluster": cluster}),
                model=job.spec,
                batch_size=training.batch_size,
                optimizer=training.table_optimizer,
                lookup_stats=measure_lookups(
                    job.spec,
                    batch_size=training.batch_size,
                    loss=job.loss,
                    dataset=Dataset(interactions, features=features),
                ),
            )
        except InputError as error:
            logger.warning("with %d ranks instead of %d there is no plan: %s", world_size, plan.world_size, error)
            return None
        path = job.work / f"plan-{world_size}.json"
        path.write_text(made.model_dump_json(indent=2))
        logger.warning("going on with %d ranks instead of %d", world_size, plan.world_size)
        return job.model_copy(update={"plan": path, "planned_ranks": planned, "training": training})
    return None


def _smaller_clusters(plan: PlanFile) -> Iterator[tuple[int, int]]:
    """Fewer hosts first, then fewer processes on one."""
    yield from ((nodes, plan.processes_per_node) for nodes in range(plan.num_nodes - 1, 0, -1))
    yield from ((1, processes) for processes in range(plan.processes_per_node - 1, 0, -1))
