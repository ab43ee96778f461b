"""Ranks without a model that perform an action: `launch(module="tests.recsys_core.launching.scripted_ranks")`.

The job is JSON: {"action_by_rank": {rank: action}, "heartbeat_path": path}. All ranks take part in a collective. A rank without
an action then exits with code 0.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from recsys_core.launching.rank import register_rank


def main(job_path: str) -> None:
    register_rank()
    from torch.distributed.elastic.multiprocessing.errors import record

    record(run_rank)(Path(job_path))


def run_rank(job_path: Path) -> None:
    """Join the other ranks, then execute the action that the job file has for this rank."""
    import torch
    from torch import distributed as dist

    from recsys_core.errors import InputError
    from recsys_core.launching.rank import join_process_group

    job = json.loads(job_path.read_text())
    with join_process_group(device_type="cpu") as process:
        heartbeat_path = Path(job["heartbeat_path"])
        if process.is_main:
            heartbeat_path.touch()
        num_ranks = torch.ones(1)
        dist.all_reduce(num_ranks)
        heartbeat_path.with_name(f"num-ranks-{process.rank}").write_text(str(int(num_ranks)))
        match job["action_by_rank"].get(str(process.rank)):
            case "reject input":
                raise InputError("the input is invalid; fix it")
            case "kill itself":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fill the disk":
                heartbeat_path.with_name("filler").write_bytes(bytes(2**24))
            case "hang":
                hang()
            case "wait":
                while True:
                    heartbeat_path.touch()
                    time.sleep(0.1)
        dist.barrier()


def hang() -> None:
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
