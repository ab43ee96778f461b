"""The error that a launch raises for the reports of all failed hosts."""

from pathlib import Path
from traceback import format_exc
from typing import Any

import pytest
import torch

from recsys_core.errors import InputError, LaunchError, StageError
from recsys_core.launching.failures import error_from_failures, format_stacks
from recsys_core.launching.messages import Host, HostReport, LaunchFolder, RankReport

LOST_PEER_TRACEBACK = (
    "Traceback (most recent call last):\nRuntimeError: [gloo/pair.cc:547] Connection closed by peer [10.0.0.7]:4242\n"
)
BUG_TRACEBACK = "Traceback (most recent call last):\nKeyError: 'no such key'\n"


def rank_report(rank: int, *, traceback: str = "", signal: str | None = None, timestamp: int = 100) -> RankReport:
    """Return the report of a failed rank. Rank 0 is on host 0 (alpha), and the later ranks are on host 1 (beta)."""
    host_index = min(rank, 1)
    host = Host(index=host_index, name=("alpha", "beta")[host_index])
    return RankReport(
        rank=rank,
        host=host,
        pid=1,
        exit_code=1 if signal is None else -9,
        signal=signal,
        traceback=traceback,
        last_lines="its last line",
        timestamp=timestamp,
    )


def host_report(index: int, *failed_ranks: RankReport, **fields: Any) -> HostReport:
    host = Host(index=index, name=("alpha", "beta")[index])
    return HostReport(host=host, pid=1, failed_ranks=failed_ranks, **fields)


def error_of(*host_reports: HostReport, num_hosts: int = 2) -> InputError | StageError:
    return error_from_failures(host_reports, num_hosts=num_hosts, folder=LaunchFolder(Path("/logs")))


def test_the_error_names_a_killed_rank_instead_of_an_earlier_failure_on_another_host() -> None:
    lost_peer_report = host_report(0, rank_report(0, traceback=LOST_PEER_TRACEBACK, timestamp=90))
    killed_rank_report = host_report(1, rank_report(1, signal="SIGKILL"), num_oom_kills=0, memory_bytes=2**34)
    error = error_of(lost_peer_report, killed_rank_report)
    assert str(error).startswith("rank 1 on host beta was the first to fail, with signal SIGKILL (possibly out of memory:")
    assert "limit of this host is 16.0 GiB" in str(error) and "its last line" in str(error) and isinstance(error, LaunchError)


def test_out_of_memory_kills_that_the_kernel_counted_are_reported_with_the_limit() -> None:
    report = host_report(0, rank_report(0, signal="SIGKILL"), num_oom_kills=1, memory_bytes=2**34)
    error = error_of(report, num_hosts=1)
    assert "rank 0 was the first to fail, with signal SIGKILL; the kernel's out-of-memory killer ended 1 of the" in str(error)
    assert "at a limit of 16.0 GiB: lower training.batch_size" in str(error)


def test_an_exhausted_gpu_is_reported_with_advice_and_traceback() -> None:
    try:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
    except torch.cuda.OutOfMemoryError:
        report = host_report(0, rank_report(0, traceback=format_exc()))
    message = str(error_of(report, num_hosts=1))
    assert message.startswith("rank 0 was the first to fail, with an exception; torch")
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB; lower training.batch_size" in message
    assert 'raise torch.cuda.OutOfMemoryError("CUDA' in message, "the traceback is missing"


def test_an_exception_is_the_cause_and_not_a_lost_peer_or_the_sigterm_of_torchrun() -> None:
    lost_peer_report = host_report(
        0, rank_report(0, traceback=LOST_PEER_TRACEBACK, timestamp=90), rank_report(1, signal="SIGTERM", timestamp=80)
    )
    bug_report = host_report(1, rank_report(2, traceback=BUG_TRACEBACK, signal="SIGTERM"))
    assert str(error_of(lost_peer_report, bug_report)).startswith(
        "rank 2 on host beta was the first to fail, with an exception:\n" + BUG_TRACEBACK
    )


def test_the_earlier_of_two_exceptions_is_reported() -> None:
    rank_reports = (
        rank_report(0, traceback=BUG_TRACEBACK, timestamp=100),
        rank_report(1, traceback=BUG_TRACEBACK, timestamp=99),
    )
    assert str(error_of(host_report(0, *rank_reports), num_hosts=1)).startswith("rank 1 was")


@pytest.mark.parametrize("error_class", [InputError, StageError])
def test_an_input_or_stage_error_of_a_rank_keeps_its_class_and_message(error_class: type[Exception]) -> None:
    message = "plan.json: made for 4 ranks\nplan again"
    traceback = f"Traceback (most recent call last):\nrecsys_core.errors.{error_class.__name__}: {message}\n"
    rank_reports = (rank_report(0, signal="SIGKILL", timestamp=1), rank_report(1, traceback=traceback))
    error = error_of(host_report(0, *rank_reports))
    assert type(error) is error_class and str(error) == message


def test_a_rejected_host_is_an_input_error_unless_another_attempt_may_succeed() -> None:
    rejected_host_report = host_report(1, reason="host 1 (beta) has nightjar 0.0.9", is_retryable=False)
    unconnected_host_report = host_report(0, reason="host 0 (alpha) could not connect to the other hosts")
    assert isinstance(error_of(rejected_host_report, unconnected_host_report), InputError)
    assert type(error_of(unconnected_host_report)) is LaunchError


def test_a_full_disk_in_a_traceback_is_an_input_error_with_the_file_and_the_free_space() -> None:
    full_disk_traceback = (
        "Traceback (most recent call last):\nOSError: [Errno 28] No space left on device: '/scratch/x'\nin write\n"
    )
    error = error_of(host_report(1, rank_report(1, traceback=full_disk_traceback)))
    assert isinstance(error, InputError) and str(error).startswith(
        "/logs: the output of rank 1 on host beta does not fit (OSError: [Errno 28] No space left on device: '/scratch/x'), "
        "but the disk has "
    )


def test_format_stacks_has_a_line_for_every_rank_even_without_its_stack(tmp_path: Path) -> None:
    folder = LaunchFolder(tmp_path)
    for rank in range(2):
        folder.report_start(RankReport(rank=rank, host=Host(index=0, name="alpha"), pid=40 + rank))
    folder.stack_path(0).write_text(
        'Current thread 0x1 (most recent call first):\n  File "/x/torch/c10d.py", line 7 in all_reduce\n'
    )
    assert format_stacks(folder, world_size=3).splitlines() == [
        "rank 0 (host alpha, process 40): all_reduce (c10d.py:7)",
        "rank 1 (host alpha, process 41): did not respond",
        "rank 2: has not started",
    ]
