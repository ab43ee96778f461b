import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from recsys_core.parent_process import parent_environment

CHILD = (
    "from recsys_core.parent_process import die_with_parent; {before}; die_with_parent(); "
    "print('alive', flush=True); import time; time.sleep(60)"
)


def start_grandchild(before: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Start a parent that starts CHILD and waits; return both."""
    code = (
        "import os, subprocess, sys; from recsys_core.parent_process import parent_environment; "
        f"p = subprocess.Popen([sys.executable, '-c', {CHILD.format(before=before)!r}], "
        "env=os.environ | parent_environment()); "
        "print(p.pid, flush=True); p.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


@pytest.mark.parametrize("before", ["pass", "import time; time.sleep(2)"])
def test_a_child_ends_with_its_killed_parent_also_when_it_had_not_asked_yet(before: str) -> None:
    parent, child = start_grandchild(before)
    if before == "pass":
        assert parent.stdout is not None and parent.stdout.readline() == "alive\n"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs([child], timeout=10)
    assert not alive


def test_a_process_without_the_parent_variable_continues() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in parent_environment()}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(before="pass")], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "alive\n"
    time.sleep(0.2)
    assert child.poll() is None
    child.kill()
    child.wait()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_child_ends_with_the_reader_of_its_output_also_if_the_reader_has_ended_before(is_late: bool) -> None:
    child_code = (
        "import sys, time; from recsys_core.parent_process import die_with_stdout_reader; "
        f"time.sleep({2 if is_late else 0}); die_with_stdout_reader(); print('alive', file=sys.stderr, flush=True); "
        "time.sleep(60)"
    )
    code = (
        "import subprocess, sys; "
        f"p = subprocess.Popen([sys.executable, '-c', {child_code!r}], stdout=subprocess.PIPE, stderr=subprocess.PIPE); "
        f"{'pass' if is_late else 'p.stderr.readline()'}; print(p.pid, flush=True); p.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs([child], timeout=10)
    assert not alive
