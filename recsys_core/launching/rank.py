"""What a rank does before anything heavy is imported: it ties itself to its agent and can be asked where it is."""

import faulthandler
import os
import platform
import signal
from pathlib import Path

from recsys_core.launching.messages import FOLDER_VARIABLE, NODE_VARIABLE, LaunchFolder, StartedRank
from recsys_core.parent_process import die_with_parent

STACK_SIGNAL = signal.SIGUSR1


def begin_rank() -> None:
    """Ends with the agent from here on; on SIGUSR1 all threads' stacks go to stack-R.txt, also while a collective hangs."""
    die_with_parent()
    folder, rank = LaunchFolder(Path(os.environ[FOLDER_VARIABLE])), int(os.environ["RANK"])
    # Written by a C signal handler, so it works while Python waits inside a collective. The file stays open for it.
    faulthandler.register(STACK_SIGNAL, file=folder.stack(rank).open("w"))
    started = StartedRank(rank=rank, node=int(os.environ[NODE_VARIABLE]), host=platform.node(), pid=os.getpid())
    folder.write(f"rank-{rank}.json", started)
