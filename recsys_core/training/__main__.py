"""Entry of every rank: python -m recsys_core.training JOB.json, under torchrun."""

import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from recsys_core.parent import die_with_parent
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training.export_job import run_export
from recsys_core.training.job import JOB, TrainJob
from recsys_core.training.loop import run_training
from recsys_core.training.process import join_process_group


@record
def main() -> None:
    """Joins the group and does what the job file says."""
    die_with_parent()
    job = JOB.validate_json(Path(sys.argv[1]).read_bytes())
    with join_process_group(device=PlanFile.read(job.plan).device) as process:
        if isinstance(job, TrainJob):
            run_training(job, process=process)
        else:
            run_export(job, process=process)


if __name__ == "__main__":
    main()
