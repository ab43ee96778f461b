"""torchrun with two additions: it dies with its parent, and it writes down which rank failed first."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from recsys_core.config import Frozen
from recsys_core.parent import as_parent, die_with_parent

FAILURES = "failure.json"


class Failure(Frozen):
    """The first rank that failed; signal is a name such as SIGKILL, traceback is empty where Python could not write one."""

    rank: int
    exit_code: int
    signal: str | None
    traceback: str


def main(logs: str, processes: str, job: str) -> int:
    """Starts `processes` ranks of recsys_core.training on `job`; their output goes to `logs`."""
    die_with_parent()
    os.environ.update(as_parent())
    arguments = parse_args(  # type: ignore[no-untyped-call]
        [
            *("--nnodes", "1", "--nproc-per-node", processes, "--max-restarts", "0"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", Path(logs).name),
            *("--local-addr", "127.0.0.1", "--log-dir", logs, "--redirects", "3"),
            *("--module", "recsys_core.training", job),
        ]
    )
    try:
        run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        # torchrun ends the other ranks by SIGTERM; one that is quick to write that down would count as the first to fail.
        culprits = {rank: one for rank, one in error.failures.items() if one.exitcode != -signal.SIGTERM} or error.failures
        rank, first = min(culprits.items(), key=lambda pair: pair[1].timestamp)
        failure = Failure(
            rank=rank,
            exit_code=first.exitcode,
            signal=signal.Signals(-first.exitcode).name if first.exitcode < 0 else None,
            traceback=_traceback(first.error_file_data),
        )
        (Path(logs) / FAILURES).write_text(failure.model_dump_json())
        return 1
    return 0


def _traceback(reply: dict[str, Any]) -> str:
    """The callstack that @record left in the rank's error file; empty when a signal gave it no time to."""
    message = reply.get("message")
    return str(message["extraInfo"]["py_callstack"]) if isinstance(message, dict) else ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
