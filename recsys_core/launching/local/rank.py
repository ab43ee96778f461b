"""Registration of a rank with its launcher: the rank ends with its agent, reports its start, dumps stacks on request.

This module does not import torch, because `register_rank` runs before the import of torch, which takes seconds.
"""

import faulthandler
import os
import platform
import signal
from pathlib import Path

import psutil

from recsys_core.launching.messages import FOLDER_VARIABLE, Host, LaunchFolder, RankReport
from recsys_core.parent_process import die_with_parent

STACK_SIGNAL = signal.SIGUSR1


def register_rank() -> None:
    """Tie this rank to its agent, install the stack dump, and report that the rank has started."""
    die_with_parent()
    folder, rank = LaunchFolder(Path(os.environ[FOLDER_VARIABLE])), int(os.environ["RANK"])
    # A C signal handler writes the dump, so it works while Python waits in a collective. The file must stay open.
    faulthandler.register(STACK_SIGNAL, file=folder.stack_path(rank).open("w"))
    host = Host(index=int(os.environ["GROUP_RANK"]), name=platform.node())
    folder.write(f"rank-{rank}.json", RankReport(rank=rank, host=host, pid=os.getpid()))


def request_stacks(folder: LaunchFolder, *, host: Host) -> None:
    """Signal the ranks of this host that have started. The signal would end a rank that has not installed its handler yet."""
    for rank_report in folder.started_ranks().values():
        if rank_report.host.index == host.index and psutil.pid_exists(rank_report.pid):
            os.kill(rank_report.pid, STACK_SIGNAL)
