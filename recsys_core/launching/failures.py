"""Why a launch did not end well: from what its hosts wrote down to one error for the user."""

import re
from collections.abc import Iterable

from recsys_core.disk import DISK_FULL_MESSAGE, MIN_STAGE_BYTES, disk_full_error, free_bytes
from recsys_core.errors import InputError, LaunchError, StageError
from recsys_core.launching.messages import Failure, LaunchFolder, RankFailure
from recsys_core.units import gib

SHOWN_CALLS = 6
WRAPPERS = {"wrapper", "<module>", "_run_code", "_run_module_as_main"}
"""Calls that say nothing about where a rank is."""
ON_PURPOSE = re.compile(r"^recsys_core\.errors\.(InputError|StageError): (.*)", re.MULTILINE | re.DOTALL)
OUT_OF_MEMORY = re.compile(r"^\S*(?:OutOfMemoryError: .*|.*can't allocate memory.*)|^MemoryError.*", re.MULTILINE)
PEER_IS_GONE = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|remote process exited|ncclRemoteError|ncclSystemError|DistNetworkError"
)

PURPOSE, SIGNAL, RAISED, PEER, ENDED = range(5)
"""What counts as the cause before what: a peer's broken connection and torchrun's SIGTERM are consequences."""


def error_of(failures: Iterable[Failure], *, nodes: int, folder: LaunchFolder) -> InputError | StageError:
    """The one error that tells what happened first. What a rank raised on purpose keeps its class and its sentence."""
    found = sorted(failures, key=lambda failure: failure.node)
    ranks = [(rank, failure) for failure in found for rank in failure.ranks]
    reasons = [failure for failure in found if failure.reason]
    if reasons and all(_order_of(rank) in (PEER, ENDED) for rank, _ in ranks):
        error = LaunchError if all(failure.retryable for failure in reasons) else InputError
        return error("\n".join(failure.reason for failure in reasons))
    rank, host = min(ranks, key=lambda pair: (_order_of(pair[0]), pair[0].timestamp, pair[0].rank))
    said = ON_PURPOSE.search(rank.traceback)
    if said:  # a sentence for the user, which every new attempt would raise again
        return (InputError if said[1] == "InputError" else StageError)(said[2].strip())
    where = f" on host {host.host}" if nodes > 1 else ""
    full = DISK_FULL_MESSAGE.search(f"{rank.traceback}\n{rank.last_lines}")
    if full or free_bytes(folder.path) < MIN_STAGE_BYTES:
        return disk_full_error(folder.path, needed=f"what rank {rank.rank}{where} writes does not fit{_line_of(full)}")
    how = "an exception" if rank.traceback else f"signal {rank.signal}" if rank.signal else f"exit code {rank.exit_code}"
    told = [f"rank {rank.rank}{where} was the first to fail, with {how}{_about_memory(rank, host)}:"]
    if _order_of(rank) == PEER:
        told.append("(it lost another rank, but no host tells of one that failed: an agent was killed, or a host is gone)")
    told += [rank.traceback or rank.last_lines or "(it printed nothing)", f"logs of all ranks: {folder.path}"]
    return LaunchError("\n".join(told))


def _line_of(match: re.Match[str] | None) -> str:
    """The line of a match, in brackets: it may name a file."""
    if match is None:
        return ""
    start, end = match.string.rfind("\n", 0, match.start()) + 1, match.string.find("\n", match.end())
    return f" ({match.string[start : None if end < 0 else end].strip()[:300]})"


def _order_of(rank: RankFailure) -> int:
    if rank.traceback:  # torchrun's SIGTERM may have come after it was written
        if ON_PURPOSE.search(rank.traceback):
            return PURPOSE
        return PEER if PEER_IS_GONE.search(rank.traceback) else RAISED
    return ENDED if rank.signal == "SIGTERM" else SIGNAL if rank.signal else RAISED


def _about_memory(rank: RankFailure, host: Failure) -> str:
    limit = gib(host.memory_bytes or 0)
    lower = "lower training.batch_size, use fewer ranks per host or more hosts, or raise the limit"
    if rank.signal == "SIGKILL":
        if host.oom_kills:
            return f"; the kernel's out-of-memory killer ended {host.oom_kills} of its processes at a limit of {limit}: {lower}"
        return f" (if nobody sent it: out of memory? This host's limit is {limit}; the kernel's log, dmesg, would tell)"
    said = OUT_OF_MEMORY.search(rank.traceback)
    return f"; {said[0].strip()[:300]}; {lower}" if said else ""


def where_ranks_are(folder: LaunchFolder, *, world_size: int) -> str:
    """One line per rank: its innermost functions, from the stacks it was asked for."""
    ranks = folder.ranks()
    lines = []
    for rank in range(world_size):
        if rank not in ranks:
            lines.append(f"rank {rank}: has not started")
            continue
        path = folder.stack(rank)
        stack = path.read_text(errors="replace") if path.is_file() else ""
        lines.append(f"rank {rank} (host {ranks[rank].host}, process {ranks[rank].pid}): {_innermost(stack)}")
    return "\n".join(lines)


def _innermost(stack: str) -> str:
    r"""The main thread's calls, innermost first.

    >>> _innermost('Thread 0x1:\n  File "/x/pool.py", line 3 in idle\n\nCurrent thread 0x2 (most recent call first):\n'
    ...            '  File "/a/torch/c10d.py", line 7 in all_reduce\n  File "/b/recsys_core/loop.py", line 9 in run\n')
    'all_reduce (c10d.py:7) <- run (loop.py:9)'
    """
    threads = [re.findall(r'File "([^"]*)", line (\d+) in (\S+)', thread) for thread in stack.split("\n\n")]
    threads = [thread for thread in threads if thread]
    if not threads:
        return "did not answer"
    calls = [call for call in threads[-1] if call[2] not in WRAPPERS]  # the main thread comes last
    return " <- ".join(f"{name} ({file.rsplit('/', 1)[-1]}:{line})" for file, line, name in calls[:SHOWN_CALLS])
