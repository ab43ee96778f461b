"""Which of several failures is told, and how; from what hosts would have written, without processes."""

from pathlib import Path

import pytest

from recsys_core.errors import InputError, LaunchError, StageError
from recsys_core.launching.failures import error_of, where_ranks_are
from recsys_core.launching.messages import Failure, LaunchFolder, RankFailure, StartedRank

PEER = "Traceback (most recent call last):\nRuntimeError: [gloo/pair.cc:547] Connection closed by peer [10.0.0.7]:4242\n"
BUG = "Traceback (most recent call last):\nKeyError: 'no such thing'\n"


def rank(number: int, *, traceback: str = "", signal: str | None = None, timestamp: int = 100) -> RankFailure:
    code = 1 if signal is None else -9
    return RankFailure(
        rank=number, exit_code=code, signal=signal, traceback=traceback, last_lines="its last line", timestamp=timestamp
    )


def told(*failures: Failure, nodes: int = 2) -> InputError | StageError:
    return error_of(failures, nodes=nodes, folder=LaunchFolder(Path("/logs")))


def test_a_killed_rank_counts_before_the_peer_that_failed_earlier_on_another_host() -> None:
    peer = Failure(node=0, host="alpha", ranks=(rank(0, traceback=PEER, timestamp=90),))
    killed = Failure(node=1, host="beta", ranks=(rank(1, signal="SIGKILL"),), oom_kills=0, memory_bytes=2**34)
    error = told(peer, killed)
    assert str(error).startswith(
        "rank 1 on host beta was the first to fail, with signal SIGKILL (if nobody sent it: out of memory?"
    )
    assert "limit is 16.0 GiB" in str(error) and "its last line" in str(error) and isinstance(error, LaunchError)


def test_what_the_kernel_counted_is_told_as_a_fact() -> None:
    error = told(Failure(node=0, host="alpha", ranks=(rank(0, signal="SIGKILL"),), oom_kills=1, memory_bytes=2**34), nodes=1)
    assert "rank 0 was the first to fail, with signal SIGKILL; the kernel's out-of-memory killer ended 1 of its" in str(error)
    assert "at a limit of 16.0 GiB: lower training.batch_size" in str(error)


def test_an_exception_counts_before_a_peers_broken_connection_and_before_torchruns_own_sigterm() -> None:
    first = Failure(
        node=0, host="alpha", ranks=(rank(0, traceback=PEER, timestamp=90), rank(1, signal="SIGTERM", timestamp=80))
    )
    second = Failure(node=1, host="beta", ranks=(rank(2, traceback=BUG, signal="SIGTERM"),))
    assert str(told(first, second)).startswith("rank 2 on host beta was the first to fail, with an exception:\n" + BUG)


def test_of_two_exceptions_the_earlier_one_is_told() -> None:
    ranks = (rank(0, traceback=BUG, timestamp=100), rank(1, traceback=BUG, timestamp=99))
    assert str(told(Failure(node=0, host="alpha", ranks=ranks), nodes=1)).startswith("rank 1 was")


@pytest.mark.parametrize("kind", [InputError, StageError])
def test_what_a_rank_raised_on_purpose_keeps_its_class_and_is_told_alone(kind: type[Exception]) -> None:
    purpose = (
        f"Traceback (most recent call last):\nrecsys_core.errors.{kind.__name__}: plan.json: made for 4 ranks\nplan again\n"
    )
    error = told(Failure(node=0, host="alpha", ranks=(rank(0, signal="SIGKILL", timestamp=1), rank(1, traceback=purpose))))
    assert type(error) is kind and str(error) == "plan.json: made for 4 ranks\nplan again"


def test_a_host_that_is_not_fit_is_an_input_error_and_one_that_met_nobody_may_be_tried_again() -> None:
    unfit = Failure(node=1, host="beta", reason="host beta (node 1) runs nightjar 0.0.9", retryable=False)
    alone = Failure(node=0, host="alpha", reason="host alpha (node 0) did not meet the others")
    assert isinstance(told(unfit, alone), InputError)
    assert type(told(alone)) is LaunchError


def test_a_full_disk_in_a_ranks_own_words_is_an_input_error_with_its_file_and_what_is_free() -> None:
    words = "Traceback (most recent call last):\nOSError: [Errno 28] No space left on device: '/scratch/x'\nin write\n"
    error = told(Failure(node=1, host="beta", ranks=(rank(1, traceback=words),)))
    assert isinstance(error, InputError) and str(error).startswith(
        "/logs: what rank 1 on host beta writes does not fit (OSError: [Errno 28] No space left on device: '/scratch/x'), "
        "but the disk has "
    )


def test_where_ranks_are_is_told_for_each_also_for_those_that_did_not_start_or_answer(tmp_path: Path) -> None:
    folder = LaunchFolder(tmp_path)
    for number in range(2):
        folder.write(f"rank-{number}.json", StartedRank(rank=number, node=0, host="alpha", pid=40 + number))
    folder.stack(0).write_text(
        'Current thread 0x1 (most recent call first):\n  File "/x/torch/c10d.py", line 7 in all_reduce\n'
    )
    assert where_ranks_are(folder, world_size=3).splitlines() == [
        "rank 0 (host alpha, process 40): all_reduce (c10d.py:7)",
        "rank 1 (host alpha, process 41): did not answer",
        "rank 2: has not started",
    ]


def test_a_message_is_whole_or_absent_and_the_first_one_stays(tmp_path: Path) -> None:
    folder = LaunchFolder(tmp_path)
    folder.write("failure-0.json", Failure(node=0, host="alpha", reason="first"))
    with pytest.raises(FileExistsError):
        folder.write("failure-0.json", Failure(node=0, host="alpha", reason="second"))
    (tmp_path / "failure-1.json").write_text('{"node": 1,')  # as a network file system may show it for a moment
    assert [failure.reason for failure in folder.failures()] == ["first"]
    assert {path.name for path in tmp_path.iterdir()} == {"failure-0.json", "failure-1.json"}
