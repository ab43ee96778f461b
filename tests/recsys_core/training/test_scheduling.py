import os
import subprocess
import sys

import pytest

from recsys_core.training.scheduling import let_running_threads_go_on

if sys.platform != "linux":
    pytest.skip("policies are Linux's", allow_module_level=True)

OWN_AND_A_LATER_THREADS = """
import os, threading
from recsys_core.training.scheduling import let_running_threads_go_on
let_running_threads_go_on()
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


def test_a_policy_that_somebody_chose_stays() -> None:
    assert policies("chrt", "--idle", "0") == [os.SCHED_IDLE, os.SCHED_IDLE]


def test_a_sandbox_that_refuses_costs_speed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    let_running_threads_go_on()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
