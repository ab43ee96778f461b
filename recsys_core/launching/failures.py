"""The cause of a failed launch: one error, chosen from the failures that the hosts reported."""

import re
from collections.abc import Iterable

from recsys_core.disk import DISK_FULL_PATTERN, MIN_STAGE_BYTES, disk_full_error, free_bytes
from recsys_core.errors import InputError, LaunchError, StageError
from recsys_core.launching.messages import HostFailure, LaunchFolder, RankFailure
from recsys_core.units import format_gib

NIGHTJAR_ERROR_PATTERN = re.compile(r"^recsys_core\.errors\.(InputError|StageError): (.*)", re.MULTILINE | re.DOTALL)
OUT_OF_MEMORY_PATTERN = re.compile(r"^\S*(?:OutOfMemoryError: .*|.*can't allocate memory.*)|^MemoryError.*", re.MULTILINE)
PEER_LOST_PATTERN = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|remote process exited|ncclRemoteError|ncclSystemError|DistNetworkError"
)
NIGHTJAR_RAISED, SIGNALLED, RAISED, LOST_PEER, TERMINATED = range(5)
"""Kinds of rank failure, the most likely cause first. A lost peer and torchrun's SIGTERM are consequences of other failures."""


def error_from_failures(
    host_failures: Iterable[HostFailure], *, num_nodes: int, folder: LaunchFolder
) -> InputError | StageError:
    """Return the error for the most likely cause of the failed launch.

    If several failures are equally likely causes, the earliest one is chosen. An InputError or StageError of a rank keeps its
    class and message.
    """
    host_failures = sorted(host_failures, key=lambda failure: failure.node)
    agent_failures = [failure for failure in host_failures if failure.reason]
    rank_and_host_failures = [
        (failure, host_failure) for host_failure in host_failures for failure in host_failure.rank_failures
    ]
    if agent_failures and all(_failure_kind(failure) in (LOST_PEER, TERMINATED) for failure, _ in rank_and_host_failures):
        error_type = LaunchError if all(agent_failure.retryable for agent_failure in agent_failures) else InputError
        return error_type("\n".join(agent_failure.reason for agent_failure in agent_failures))
    cause, host_failure = min(
        rank_and_host_failures, key=lambda pair: (_failure_kind(pair[0]), pair[0].timestamp, pair[0].rank)
    )
    nightjar_error_match = NIGHTJAR_ERROR_PATTERN.search(cause.traceback)
    if nightjar_error_match:
        return (InputError if nightjar_error_match[1] == "InputError" else StageError)(nightjar_error_match[2].strip())
    rank_name = f"rank {cause.rank} on host {host_failure.host}" if num_nodes > 1 else f"rank {cause.rank}"
    disk_full_match = DISK_FULL_PATTERN.search(f"{cause.traceback}\n{cause.last_lines}")
    if disk_full_match or free_bytes(folder.path) < MIN_STAGE_BYTES:
        # The quoted line names the full disk, which can be another disk than that of the folder.
        quote = f" ({_line_around(disk_full_match)})" if disk_full_match else ""
        return disk_full_error(folder.path, reason=f"the output of {rank_name} does not fit{quote}")
    end_description = f"signal {cause.signal}" if cause.signal else f"exit code {cause.exit_code}"
    if cause.traceback:
        end_description = "an exception"
    message_lines = [f"{rank_name} was the first to fail, with {end_description}{_memory_hint(cause, host_failure)}:"]
    if _failure_kind(cause) == LOST_PEER:
        message_lines.append(
            "(it lost the connection to another rank, and no host reported why the other rank failed: an agent was killed, or "
            "a host is down)"
        )
    message_lines += [cause.traceback or cause.last_lines or "(no output)", f"logs of all ranks: {folder.path}"]
    return LaunchError("\n".join(message_lines))


def _failure_kind(failure: RankFailure) -> int:
    if failure.traceback:  # torchrun may have sent SIGTERM to the rank after its exception
        if NIGHTJAR_ERROR_PATTERN.search(failure.traceback):
            return NIGHTJAR_RAISED
        return LOST_PEER if PEER_LOST_PATTERN.search(failure.traceback) else RAISED
    if failure.signal == "SIGTERM":
        return TERMINATED
    return SIGNALLED if failure.signal else RAISED


def _line_around(match: re.Match[str]) -> str:
    """Return the line of the text that contains the match."""
    line_start, line_end = match.string.rfind("\n", 0, match.start()) + 1, match.string.find("\n", match.end())
    return match.string[line_start : None if line_end < 0 else line_end].strip()[:300]


def _memory_hint(failure: RankFailure, host_failure: HostFailure) -> str:
    """Describe the memory limit of a rank that was killed or raised an out-of-memory error; empty for other failures."""
    memory_limit = format_gib(host_failure.memory_bytes or 0)
    advice = "lower training.batch_size, use fewer ranks per host or more hosts, or raise the limit"
    if failure.signal == "SIGKILL":
        if host_failure.oom_kills:
            return (
                f"; the kernel's out-of-memory killer ended {host_failure.oom_kills} of the host's processes at a limit of "
                f"{memory_limit}: {advice}"
            )
        return (
            f" (possibly out of memory: the memory limit of this host is {memory_limit}; its kernel log, dmesg, shows "
            "out-of-memory kills)"
        )
    out_of_memory_match = OUT_OF_MEMORY_PATTERN.search(failure.traceback)
    return f"; {out_of_memory_match[0].strip()[:300]}; {advice}" if out_of_memory_match else ""
