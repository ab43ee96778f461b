"""The scheduling policy and the cores of a rank's process."""

import os
import subprocess
import sys

import pytest

from recsys_core.launching.rank import use_batch_scheduling

if sys.platform != "linux":
    pytest.skip("only Linux has these scheduling policies", allow_module_level=True)

CORES = sorted(os.sched_getaffinity(0))
PRINT_POLICIES_SCRIPT = """
import os, threading
from recsys_core.launching.rank import use_batch_scheduling
use_batch_scheduling()
policies = [os.sched_getscheduler(0)]
thread = threading.Thread(target=lambda: policies.append(os.sched_getscheduler(threading.get_native_id())))
thread.start(); thread.join()
print(*policies)
"""


def scheduling_policies(*command_prefix: str) -> list[int]:
    """Return the scheduling policies of the main thread of a new process and of a thread that it starts."""
    completed_process = subprocess.run(
        [*command_prefix, sys.executable, "-c", PRINT_POLICIES_SCRIPT], capture_output=True, text=True, check=True
    )
    return [int(policy) for policy in completed_process.stdout.split()]


def test_batch_scheduling_applies_to_the_process_and_its_later_threads() -> None:
    assert scheduling_policies() == [os.SCHED_BATCH, os.SCHED_BATCH]


def test_a_policy_set_by_the_user_is_kept() -> None:
    assert scheduling_policies("chrt", "--idle", "0") == [os.SCHED_IDLE, os.SCHED_IDLE]


def test_a_sandbox_that_forbids_the_policy_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", deny)
    use_batch_scheduling()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def cores_of(rank: int, num_ranks: int) -> set[int]:
    """Return the cores of a new process that is pinned as one of `num_ranks` ranks."""
    completed_process = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; from recsys_core.launching.rank import pin_to_core_share; "
            f"pin_to_core_share(local_rank={rank}, num_local_ranks={num_ranks}); print(*os.sched_getaffinity(0))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return {int(core) for core in completed_process.stdout.split()}


@pytest.mark.skipif(len(CORES) < 2, reason="this machine has one core")
def test_ranks_share_the_cores_without_overlap():
    cores_of_rank_0, cores_of_rank_1 = cores_of(0, 2), cores_of(1, 2)
    assert len(cores_of_rank_0) == len(cores_of_rank_1) == len(CORES) // 2
    assert not cores_of_rank_0 & cores_of_rank_1 and cores_of_rank_0 | cores_of_rank_1 <= set(CORES)


def test_a_single_rank_and_more_ranks_than_cores_are_not_pinned():
    assert cores_of(0, 1) == cores_of(0, len(CORES) + 1) == set(CORES)
