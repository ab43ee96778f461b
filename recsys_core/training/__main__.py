"""Entry point of every rank: `python -m recsys_core.training JOB.json`, started by torchrun."""

import os
import sys
from pathlib import Path

from recsys_core.imports import fast_imports
from recsys_core.launching.rank import join_process_group, pin_to_core_share, register_rank, use_batch_scheduling
from recsys_core.patches.cpu_features import share_cpu_features

if __name__ == "__main__":
    register_rank()
    share_cpu_features()
    # torch is imported only here, because share_cpu_features must run before the import.
    with fast_imports():
        from torch.distributed.elastic.multiprocessing.errors import record

        from recsys_core.sharding.plan_file import PlanFile
        from recsys_core.training.export.export import run_export
        from recsys_core.training.job import JOB_ADAPTER, TrainJob
        from recsys_core.training.loop import run_training

    job = JOB_ADAPTER.validate_json(Path(sys.argv[1]).read_bytes())
    device = PlanFile.read(job.plan_path).device
    if device == "cpu":
        pin_to_core_share(local_rank=int(os.environ["LOCAL_RANK"]), num_local_ranks=int(os.environ["LOCAL_WORLD_SIZE"]))
        use_batch_scheduling()
    with join_process_group(device_type=device) as process:
        # `record` writes an exception to the rank's error file, which the agent reads.
        if isinstance(job, TrainJob):
            record(run_training)(job, process=process)
        else:
            record(run_export)(job, process=process)
