"""Ranks without a model that follow a script: `launch(module="tests.recsys_core.launching.scripted_ranks")`.

The job is JSON: {"script": {rank: action}, "heartbeat": file}. A rank without an action exits with code 0 after one collective.
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

    record(run)(Path(job_path))


def run(job_path: Path) -> None:
    import torch
    from torch import distributed as dist

    from recsys_core.errors import InputError
    from recsys_core.launching.rank import join_process_group

    job = json.loads(job_path.read_text())
    with join_process_group(device_type="cpu") as process:
        heartbeat = Path(job["heartbeat"])
        if process.is_main:
            heartbeat.touch()
        num_ranks = torch.ones(1)
        dist.all_reduce(num_ranks)
        heartbeat.with_name(f"sum-{process.rank}").write_text(str(int(num_ranks)))
        match job["script"].get(str(process.rank)):
            case "reject input":
                raise InputError("the input is invalid; fix it")
            case "kill itself":
                os.kill(os.getpid(), signal.SIGKILL)
            case "run out of GPU memory":
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
            case "fill the disk":
                heartbeat.with_name("filler").write_bytes(bytes(2**24))
            case "hang":
                hang()
            case "wait":
                while True:
                    heartbeat.touch()
                    time.sleep(0.1)
        dist.barrier()


def hang() -> None:
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
