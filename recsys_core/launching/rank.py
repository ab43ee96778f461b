"""Registration of a rank with its launcher: the rank ends with its agent, reports its start, dumps stacks on request.

This module does not import torch, because `register_rank` runs before the import of torch, which takes seconds.
"""

import faulthandler
import os
import platform
import re
import signal
from pathlib import Path

import psutil

from recsys_core.launching.messages import FOLDER_VARIABLE, NODE_VARIABLE, LaunchFolder, RankStarted
from recsys_core.parent_process import die_with_parent

STACK_SIGNAL = signal.SIGUSR1
NUM_SHOWN_CALLS = 6
OUTERMOST_FUNCTIONS = {"wrapper", "<module>", "_run_code", "_run_module_as_main"}
"""Functions at the bottom of every rank's stack, which are not reported."""


def register_rank() -> None:
    """Tie this rank to its agent, install the stack dump, and report that the rank has started."""
    die_with_parent()
    folder, rank = LaunchFolder(Path(os.environ[FOLDER_VARIABLE])), int(os.environ["RANK"])
    # A C signal handler writes the dump, so it works while Python waits in a collective. The file must stay open.
    faulthandler.register(STACK_SIGNAL, file=folder.stack_path(rank).open("w"))
    rank_started = RankStarted(rank=rank, node=int(os.environ[NODE_VARIABLE]), host=platform.node(), pid=os.getpid())
    folder.write(f"rank-{rank}.json", rank_started)


def request_stacks(folder: LaunchFolder, *, node: int) -> None:
    """Signal the ranks of this host that have started. The signal would end a rank that has not installed its handler yet."""
    for started_rank in folder.started_ranks().values():
        if started_rank.node == node and psutil.pid_exists(started_rank.pid):
            os.kill(started_rank.pid, STACK_SIGNAL)


def format_stacks(folder: LaunchFolder, *, world_size: int) -> str:
    """Return one line per rank with its innermost functions."""
    started_ranks = folder.started_ranks()
    lines = []
    for rank in range(world_size):
        if rank not in started_ranks:
            lines.append(f"rank {rank}: has not started")
            continue
        stack_path = folder.stack_path(rank)
        stack_dump = stack_path.read_text(errors="replace") if stack_path.is_file() else ""
        host, pid = started_ranks[rank].host, started_ranks[rank].pid
        lines.append(f"rank {rank} (host {host}, process {pid}): {_innermost_calls(stack_dump)}")
    return "\n".join(lines)


def _innermost_calls(stack_dump: str) -> str:
    r"""Return the calls of the main thread, innermost first.

    >>> _innermost_calls('Thread 0x1:\n  File "/x/pool.py", line 3 in idle\n\nCurrent thread 0x2 (most recent call first):\n'
    ...                  '  File "/a/torch/c10d.py", line 7 in all_reduce\n  File "/b/recsys_core/loop.py", line 9 in run\n')
    'all_reduce (c10d.py:7) <- run (loop.py:9)'
    """
    calls_by_thread = [
        re.findall(r'File "([^"]*)", line (\d+) in (\S+)', thread_dump) for thread_dump in stack_dump.split("\n\n")
    ]
    calls_by_thread = [calls for calls in calls_by_thread if calls]
    if not calls_by_thread:
        return "did not respond"
    calls = [call for call in calls_by_thread[-1] if call[2] not in OUTERMOST_FUNCTIONS]  # the main thread is the last one
    return " <- ".join(
        f"{function} ({file_path.rsplit('/', 1)[-1]}:{line})" for file_path, line, function in calls[:NUM_SHOWN_CALLS]
    )
