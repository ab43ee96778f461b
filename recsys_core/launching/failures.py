"""The error of a failed launch: the most likely cause among the reports of the hosts, and the stacks of ranks that hang."""

import re
from collections.abc import Callable, Iterable

from recsys_core.disk import DISK_FULL_PATTERN, MIN_STAGE_BYTES, disk_full_error, free_bytes
from recsys_core.errors import InputError, LaunchError, StageError
from recsys_core.launching.messages import HostReport, LaunchFolder, RankReport
from recsys_core.units import format_gib

NIGHTJAR_ERROR_PATTERN = re.compile(r"^recsys_core\.errors\.(InputError|StageError): (.*)", re.MULTILINE | re.DOTALL)
OUT_OF_MEMORY_PATTERN = re.compile(r"^\S*(?:OutOfMemoryError: .*|.*can't allocate memory.*)|^MemoryError.*", re.MULTILINE)
PEER_LOST_PATTERN = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|remote process exited|ncclRemoteError|ncclSystemError|DistNetworkError"
)
PREDICATE_BY_CAUSE: dict[str, Callable[[RankReport], object]] = {
    "nightjar error": lambda rank_report: NIGHTJAR_ERROR_PATTERN.search(rank_report.traceback),
    "signal": lambda rank_report: not rank_report.traceback and rank_report.signal not in (None, "SIGTERM"),
    "exception": lambda rank_report: (
        not PEER_LOST_PATTERN.search(rank_report.traceback) and (rank_report.traceback or not rank_report.signal)
    ),
    "lost peer": lambda rank_report: rank_report.traceback,
    "terminated": lambda rank_report: True,
}
"""For each cause, a function that returns whether the cause applies to a failed rank. The most likely cause is first.

The last two causes are consequences of the failure of another rank: this rank lost its connection, or torchrun sent it
SIGTERM.
"""
CONSEQUENTIAL_CAUSES = ("lost peer", "terminated")
MAX_SHOWN_CALLS = 6
OUTERMOST_FUNCTIONS = {"wrapper", "<module>", "_run_code", "_run_module_as_main"}
"""Functions at the bottom of every rank's stack, which are not reported."""


def error_from_failures(
    failure_reports: Iterable[HostReport], *, num_hosts: int, folder: LaunchFolder
) -> InputError | StageError:
    """Return the error for the most likely cause of the failed launch.

    If several failures are equally likely causes, the earliest failure is chosen. An InputError or StageError of a rank keeps
    its class and message. failure_reports: reports of the hosts that failed.
    """
    failure_reports = list(failure_reports)
    rejection_reports = [host_report for host_report in failure_reports if host_report.reason]
    rank_and_host_reports = [
        (rank_report, host_report) for host_report in failure_reports for rank_report in host_report.failed_ranks
    ]
    if rejection_reports and all(_cause(rank_report) in CONSEQUENTIAL_CAUSES for rank_report, _ in rank_and_host_reports):
        error_type = LaunchError if all(host_report.is_retryable for host_report in rejection_reports) else InputError
        return error_type("\n".join(host_report.reason for host_report in rejection_reports))
    causes = list(PREDICATE_BY_CAUSE)
    rank_report, host_report = min(
        rank_and_host_reports, key=lambda reports: (causes.index(_cause(reports[0])), reports[0].timestamp, reports[0].rank)
    )
    nightjar_error_match = NIGHTJAR_ERROR_PATTERN.search(rank_report.traceback)
    if nightjar_error_match:
        return (InputError if nightjar_error_match[1] == "InputError" else StageError)(nightjar_error_match[2].strip())
    rank_name = f"rank {rank_report.rank}" + (f" on host {rank_report.host.name}" if num_hosts > 1 else "")
    disk_full_match = DISK_FULL_PATTERN.search(f"{rank_report.traceback}\n{rank_report.last_lines}")
    if disk_full_match or free_bytes(folder.path) < MIN_STAGE_BYTES:
        # Quote the line that names the full disk, because the launch folder may be on another disk.
        disk_full_quote = f" ({_line_around(disk_full_match)})" if disk_full_match else ""
        return disk_full_error(folder.path, reason=f"the output of {rank_name} does not fit{disk_full_quote}")
    end_description = f"signal {rank_report.signal}" if rank_report.signal else f"exit code {rank_report.exit_code}"
    if rank_report.traceback:
        end_description = "an exception"
    message_lines = [f"{rank_name} was the first to fail, with {end_description}{_memory_hint(rank_report, host_report)}:"]
    if _cause(rank_report) == "lost peer":
        message_lines.append(
            "(it lost the connection to another rank, and no host reported why the other rank failed: an agent was killed, or "
            "a host is down)"
        )
    message_lines += [rank_report.traceback or rank_report.last_lines or "(no output)", f"logs of all ranks: {folder.path}"]
    return LaunchError("\n".join(message_lines))


def _cause(rank_report: RankReport) -> str:
    return next(cause for cause, is_cause_of in PREDICATE_BY_CAUSE.items() if is_cause_of(rank_report))


def _line_around(match: re.Match[str]) -> str:
    """Return the first 300 characters of the line that contains the match."""
    line_start, line_end = match.string.rfind("\n", 0, match.start()) + 1, match.string.find("\n", match.end())
    return match.string[line_start : None if line_end < 0 else line_end].strip()[:300]


def _memory_hint(rank_report: RankReport, host_report: HostReport) -> str:
    """Return a hint about the memory of a rank that was killed or raised an out-of-memory error; empty for other failures."""
    memory_limit_text = format_gib(host_report.memory_bytes or 0)
    advice = "lower training.batch_size, use fewer ranks per host or more hosts, or raise the limit"
    if rank_report.signal == "SIGKILL":
        if host_report.num_oom_kills:
            return (
                f"; the kernel's out-of-memory killer ended {host_report.num_oom_kills} of the host's processes at a limit of "
                f"{memory_limit_text}: {advice}"
            )
        return (
            f" (possibly out of memory: the memory limit of this host is {memory_limit_text}; its kernel log, dmesg, shows "
            "out-of-memory kills)"
        )
    out_of_memory_match = OUT_OF_MEMORY_PATTERN.search(rank_report.traceback)
    return f"; {out_of_memory_match[0].strip()[:300]}; {advice}" if out_of_memory_match else ""


def format_stacks(folder: LaunchFolder, *, world_size: int) -> str:
    """Return one line per rank with the innermost functions of its stack dump."""
    start_report_by_rank = folder.start_reports()
    rank_lines = []
    for rank in range(world_size):
        if rank not in start_report_by_rank:
            rank_lines.append(f"rank {rank}: has not started")
            continue
        stack_path = folder.stack_path(rank)
        stack_dump = stack_path.read_text(errors="replace") if stack_path.is_file() else ""
        rank_report = start_report_by_rank[rank]
        rank_lines.append(
            f"rank {rank} (host {rank_report.host.name}, process {rank_report.pid}): {_innermost_calls(stack_dump)}"
        )
    return "\n".join(rank_lines)


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
        f"{function} ({file_path.rsplit('/', 1)[-1]}:{line})" for file_path, line, function in calls[:MAX_SHOWN_CALLS]
    )
