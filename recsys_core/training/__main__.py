"""Entry of every rank: python -m recsys_core.training JOB.json, under torchrun."""

import sys
from pathlib import Path

from recsys_core.launching.rank import begin_rank
from recsys_core.patches.cpu_features import share_cpu_features


def main(job_file: str) -> None:
    """Joins the group and does what the job file says; an exception is left in the rank's error file for the agent."""
    begin_rank()
    share_cpu_features()
    # These imports take seconds, in which the rank is tied to its agent already.
    from torch.distributed.elastic.multiprocessing.errors import record

    from recsys_core.training.jobs import run_job

    record(run_job)(Path(job_file))


if __name__ == "__main__":
    main(sys.argv[1])
