"""One rank's work, by the kind of its job."""

import os
from pathlib import Path

from recsys_core.patches.rank import prepare_rank
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training.export_job import run_export
from recsys_core.training.job_spec import JOB, TrainJob
from recsys_core.training.loop import run_training
from recsys_core.training.process_group import join_process_group


def run_job(job_file: Path) -> None:
    """Collective. Does what the job file says."""
    job = JOB.validate_json(job_file.read_bytes())
    device = PlanFile.read(job.plan).device
    if device == "cpu":
        prepare_rank(rank=int(os.environ["LOCAL_RANK"]), ranks=int(os.environ["LOCAL_WORLD_SIZE"]))
    with join_process_group(device=device) as process:
        if isinstance(job, TrainJob):
            run_training(job, process=process)
        else:
            run_export(job, process=process)
