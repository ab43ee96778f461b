"""The cause of a failed launch: one error for the user, chosen from the failures that the hosts reported."""

import re
from collections.abc import Iterable

from recsys_core.disk import DISK_FULL_MESSAGE, MIN_STAGE_BYTES, disk_full_error, free_bytes
from recsys_core.errors import InputError, LaunchError, StageError
from recsys_core.launching.messages import HostFailure, LaunchFolder, RankFailure
from recsys_core.units import gib

OUR_ERROR = re.compile(r"^recsys_core\.errors\.(InputError|StageError): (.*)", re.MULTILINE | re.DOTALL)
OUT_OF_MEMORY = re.compile(r"^\S*(?:OutOfMemoryError: .*|.*can't allocate memory.*)|^MemoryError.*", re.MULTILINE)
PEER_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|remote process exited|ncclRemoteError|ncclSystemError|DistNetworkError"
)
OURS, SIGNALLED, RAISED, LOST_PEER, TERMINATED = range(5)
"""Kinds of rank failure, the most likely cause first: a lost peer and torchrun's SIGTERM follow from another failure."""


def error_from_failures(failures: Iterable[HostFailure], *, num_nodes: int, folder: LaunchFolder) -> InputError | StageError:
    """Return the error for the failure that came first. An InputError or StageError of a rank keeps its class and message."""
    failures = sorted(failures, key=lambda failure: failure.node)
    rank_failures = [(rank, failure) for failure in failures for rank in failure.ranks]
    host_failures = [failure for failure in failures if failure.reason]
    if host_failures and all(_kind_of(rank) in (LOST_PEER, TERMINATED) for rank, _ in rank_failures):
        error = LaunchError if all(failure.retryable for failure in host_failures) else InputError
        return error("\n".join(failure.reason for failure in host_failures))
    rank, host = min(rank_failures, key=lambda pair: (_kind_of(pair[0]), pair[0].timestamp, pair[0].rank))
    ours = OUR_ERROR.search(rank.traceback)
    if ours:
        return (InputError if ours[1] == "InputError" else StageError)(ours[2].strip())
    where = f" on host {host.host}" if num_nodes > 1 else ""
    disk_full = DISK_FULL_MESSAGE.search(f"{rank.traceback}\n{rank.last_lines}")
    if disk_full or free_bytes(folder.path) < MIN_STAGE_BYTES:
        quote = f" ({_line_around(disk_full)})" if disk_full else ""  # it may name a file on another disk
        return disk_full_error(folder.path, needed=f"the output of rank {rank.rank}{where} does not fit{quote}")
    how = "an exception" if rank.traceback else f"signal {rank.signal}" if rank.signal else f"exit code {rank.exit_code}"
    lines = [f"rank {rank.rank}{where} was the first to fail, with {how}{_memory_hint(rank, host)}:"]
    if _kind_of(rank) == LOST_PEER:
        lines.append(
            "(it lost the connection to another rank, but no host reported a failed rank: an agent was killed, or a host is "
            "down)"
        )
    lines += [rank.traceback or rank.last_lines or "(no output)", f"logs of all ranks: {folder.path}"]
    return LaunchError("\n".join(lines))


def _kind_of(rank: RankFailure) -> int:
    if rank.traceback:  # also if torchrun sent SIGTERM after the rank wrote it
        if OUR_ERROR.search(rank.traceback):
            return OURS
        return LOST_PEER if PEER_LOST.search(rank.traceback) else RAISED
    if rank.signal == "SIGTERM":
        return TERMINATED
    return SIGNALLED if rank.signal else RAISED


def _line_around(match: re.Match[str]) -> str:
    """Return the whole line of a match."""
    start, end = match.string.rfind("\n", 0, match.start()) + 1, match.string.find("\n", match.end())
    return match.string[start : None if end < 0 else end].strip()[:300]


def _memory_hint(rank: RankFailure, host: HostFailure) -> str:
    """Return what is known about the memory of a rank that was killed or reported that it was out of memory."""
    limit = gib(host.memory_bytes or 0)
    advice = "lower training.batch_size, use fewer ranks per host or more hosts, or raise the limit"
    if rank.signal == "SIGKILL":
        if host.oom_kills:
            return (
                f"; the kernel's out-of-memory killer ended {host.oom_kills} of its processes at a limit of {limit}: {advice}"
            )
        return f" (possibly out of memory: the limit of this host is {limit}; its kernel log, dmesg, shows out-of-memory kills)"
    message = OUT_OF_MEMORY.search(rank.traceback)
    return f"; {message[0].strip()[:300]}; {advice}" if message else ""
