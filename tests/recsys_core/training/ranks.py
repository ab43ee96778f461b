"""Ranks that behave or misbehave as their job tells them, without a model: `launch(module="tests.recsys_core.training.ranks")`.

The job is JSON: {"does": {rank: what}, "alive": file}; a rank that is not named ends well after one collective.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from recsys_core.launching.rank import begin_rank


def main(job_file: str) -> None:
    begin_rank()
    from torch.distributed.elastic.multiprocessing.errors import record

    record(run)(Path(job_file))


def run(job_file: Path) -> None:
    import torch
    from torch import distributed as dist

    from recsys_core.errors import InputError
    from recsys_core.training.process_group import join_process_group

    job = json.loads(job_file.read_text())
    with join_process_group(device="cpu") as process:
        alive = Path(job["alive"])
        if process.is_main:
            alive.touch()
        everyone = torch.ones(1)
        dist.all_reduce(everyone)
        alive.with_name(f"sum-{process.rank}").write_text(str(int(everyone)))
        match job["does"].get(str(process.rank)):
            case "raise":
                raise ValueError(f"rank {process.rank} raises as its job says")
            case "refuse":
                raise InputError("the input is wrong; fix it")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "use too much memory":
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
            case "fill the disk":
                alive.with_name("filler").write_bytes(bytes(2**24))
            case "hang":
                wait_forever()
            case "wait":
                while True:
                    alive.touch()
                    time.sleep(0.1)
        dist.barrier()


def wait_forever() -> None:
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
