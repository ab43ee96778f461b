import os
import subprocess
import sys

import pytest

from recsys_core.patches.rank import keep_to_own_cores, run_as_batch_work

if sys.platform != "linux":
    pytest.skip("policies are Linux's", allow_module_level=True)

HERE = sorted(os.sched_getaffinity(0))
OWN_AND_A_LATER_THREADS = """
import os, threading
from recsys_core.patches.rank import run_as_batch_work
run_as_batch_work()
found = [os.sched_getscheduler(0)]
thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(threading.get_native_id())))
thread.start(); thread.join()
print(*found)
"""


def policies(*command: str) -> list[int]:
    """Of a fresh process's first thread and of one that it starts."""
    told = subprocess.run([*command, sys.executable, "-c", OWN_AND_A_LATER_THREADS], capture_output=True, text=True, check=True)
    return [int(policy) for policy in told.stdout.split()]


def test_a_rank_and_the_threads_it_starts_are_batch_work() -> None:
    assert policies() == [os.SCHED_BATCH, os.SCHED_BATCH]


def test_a_policy_that_was_chosen_for_the_process_stays() -> None:
    assert policies("chrt", "--idle", "0") == [os.SCHED_IDLE, os.SCHED_IDLE]


def test_a_sandbox_that_refuses_costs_speed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    run_as_batch_work()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def cores_of(rank: int, ranks: int) -> set[int]:
    """What a fresh process keeps."""
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; from recsys_core.patches.rank import keep_to_own_cores; "
            f"keep_to_own_cores(rank={rank}, ranks={ranks}); print(*os.sched_getaffinity(0))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return {int(core) for core in told.stdout.split()}


@pytest.mark.skipif(len(HERE) < 2, reason="one core")
def test_ranks_share_the_cores_without_overlap():
    shares = [cores_of(rank, 2) for rank in range(2)]
    assert len(shares[0]) == len(shares[1]) == len(HERE) // 2
    assert not shares[0] & shares[1] and shares[0] | shares[1] <= set(HERE)


def test_one_rank_and_more_ranks_than_cores_run_where_they_like():
    assert cores_of(0, 1) == cores_of(0, len(HERE) + 1) == set(HERE)


def test_on_many_cores_each_rank_has_neighbouring_ones(monkeypatch):
    kept = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(11)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(cores))
    for rank in range(3):
        keep_to_own_cores(rank=rank, ranks=3)
    assert kept == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
